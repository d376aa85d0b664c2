"""A key file that somebody may change at any time, as routers and workers follow it."""

from __future__ import annotations

import os
from pathlib import Path

from fleet_wire.peerkey import KEY_FILE_BYTES, longest_key_bytes, parse_lines


class KeyFile:
    """The last good keys stay in force, and new ones are taken when nobody has written for one look: half of a key would sign,
    too, and nobody else would believe it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: tuple[bytes, ...] = ()
        """Lines of the file; empty until there was a good one."""
        self._used_bytes = 0
        """Length of the longest of them."""
        self._stamp: object = None
        """Which version of the file they are of."""
        self._found: object = None
        """Which one was there at the last look."""
        self._problem = ""

    def look(self) -> str:
        """Look once. What is wrong with it, in words without a key, where that is another thing than before; else empty."""
        try:
            with self.path.open("rb") as opened:
                status = os.fstat(opened.fileno())
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                before, self._found = self._found, stamp
                if stamp == self._stamp:
                    self._problem = ""  # it is back as it was
                    return ""
                if self.keys and stamp != before:
                    return ""
                self._take(opened.read(KEY_FILE_BYTES + 1))
        except (OSError, ValueError) as error:
            problem = str(error.strerror if isinstance(error, OSError) else error)
            self._found = self._found if isinstance(error, ValueError) else None
            known, self._problem = self._problem, problem
            return problem if problem != known else ""
        self._stamp, self._problem = stamp, ""
        return ""

    def _take(self, raw: bytes) -> None:
        if len(raw) > KEY_FILE_BYTES:
            raise ValueError(f"it is longer than {KEY_FILE_BYTES} bytes")
        self.keys, self._used_bytes = parse_lines(raw, self._used_bytes), longest_key_bytes(raw)

    @property
    def is_outdated(self) -> bool:
        """What is on disk is not what is used."""
        return self._found != self._stamp
