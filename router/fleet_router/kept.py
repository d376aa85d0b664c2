"""What the processes of one place among several have counted. One that dies takes its counters along, and the sum over all
would go down, which whoever reads it takes for a restart of them all: everything they ever counted would have come since.

So what each tells last lies in memory that its parent holds, and whoever comes in its place goes on from there. What it counted
after that nobody was told of.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import Final

from fleet_router.members import summed

HALF_BYTES: Final = 16 * 1024 * 1024
"""There is room for two texts: a process that is killed while it writes one leaves the one before."""
FIRST_AT: Final = 4_096
HEAD: Final = struct.Struct("=QQ")
"""Where the text lies that was told last, and its length in bytes."""


class Kept:
    """Of one process. `place`: file descriptor of the memory; None: it is the only process."""

    def __init__(self, place: int | None) -> None:
        self._place, self._half = place, 0
        self._before = cumulative(self._read())
        """Of those that were in this place before."""

    def with_before(self, text: str) -> str:
        """What this process has counted, as Prometheus text, with what those before it had. It is told next."""
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
