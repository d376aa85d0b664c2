"""Where a request goes: pure functions and plain state, no clock, no network, no randomness."""
