"""The engine's log goes to ours, and never holds up the engine: where ours cannot be written (a full disk, a collector that is
gone or does not read) lines are dropped and counted, because an engine that blocks on its own stderr serves nobody."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import IO

MAX_LINE = 4_096
MAX_HELD = 1_000
"""Lines that wait to be written."""
STDERR = 2


class LogPump:
    """Two threads: one reads what the engine says, always; one writes, when it can."""

    def __init__(self, heard: Callable[[str], bool], fd: int = STDERR) -> None:
        """`heard`: gets each line and says whether it is worth writing."""
        self._heard = heard
        self._fd = fd
        self._held: queue.Queue[bytes | None] = queue.Queue(MAX_HELD)
        self.dropped = 0
        """Lines that were not written."""
        self._told = 0
        self._writer = threading.Thread(target=self._write_all, name="engine-log", daemon=True)

    def start(self, stream: IO[bytes]) -> None:
        """Until the stream ends; closes it."""
        threading.Thread(target=self._read_all, args=(stream,), name="engine-stderr", daemon=True).start()
        self._writer.start()

    def finish(self, within_s: float) -> None:
        """Wait until what was said is written: the last words on our stderr are to be our own."""
        if self._writer.ident is not None:
            self._writer.join(within_s)

    def _read_all(self, stream: IO[bytes]) -> None:
        while line := stream.readline(MAX_LINE):
            if self._heard(line.decode(errors="replace")):
                self._hold(line)
        stream.close()
        self._hold(None)

    def _hold(self, line: bytes | None) -> None:
        """The oldest goes for it: the last words of an engine are those that are wanted."""
        while True:
            try:
                return self._held.put_nowait(line)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._held.get_nowait()
                    self.dropped += 1

    def _write_all(self) -> None:
        while (line := self._held.get()) is not None:
            dropped = self.dropped
            if dropped > self._told:
                line = b"LogDropped: %d lines of the engine could not be written\n%s" % (dropped - self._told, line)
            try:
                self._write(line)
                self._told = dropped
            except OSError:
                self.dropped += 1

    def _write(self, line: bytes) -> None:
        """Past Python's buffer: its lock would keep the agent from ending while a write waits."""
        while line:
            line = line[os.write(self._fd, line) :]
