"""Admission: the API server asks before it stores a fleet or a scale. Never the only guard: the operator judges again."""
