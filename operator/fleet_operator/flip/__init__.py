"""Role flips seen from the operator: what is written to pods, what workers are asked, and the proof by tokens."""
