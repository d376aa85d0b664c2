"""Block allocator with prefix caching: pure bookkeeping, no tensors.

A block is free (no content), cached (content kept under its hash, nobody uses it, evicted least recently used first) or used
(one or more owners). free + cached + used = total at all times: `check_integrity` proves it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fleet_worker.engine.heat import Heat


@dataclass(slots=True)
class _Block:
    owners: int = 0
    name: bytes | None = None


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A block's content became findable (stored) or stopped being so."""

    stored: bool
    name: bytes
    parent: bytes | None = None
    tokens: tuple[int, ...] = ()
    adapter: str | None = None


@dataclass(slots=True)
class BlockAllocator:
    """`total` blocks; ids 0 … total-1."""

    total: int
    heat: Heat | None = None
    """What is asked for most; None: nobody wants to know."""
    _blocks: list[_Block] = field(init=False)
    _free: list[int] = field(init=False)
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)
    _by_name: dict[bytes, int] = field(init=False, default_factory=dict)
    _events: list[CacheEvent] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._blocks = [_Block() for _ in range(self.total)]
        self._free = list(range(self.total - 1, -1, -1))

    @property
    def available(self) -> int:
        """Blocks that an allocation may take: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks with at least one owner."""
        return self.total - self.available

    def owners(self, block: int) -> int:
        """How many own this block."""
        return self._blocks[block].owners

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The longest run of cached or used blocks with these names; takes nothing."""
        found: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """Become one more owner of each."""
        for block in blocks:
            self._cached.pop(block, None)
            self._blocks[block].owners += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks without content, one owner each; None (and nothing taken) when there are not enough."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._blocks[block].owners = 1
        return block

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody finds the content of these used blocks any more."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        name = self._blocks[block].name
        if name is not None:
            del self._by_name[name]
            self._blocks[block].name = None
            self._events.append(CacheEvent(stored=False, name=name))
            if self.heat is not None:
                self.heat.gone(name)

    def register(
        self, block: int, name: bytes, parent: bytes | None, tokens: tuple[int, ...], adapter: str | None = None,
        root: bytes | None = None,
    ) -> None:  # fmt: skip
        """The content is complete and may be found by `name`; a name that another block holds stays there. `root`: what a first
        block's name is hashed after, of blocks that may be given to a new worker."""
        if name in self._by_name or self._blocks[block].name is not None:
            return
        self._blocks[block].name = name
        self._by_name[name] = block
        self._events.append(CacheEvent(stored=True, name=name, parent=parent, tokens=tokens, adapter=adapter))
        if self.heat is not None and root is not None:
            packed = struct.pack(f"<{len(tokens)}I", *tokens)
            self.heat.stored(name, root if parent is None else parent, packed, is_first=parent is None)

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one ownership of each; later blocks of a sequence are evicted before earlier ones."""
        for block in reversed(blocks):
            state = self._blocks[block]
            if state.owners < 1:
                raise ValueError(f"block {block} freed without an owner")
            state.owners -= 1
            if state.owners == 0:
                if state.name is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is exactly one of free, cached, used and names are consistent."""
        free, cached = set(self._free), set(self._cached)
        used = {i for i, b in enumerate(self._blocks) if b.owners > 0}
        if len(free) != len(self._free) or free | cached | used != set(range(self.total)):
            raise AssertionError("a block is lost or counted twice")
        if free & cached or free & used or cached & used:
            raise AssertionError("a block is in two states")
        if {name: i for i, b in enumerate(self._blocks) if (name := b.name) is not None} != self._by_name:
            raise AssertionError("names and blocks disagree")
        if any(self._blocks[i].name is not None for i in free) or any(self._blocks[i].name is None for i in cached):
            raise AssertionError("a free block has content or a cached one has none")
