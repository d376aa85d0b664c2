"""KV hand-off: pools registered with NIXL, pulls under a lease, nothing believed before it is proven."""
