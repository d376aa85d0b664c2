"""One writer at a time: a Lease decides which operator process reconciles, a fence keeps a deposed one from writing."""
