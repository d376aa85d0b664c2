"""Who is fit to be asked: breakers per worker and pair, panic, silence, retry budget, resuming. Pure."""
