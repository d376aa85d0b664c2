"""Files with the key that a fleet's pods share."""

from __future__ import annotations

import atexit
import os
import tempfile
from functools import lru_cache
from pathlib import Path


@lru_cache
def key_file(key: str) -> Path | None:
    """Empty: none."""
    if not key:
        return None
    descriptor, name = tempfile.mkstemp()
    os.write(descriptor, key.encode() * 64)
    os.close(descriptor)
    atexit.register(os.unlink, name)
    return Path(name)
