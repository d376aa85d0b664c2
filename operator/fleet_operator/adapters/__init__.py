"""Adapters of running workers: told over their agents, heard from their state."""
