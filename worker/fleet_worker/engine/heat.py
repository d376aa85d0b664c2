"""What of the prefix cache is asked for most: whole chains, hottest first. Pure: time is counted in prompts, not in seconds, so
that a quiet night cools nothing down."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

HALF_LIFE: Final = 256.0
"""Prompts after which a use counts half."""
LEAST_USES: Final = 2
"""What one prompt alone had is no prefix that others share."""
CONSIDERED: Final = 4_096
"""Blocks that are sorted at most: about 20 ms of the engine's thread, once per reader."""


@dataclass(slots=True)
class Known:
    """A cached block of the base model, as its chain has it."""

    parent: bytes
    """Name of the block before it, or the root."""
    tokens: bytes
    """Packed as little-endian uint32."""
    is_first: bool
    at: int
    """Which prompt used it last."""
    heat: float = 1.0
    """As of `at`."""
    uses: int = 1

    def heat_at(self, prompt: int) -> float:
        """Uses, each counted by its age."""
        return self.heat * float(0.5 ** ((prompt - self.at) / HALF_LIFE))


@dataclass(slots=True)
class Heat:
    """Kept beside the allocator's names: stored and gone with them."""

    prompts: int = 0
    known: dict[bytes, Known] = field(default_factory=dict)

    def stored(self, name: bytes, parent: bytes, tokens: bytes, *, is_first: bool) -> None:
        """It can be found from now on."""
        self.known[name] = Known(parent, tokens, is_first, self.prompts)

    def gone(self, name: bytes) -> None:
        """It cannot be found any more."""
        self.known.pop(name, None)

    def prompt(self, names: Iterable[bytes]) -> None:
        """One more prompt, which found these."""
        self.prompts += 1
        for name in names:
            if (block := self.known.get(name)) is not None:
                block.heat, block.at, block.uses = block.heat_at(self.prompts) + 1.0, self.prompts, block.uses + 1

    def seeded(self, name: bytes) -> None:
        """It came from a worker where others use it: it counts as shared here, too, and can be given on."""
        if (block := self.known.get(name)) is not None:
            block.uses = LEAST_USES

    def hottest(self, most: int) -> list[bytes]:
        """See `hottest_chains`; blocks that several prompts had."""
        shared = {
            name: Node(None if block.is_first else block.parent, block.heat_at(self.prompts))
            for name, block in self.known.items()
            if block.uses >= LEAST_USES
        }
        if len(shared) > CONSIDERED:
            kept = heapq.nlargest(CONSIDERED, shared, key=lambda name: shared[name].heat)
            shared = {name: shared[name] for name in kept}
        return hottest_chains(self._with_parents(shared), most)

    def _with_parents(self, shared: dict[bytes, Node]) -> dict[bytes, Node]:
        """A block before a shared one is used as often, but may have been computed again meanwhile, and counts from then on."""
        found = dict(shared)
        for node in shared.values():
            name = node.parent
            while name is not None and name not in found and (block := self.known.get(name)) is not None:
                found[name] = Node(None if block.is_first else block.parent, block.heat_at(self.prompts))
                name = found[name].parent
        return found


@dataclass(frozen=True, slots=True)
class Node:
    """One block to choose from; `parent` None: the first of a chain."""

    parent: bytes | None
    heat: float


def hottest_chains(nodes: Mapping[bytes, Node], most: int) -> list[bytes]:
    """At most `most` names: hottest first, each after its parent, and none without all blocks before it: nobody would find it.

    A block is worth as much as the hottest one behind it, which is worth nothing without it. So a parent is never worth less than
    its child, and of the order by worth, then by depth, every beginning holds whole chains alone."""
    depth = _depths(nodes)
    worth = {name: nodes[name].heat for name in depth}
    for name in sorted(depth, key=depth.__getitem__, reverse=True):
        parent = nodes[name].parent
        if parent is not None:
            worth[parent] = max(worth[parent], worth[name])
    return heapq.nsmallest(max(0, most), depth, key=lambda name: (-worth[name], depth[name], name))


def _depths(nodes: Mapping[bytes, Node]) -> dict[bytes, int]:
    """Of every block whose chain is here from its first block on; names that go round in a circle have no first one."""
    depth: dict[bytes, int] = {}
    lost: set[bytes] = set()
    for start in nodes:
        path, name = list[bytes](), start
        on_path = set[bytes]()
        while name in nodes and name not in depth and name not in lost and name not in on_path:
            path.append(name)
            on_path.add(name)
            parent = nodes[name].parent
            if parent is None:
                break
            name = parent
        if not path:
            continue
        last = nodes[path[-1]].parent
        base = 0 if last is None else depth.get(last)
        if base is None:
            lost.update(path)
            continue
        for step, found in enumerate(reversed(path)):
            depth[found] = base + step + (last is not None)
    return depth
