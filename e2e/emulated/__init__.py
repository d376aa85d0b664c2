"""Workers without an engine, as processes: tokens that a test can compute, KV that moves between them, faults on demand."""
