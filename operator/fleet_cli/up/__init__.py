"""`fleet up`: a whole fleet on one machine, by the operator's own code."""
