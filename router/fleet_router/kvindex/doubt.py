"""A worker that holds blocks that are not known here, until it cannot hold any more of them. Pure.

They were told of before a replay began, or found no room. Nobody tells of them again; but engines evict what was used longest
ago. Whoever evicts blocks that it stored after the last sign of unknown ones has used none of those since: they are gone. The
signs are that one is evicted, or that blocks are stored behind one. A prompt that is found in such blocks as a whole gives none:
of it the worker owes events (`stream`).
"""

from __future__ import annotations

from typing import Final

Name = bytes | int
"""A worker's own of a block."""
TURNED: Final = 16
"""So many in a row: a block that was computed twice, say, goes once before its turn."""


class Doubt:
    """Of one worker. Where it is in doubt already, a second one is the same."""

    __slots__ = ("_fresh", "_orphans", "_turned")

    def __init__(self) -> None:
        self._fresh: set[Name] = set()
        """Stored since the last sign, behind blocks that are all known."""
        self._orphans: set[Name] = set()
        """Known, and behind ones that are not."""
        self._turned = 0

    def sign(self) -> None:
        """It holds, or has held until now, a block that is not known."""
        self._fresh.clear()
        self._turned = 0

    def is_orphan(self, name: Name) -> bool:
        """This block is behind one that is not known."""
        return name in self._orphans

    def stored(self, name: Name, *, orphan: bool) -> None:
        """One that is known now."""
        (self._orphans if orphan else self._fresh).add(name)

    def removed(self, name: Name) -> bool:
        """One that was known; True: the doubt is over."""
        self._orphans.discard(name)
        if name in self._fresh:
            self._fresh.discard(name)
            self._turned += 1
        return self._turned >= TURNED
