"""Key → the workers that hold it, a bit each, and how deep a chain of keys goes into what they hold."""

from __future__ import annotations

from typing import Final

REBUILT_AT: Final = 4
"""To look at each key of an index takes a quarter of the time that it takes to look one up and drop a worker from it."""
STEPS_MOST: Final = 8
"""So many different depths are told apart; who holds less counts as holding the first key alone."""


LOWEST_BIT: Final = 1
"""Of the first worker."""


class Bits:
    """A bit for each worker, given again only after everybody has forgotten its last owner."""

    __slots__ = ("_bits", "_free", "_used")

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._free: list[int] = []
        self._used = 0

    def of(self, worker: str) -> int:
        """This worker's bit."""
        bit = self._bits.get(worker)
        if bit is None:
            if self._free:
                bit = self._free.pop()
            else:
                bit, self._used = LOWEST_BIT << self._used, self._used + 1
            self._bits[worker] = bit
        return bit

    def release(self, worker: str) -> None:
        """The worker is gone, and no index knows its bit any more."""
        bit = self._bits.pop(worker, None)
        if bit is not None:
            self._free.append(bit)


def depths(masks: dict[int, int], keys: list[int], among: int) -> list[tuple[int, int]]:
    """(keys held, workers), the deepest first, of those in `among`.

    Whoever holds a key is taken to hold all before it, so that a depth is found by bisection: a prompt of a thousand keys costs
    ten look-ups for each different depth. Caches evict the end of a prompt before its beginning; where one does not, the hint is
    wrong.
    """
    alive = masks.get(keys[0], 0) & among if keys else 0
    found: list[tuple[int, int]] = []
    high = len(keys)
    while alive:
        if len(found) == STEPS_MOST:
            found.append((1, alive))
            break
        low, top, here = 0, high, alive
        while top - low > 1:  # they hold the key at `low`; not the one at `top`
            middle = low + top >> 1
            if held := masks.get(keys[middle], 0) & alive:
                low, here = middle, held
            else:
                top = middle
        found.append((low + 1, here))
        alive &= ~here
        high = max(1, low)
    return found


def drop_bit(masks: dict[int, int], key: int, bit: int) -> None:
    """It does not hold this one any more."""
    left = masks.get(key, 0) & ~bit
    if left:
        masks[key] = left
    else:
        masks.pop(key, None)


def without_bit(masks: dict[int, int], bit: int) -> dict[int, int]:
    """The same without this worker: quicker than key by key where it has much."""
    others = ~bit
    return {key: left for key, mask in masks.items() if (left := mask & others)}
