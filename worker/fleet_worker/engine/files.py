"""Files of a model, which somebody wrote: read up to a bound, so that none takes all memory before it is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fleet_worker.engine.errors import ModelFilesError

MAX_CONFIG_BYTES: Final = 16 * 1024 * 1024
"""config.json, generation_config.json, tokenizer_config.json: some hundred kilobytes at most, where added tokens are listed."""
MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
"""An index of shards: 8 MB for models of 100,000 tensors."""
MAX_TOKENIZER_BYTES: Final = 256 * 1024 * 1024
"""tokenizer.json: 34 MB for a vocabulary of 262,144."""


def read_bounded(path: Path, most: int) -> bytes:
    """The whole file; ModelFilesError when it is larger, OSError when it cannot be read."""
    with path.open("rb") as opened:
        found = opened.read(most + 1)
    if len(found) > most:
        raise ModelFilesError(f"{path} has more than {most} bytes")
    return found
