"""Large bodies are read by a process of their own: JSON is parsed, and tokens are made into lists, by C code that holds the
interpreter's lock, in whatever thread: of a body of 4 MB for up to 400 ms, in which nobody's stream moved.

One process, begun with the first large body and ended when none came for a while, which gives back what it took (450 MB for 4 MB
of text). It answers one body at a time: a frame with what is asked, a frame with the body; back comes one frame. Its first frame
says by which files it makes tokens: when these are not those that the engine was loaded with, the engine reads by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Final

import msgspec

from fleet_worker.engine.errors import OverloadedError
from fleet_worker.engine.reading import Read, Terms, Told, What, packed, unpacked
from fleet_worker.engine.text import Text, text_digest

IDLE_S: Final = 600.0
MOST_S: Final = 60.0
"""For one body; a tokenizer is a file of somebody's, and its expressions may come to no end."""
MOST_BYTES: Final = 256 * 1024 * 1024
"""Of bodies that wait for their turn, or have it."""
NICE: Final = 5
"""Who streams goes first."""
PR_SET_PDEATHSIG: Final = 1
_SIZE: Final = struct.Struct(">I")


class Ask(msgspec.Struct, frozen=True):
    """The first frame of a question."""

    what: What
    terms: Terms


class Reader:
    """The process, seen from the engine. `digest`: of the files that make tokens, as the engine has them (text.text_digest)."""

    def __init__(
        self, folder: Path, digest: str, idle_s: float = IDLE_S, most_s: float = MOST_S, most_bytes: int = MOST_BYTES
    ) -> None:  # fmt: skip
        self._folder, self._digest = folder, digest
        self._most_bytes, self._bytes = most_bytes, 0
        self._idle_s, self._most_s = idle_s, most_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_other = False
        """The folder has another tokenizer than the engine."""
        self._one = asyncio.Semaphore(1)
        self._lock = threading.Lock()
        """Around the pipes: who waited for an answer may be gone, and its thread still reads."""
        self._idle: asyncio.TimerHandle | None = None

    async def read(self, raw: bytes, what: What, terms: Terms) -> Read | bytes | None:
        """What came of the body; None when there is no process that reads as this engine does. OverloadedError when it ended, or
        took too long, or too many wait."""
        if self._bytes + len(raw) > self._most_bytes:
            raise OverloadedError(f"large bodies wait to be read: {self._bytes} bytes of them, at most {self._most_bytes} may")
        self._bytes += len(raw)
        try:
            return await self._read(raw, what, terms)
        finally:
            self._bytes -= len(raw)

    async def _read(self, raw: bytes, what: What, terms: Terms) -> Read | bytes | None:
        async with self._one:
            if self._idle is not None:
                self._idle.cancel()
            working = asyncio.ensure_future(asyncio.to_thread(self._exchange, msgspec.msgpack.encode(Ask(what, terms)), raw))
            done, _ = await asyncio.wait({working}, timeout=self._most_s)
            if not done:
                self.close()
            try:
                told = await working
            except (OSError, EOFError, ValueError) as error:  # the last of a pipe that is closed
                self.close()
                words = f"took longer than {self._most_s:g} s" if not done else f"ended the process that did it: {error!r}"
                raise OverloadedError(f"to read this large body {words}") from error
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self.close)
        return None if told is None else unpacked(told, what)

    def close(self) -> None:
        """End the process; the next large body begins another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not written goes nowhere
                    pipe.close() if pipe is not None else None

    def _exchange(self, ask: bytes, raw: bytes) -> Told | None:
        with self._lock:
            process = None if self._is_other else self._process or self._begun()
            if process is None or process.stdin is None or process.stdout is None:
                return None
            send(process.stdin, ask)
            send(process.stdin, raw)
            return msgspec.msgpack.decode(receive(process.stdout), type=Told)

    def _begun(self) -> subprocess.Popen[bytes] | None:
        argv = [sys.executable, "-m", "fleet_worker.engine.reader", str(self._folder)]
        try:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            _without(f"it cannot be started: {error}")
            return None
        self._process = process  # from here on `close` ends it, which ends the waiting below
        try:
            theirs = receive(process.stdout).decode() if process.stdout is not None else ""
        except (OSError, EOFError, ValueError):
            theirs = ""
        if theirs == self._digest:
            return process
        self.close()
        self._is_other = bool(theirs)
        _without("it ended at its start" if not theirs else "the model's folder has another tokenizer by now")
        return None


def _without(why: str) -> None:
    print(f"NoReader: large bodies are read beside the streams, which may wait for it: {why}", file=sys.stderr, flush=True)


def send(pipe: IO[bytes], frame: bytes) -> None:
    """One frame."""
    pipe.write(_SIZE.pack(len(frame)))
    pipe.write(frame)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """One frame; EOFError when the other side is gone."""
    head = pipe.read(_SIZE.size)
    frame = pipe.read(_SIZE.unpack(head)[0]) if len(head) == _SIZE.size else None
    if frame is None or len(frame) != _SIZE.unpack(head)[0]:
        raise EOFError("no whole frame")
    return frame


def main() -> None:
    """Answer until stdin ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an engine that is killed in the midst of a body leaves none
    os.nice(NICE)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    folder = Path(sys.argv[1])
    digest = text_digest(folder)
    text = Text(folder)
    send(answers, digest.encode())
    while True:
        try:
            ask = msgspec.msgpack.decode(receive(sys.stdin.buffer), type=Ask)
            told = packed(receive(sys.stdin.buffer), ask.what, text, ask.terms)
        except EOFError:
            return
        send(answers, msgspec.msgpack.encode(told))


if __name__ == "__main__":
    main()
