"""What the routers of a fleet tell each other: load of workers, use of quotas, prefixes. Bounded, authenticated, never needed."""
