"""Keys that stand behind each other in every prompt that has them, as one entry: what a prompt has of its own, what many begin
with.

An index of single keys is looked into, added to and taken from once per key, and each of that waits for memory that no cache
holds. Here a prompt is a path of few runs: what it shares with others, then what is new. A run is found by its first key; where a
prompt parts from others inside of one, that is cut there.
"""

from __future__ import annotations


class Run:
    """Whoever holds a part of it holds all of it."""

    __slots__ = ("generation", "keys", "kids", "mask", "parent", "start")

    def __init__(self, keys: list[int], start: int, mask: int, generation: int, parent: Run | None) -> None:
        self.keys = keys
        self.start = start
        """Keys before it in its prompts."""
        self.mask = mask
        """Workers that hold it, as bits. 0: it is no part of the index any more."""
        self.generation = generation
        """In which its only worker used it last (`approximate`)."""
        self.parent = parent
        self.kids = 0
        """Runs right behind it."""

    def common(self, keys: list[int], at: int) -> int:
        """How many of its keys a prompt has from its key `at` on, which is its first. Equal keys mean equal prefixes: the last is
        looked at, then it is found by bisection."""
        mine = self.keys
        size = min(len(mine), len(keys) - at)
        if size == 1 or mine[size - 1] == keys[at + size - 1]:
            return size
        low, top = 1, size - 1
        while low < top:
            middle = low + top + 1 >> 1
            if mine[middle - 1] == keys[at + middle - 1]:
                low = middle
            else:
                top = middle - 1
        return low


class Runs:
    """First key → run."""

    __slots__ = ("by_first", "keys")

    def __init__(self) -> None:
        self.by_first: dict[int, Run] = {}
        self.keys = 0
        """Of all runs."""

    def path(self, keys: list[int], at: int = 0) -> tuple[list[Run], int, int]:
        """Runs that a prompt has from its key `at` on, up to which key, and how many keys of the last run: where these are not
        all, others have more of it."""
        path: list[Run] = []
        count, same, by_first = len(keys), 0, self.by_first
        while at < count and (run := by_first.get(keys[at])) is not None:
            same = run.common(keys, at)
            path.append(run)
            at += same
            if same < len(run.keys):
                break
        return path, at, same

    def put(self, keys: list[int], start: int, mask: int, generation: int, parent: Run | None) -> Run:
        """A new one, behind its parent."""
        run = Run(keys, start, mask, generation, parent)
        self.by_first[keys[0]] = run
        self.keys += len(keys)
        if parent is not None:
            parent.kids += 1
        return run

    def extend(self, run: Run, keys: list[int]) -> None:
        """More keys for a run that nothing is behind."""
        run.keys = run.keys + keys
        self.keys += len(keys)

    def cut(self, run: Run, size: int) -> Run | None:
        """Its first `size` keys become a run of their own, which is returned: the parent of the rest, which stays the one that
        others are behind. None where the rest begins as another run does: keys that collide are no prefixes."""
        first = run.keys[size]
        if first in self.by_first:
            return None
        front = Run(run.keys[:size], run.start, run.mask, run.generation, run.parent)
        front.kids = 1
        self.by_first[front.keys[0]] = front
        run.keys, run.start, run.parent = run.keys[size:], run.start + size, front
        self.by_first[first] = run
        return front

    def unite(self, parent: Run, run: Run) -> None:
        """A run that is all that is behind its parent, and held by the same, becomes one with it."""
        del self.by_first[run.keys[0]]
        run.keys, run.start, run.parent = parent.keys + run.keys, parent.start, parent.parent
        self.by_first[run.keys[0]] = run
        parent.mask, parent.keys = 0, []  # it is in its workers' notes until their generation ends

    def drop(self, run: Run, bit: int) -> None:
        """This worker holds it no more; nobody: it goes, and keeps nothing that was before it."""
        run.mask &= ~bit
        if run.mask == 0:
            del self.by_first[run.keys[0]]
            self.keys -= len(run.keys)
            if run.parent is not None:
                run.parent.kids -= 1
                run.parent = None
