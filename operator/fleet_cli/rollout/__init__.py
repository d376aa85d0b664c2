"""`fleet rollout`: look at, stop, undo and repeat rollouts of a fleet in a cluster."""
