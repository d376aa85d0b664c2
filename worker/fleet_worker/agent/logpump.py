"""What a worker says goes to its own stdout and stderr, and holds nobody up: where they cannot be written (a full disk, a
collector that is gone or does not read) lines are dropped and counted, because an engine that blocks on its own stderr serves
nobody, and an agent that does answers no probe."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import IO

MAX_LINE = 4_096
MAX_HELD = 1_000
"""Lines that wait to be written."""
STDOUT, STDERR = 1, 2
END_S = 1.0
"""Seconds in which the agent's last lines are written, as a rule."""


class LogWriter:
    """A thread that writes lines when it can; whoever says them goes on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._held: queue.Queue[bytes | None] = queue.Queue(MAX_HELD)
        self.dropped = 0
        """Lines that were not written."""
        self._told = 0
        self._writer = threading.Thread(target=self._write_all, name="log", daemon=True)

    def start(self) -> None:
        """From now on lines are written."""
        self._writer.start()

    def finish(self, within_s: float) -> None:
        """Wait until all up to the end (`hold(None)`) is written: the last words on our stderr are to be our own."""
        if self._writer.ident is not None:
            self._writer.join(within_s)

    def hold(self, line: bytes | None) -> None:
        """Write it when that is possible; None is the end. The oldest goes for it: the last words are those that are wanted."""
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
                line = b"LogDropped: %d lines could not be written\n%s" % (dropped - self._told, line)
            try:
                self._write(line)
                self._told = dropped
            except OSError:
                self.dropped += 1

    def _write(self, line: bytes) -> None:
        """Past Python's buffer: its lock would keep the agent from ending while a write waits."""
        while line:
            line = line[os.write(self._fd, line) :]


class LogPump(LogWriter):
    """Of an engine: one more thread reads what it says, always."""

    def __init__(self, heard: Callable[[str], bool], fd: int = STDERR) -> None:
        """`heard`: gets each line and says whether it is worth writing."""
        super().__init__(fd)
        self._heard = heard
        self._reader: threading.Thread | None = None

    def follow(self, stream: IO[bytes]) -> None:
        """Until the stream ends; closes it."""
        self._reader = threading.Thread(target=self._read_all, args=(stream,), name="engine-log", daemon=True)
        self._reader.start()
        self.start()

    def hear_out(self, within_s: float) -> None:
        """Wait until all that was said is heard: the stream's end."""
        if self._reader is not None:
            self._reader.join(within_s)

    def _read_all(self, stream: IO[bytes]) -> None:
        while line := stream.readline(MAX_LINE):
            if self._heard(line.decode(errors="replace")):
                self.hold(line)
        stream.close()
        self.hold(None)


class _Said(io.TextIOBase):
    """What print() and logging take for a stream."""

    def __init__(self, writer: LogWriter) -> None:
        self._to = writer
        self._part = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Whole lines are handed on, and parts of very long ones."""
        with self._lock:
            *lines, self._part = (self._part + text).split("\n")
            for line in lines:
                self._to.hold(f"{line}\n".encode(errors="replace"))
            if len(self._part) >= MAX_LINE:
                self._to.hold(self._part.encode(errors="replace"))
                self._part = ""
        return len(text)

    def end(self) -> None:
        """A line that was not ended is one now."""
        if self._part:
            self.write("\n")


@contextlib.contextmanager
def unheld(out_fd: int = STDOUT, err_fd: int = STDERR, end_s: float = END_S) -> Iterator[None]:
    """Inside, what this process prints or logs waits for nobody. An unexpected error is said and ends the process with 1, because
    Python itself would wait."""
    writers = (LogWriter(out_fd), LogWriter(err_fd))
    said = tuple(_Said(writer) for writer in writers)
    for writer in writers:
        writer.start()
    try:
        with contextlib.redirect_stdout(said[0]), contextlib.redirect_stderr(said[1]):
            try:
                yield
            except Exception:
                traceback.print_exc()
                sys.exit(1)
    finally:
        for writer, stream in zip(writers, said, strict=True):
            stream.end()
            writer.hold(None)
        end = time.monotonic() + end_s
        for writer in writers:
            writer.finish(max(0.0, end - time.monotonic()))
