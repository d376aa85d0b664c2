"""Who holds the KV of which prefix: pure state, no clock, no network. A wrong hint costs time, never correctness."""
