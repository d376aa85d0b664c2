"""Prompts that workers were sent and have not computed yet.

KV events tell of blocks that are there. A prompt that waits in a worker's queue, or is being computed, will be there before one
that is sent after it: not to know of it sends the next prompt with its beginning elsewhere, to be computed once more, and most so
where queues are long. Keys as of `pieces`; a key is forgotten with the last prompt that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fleet_router.kvindex.masks import depths, drop_bit

KEYS_MOST: Final = 200_000
"""Of all workers together; prompts beyond them are not noted."""


class Underway:
    """Key → workers that it is on its way to. `most`: keys of all workers together."""

    __slots__ = ("_counts", "_most", "keys", "masks")

    def __init__(self, most: int = KEYS_MOST) -> None:
        self._most = most
        self.masks: dict[int, int] = {}
        self._counts: dict[int, dict[int, int]] = {}
        """Worker's bit → key → prompts with it."""
        self.keys = 0
        """At workers."""

    def sent(self, keys: list[int], bit: int) -> bool:
        """A prompt goes to this worker; False: there is no room to note it, and `over` is not to be called."""
        if self.keys + len(keys) > self._most:
            return False
        masks = self.masks
        counts = self._counts.get(bit)
        if counts is None:
            counts = self._counts[bit] = {}
        for key in keys:
            count = counts.get(key, 0)
            if not count:
                masks[key] = masks.get(key, 0) | bit
                self.keys += 1
            counts[key] = count + 1
        return True

    def over(self, keys: list[int], bit: int) -> None:
        """It is computed, or will not be."""
        counts = self._counts.get(bit)
        if counts is None:
            return
        for key in keys:
            count = counts.get(key, 0)
            if count > 1:
                counts[key] = count - 1
            elif count:
                del counts[key]
                drop_bit(self.masks, key, bit)
                self.keys -= 1

    def depths(self, keys: list[int], among: int) -> list[tuple[int, int]]:
        """(pieces, workers as bits), the deepest first."""
        return depths(self.masks, keys, among)

    def forget(self, bit: int) -> None:
        """The worker is gone, and somebody else may get its bit."""
        counts = self._counts.pop(bit, None)
        for key in counts or ():
            drop_bit(self.masks, key, bit)
            self.keys -= 1


def united(steps: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Steps of several indexes as those of one: most tokens first, each worker with the most that any of them knows of."""
    found, seen = [], 0
    for tokens, mask in sorted(steps, reverse=True):
        if fresh := mask & ~seen:
            found.append((tokens, fresh))
            seen |= fresh
    return found
