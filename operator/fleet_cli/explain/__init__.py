"""`fleet explain`: why a request went where it went."""
