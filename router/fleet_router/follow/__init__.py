"""How the worker set and the configuration arrive: from the API server, or from a folder."""
