"""`fleet-worker fetch`: the model into the node's cache before a worker needs it; what a worker does first, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleet_worker.agent.errors import EXIT_CLEAN, ConfigError
from fleet_worker.agent.prepare import prepare_model
from fleet_worker.config import FETCH_ENV
from fleet_worker.weightfiles import WEIGHTS_ENV, as_reads


def fetch_model(env: Mapping[str, str] = os.environ) -> int:
    """Fetch FLEET_FETCH and return 0; ConfigError, ModelError."""
    source = env.get(FETCH_ENV, "")
    if not source.startswith("hf://"):
        raise ConfigError(f"{FETCH_ENV} is {source!r}; an hf:// source is needed")
    folder = prepare_model(source, lambda words: print(words, flush=True), as_reads(env.get(WEIGHTS_ENV, "")))
    print(f"{source} is at {folder}", flush=True)
    return EXIT_CLEAN
