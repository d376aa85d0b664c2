"""Container output: a file of bounded size, and the last words for the termination message."""

from __future__ import annotations

import contextlib
from pathlib import Path


class ContainerLog:
    """Appends to `path`; when it reaches `bound` bytes it becomes `path`.1 and a new file begins."""

    def __init__(self, path: Path, bound: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._bound = bound
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()

    def write(self, data: bytes) -> None:
        """Add output; a piece larger than the bound keeps its end. What a full disk does not take is lost: a container must not
        stop because nobody can write down what it says."""
        with contextlib.suppress(OSError):
            self._append(data[-self._bound :])

    def _append(self, piece: bytes) -> None:
        if self._file.closed:  # the last attempt to begin a new file failed
            self._file = self._path.open("ab", buffering=0)
            self._size = self._file.tell()
        if self._size and self._size + len(piece) > self._bound:
            self._file.close()
            self._path.replace(self._path.with_suffix(".log.1"))
            self._file = self._path.open("ab", buffering=0)
            self._size = 0
        self._file.write(piece)
        self._size += len(piece)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Tail:
    """The last `bound` bytes of a stream."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._data = b""

    def write(self, data: bytes) -> None:
        """Add output."""
        self._data = (self._data + data)[-self._bound :]

    def text(self) -> str:
        """As text, from the beginning of a line when the stream was longer than the bound."""
        data = self._data
        if len(data) == self._bound and b"\n" in data[:-1]:
            data = data.partition(b"\n")[2]
        return data.decode(errors="replace").strip()
