"""What the processes of one place among several have counted. One that dies takes its counters along, and the sum over all
would go down, which whoever reads it takes for a restart of them all: everything they ever counted would have come since.

So what each tells last lies in memory that its parent holds, and whoever comes in its place goes on from there. What it counted
after that nobody was told of. Of revisions and adapters that are gone only a few are remembered: each life has its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Collection, Mapping
from typing import Final

from fleet_router.config import RouterConfig
from fleet_router.explain.inference_metrics import MODELS_MOST
from fleet_router.members import summed
from fleet_router.metrics import REVISIONS_MOST

HALF_BYTES: Final = 16 * 1024 * 1024
"""There is room for two texts: a process that is killed while it writes one leaves the one before."""
FIRST_AT: Final = 4_096
HEAD: Final = struct.Struct("=QQ")
"""Where the text lies that was told last, and its length in bytes."""
NAMES_MOST: Final = {"revision": REVISIONS_MOST // 2, "model_name": MODELS_MOST // 2}
"""Of each label as many values are kept whatever they are; where there are more, those alone that are there now."""
There = Mapping[str, Collection[str]]


class Kept:
    """Of one process. `place`: file descriptor of the memory; None: it is the only process."""

    def __init__(self, place: int | None) -> None:
        self._place, self._half = place, 0
        self._before = cumulative(self._read())
        """Of those that were in this place before."""
        self._bounded = False

    def with_before(self, text: str, there: There | None = None) -> str:
        """What this process has counted, as Prometheus text, with what those before it had. It is told next. `there`: by label,
        what is there now; None: nobody knows yet."""
        if there is not None and not self._bounded:
            self._before, self._bounded = bounded(self._before, there), True
        whole = summed([text, self._before]) if self._before else text
        self._write(whole.encode())
        return whole

    def _read(self) -> str:
        head = b"" if self._place is None else os.pread(self._place, HEAD.size, 0)
        if self._place is None or len(head) < HEAD.size:
            return ""
        at, length = HEAD.unpack(head)
        self._half = (at - FIRST_AT) // HALF_BYTES
        return os.pread(self._place, length, at).decode()

    def _write(self, text: bytes) -> None:
        if self._place is None or len(text) > HALF_BYTES:
            return
        half = 1 - self._half
        at = FIRST_AT + half * HALF_BYTES
        with contextlib.suppress(OSError):  # there is no memory: what was told before is kept
            if os.pwrite(self._place, text, at) == len(text):
                os.pwrite(self._place, HEAD.pack(at, len(text)), 0)
                self._half = half


def cumulative(text: str) -> str:
    """A text's counters and histograms that are not 0: what ran, and how full something was, ended with its process."""
    kept, grows = list[str](), False
    for line in text.splitlines():
        if line.startswith("#"):
            grows = line.endswith((" counter", " histogram"))
        if grows and not line.endswith((" 0", " 0.0")):
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def there_now(live: Collection[tuple[str, str]], config: RouterConfig) -> There | None:
    """`live`: (tier, revision) of those that have workers; without any it is not known who will be there."""
    if not live:
        return None
    return {"revision": {revision for _, revision in live}, "model_name": {config.served_name, *config.adapters}}


def bounded(text: str, there: There) -> str:
    """Without series of what is gone, where they are of more than NAMES_MOST."""
    for label, most in NAMES_MOST.items():
        said = re.compile(rf'[{{,]{label}="([^"]*)"')
        named = [(line, found[1] if (found := said.search(line)) else None) for line in text.splitlines()]
        if len({name for _, name in named if name is not None}) > most:
            text = "".join(f"{line}\n" for line, name in named if name is None or name in there[label])
    return text
