"""In a worker's PYTHONPATH: a node that has neither image nor model yet, and a vLLM that cannot hand KV over as it was told.

Python imports this by itself before anything else. PULL_S: so long the worker's agent does not begin, as where its image is
pulled; its engine is not kept waiting. LIAR: a file; while it is there a vLLM that is started as a consumer of KV has no
connector: it computes whatever it is asked for by itself, and its agent says that it serves.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

OPTION = "--kv-transfer-config"


def without_connector(argv: list[str]) -> list[str]:
    """The same command without that option and its value."""
    at = argv.index(OPTION)
    return [*argv[:at], *argv[at + 2 :]]


if "PULL_S" in os.environ:
    time.sleep(float(os.environ.pop("PULL_S")))
elif "LIAR" in os.environ and any("kv_consumer" in word for word in sys.orig_argv) and Path(os.environ["LIAR"]).exists():
    os.execv(sys.executable, without_connector(sys.orig_argv))  # noqa: S606 - the same program
