"""Cluster access: one small interface, two implementations (Kubernetes API, in-memory store), one contract test suite."""
