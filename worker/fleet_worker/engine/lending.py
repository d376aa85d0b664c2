"""The half of seeding that serves (`seeding.py` has the other one and the whole): lends the hottest blocks, part by part."""

from __future__ import annotations

from typing import Final, Protocol
from uuid import uuid4

from fleet_wire.kv import KvReference
from fleet_wire.sidechannel import AskHot, HotBlock, Hottest, Refused
from fleet_worker.engine.blocks import BlockAllocator
from fleet_worker.engine.heat import CONSIDERED

PART_BYTES: Final = 8 * 1024 * 1024
"""Blocks that are lent at a time: their digests take the engine that lends about a millisecond."""
PART_MESSAGE_BYTES: Final = 1024 * 1024
"""Names and tokens of one part."""
LENT_FOR_S: Final = 2.0
"""A reader that has not asked for so long has gone: another one may."""
LISTED_FOR_S: Final = 5.0
"""A list is made at most so often, whoever asks and how often: to sort a large cache takes the engine that serves 0.1 s."""
SEED_ID: Final = "seed."
"""How names of leases and pulls begin that belong to no request; no request's name holds a dot before its first dash."""


class Pool(Protocol):
    """What both halves need of the engine."""

    @property
    def blocks(self) -> BlockAllocator:
        """The engine's."""
        ...

    def lend(self, lender: str, blocks: list[int]) -> KvReference | None:
        """Blocks under a lease; None when too many are open."""
        ...

    def put_aside(self, pull: str, blocks: list[int]) -> None:
        """Blocks of a pull that is not over: they come back, wiped, with its end."""
        ...

    def wipe(self, blocks: list[int]) -> None:
        """Whatever bytes came: nobody finds them."""
        ...


class Lender:
    """Answers one new worker at a time."""

    def __init__(self, pool: Pool, weights: str, part_blocks: int) -> None:
        self._pool, self._weights, self._part_blocks = pool, weights, part_blocks
        self._reader, self._until = "", float("-inf")
        self._names: list[bytes] = []
        self._most, self._listed_at = 0, float("-inf")
        self._open: str | None = None
        """The lease of the part before."""
        self.lent_blocks = 0

    @property
    def lease(self) -> str:
        """Under which name the part lies that is lent now; empty: none."""
        return self._open or ""

    def ended(self, lender: str) -> None:
        """A lease was read, or is over."""
        if lender == self._open:
            self._open = None

    def answer(self, asked: AskHot, now: float) -> Hottest | Refused:
        """The next part of the list, leased; or why not."""
        heat = self._pool.blocks.heat
        if heat is None:
            return Refused(call=asked.call, reason="off", message="this worker gives no hot prefixes")
        if asked.weights != self._weights:
            return Refused(call=asked.call, reason="weights", message="it loaded another version of the model")
        if self._open is not None or (now < self._until and asked.reader != self._reader):
            return Refused(call=asked.call, reason="busy", message="it gives its hot prefixes to another new worker")
        if asked.start == 0:
            self._most = asked.most_blocks
            if now - self._listed_at >= LISTED_FOR_S:
                self._names, self._listed_at = heat.hottest(CONSIDERED), now
        elif asked.reader != self._reader:
            return Refused(call=asked.call, reason="unknown", message="the list of this reader is forgotten")
        self._reader, self._until = asked.reader, now + LENT_FOR_S
        return self._part(asked)

    def _part(self, asked: AskHot) -> Hottest | Refused:
        there = min(self._most, len(self._names))
        end = min(asked.start + self._part_blocks, there)
        heat, blocks = self._pool.blocks.heat, self._pool.blocks
        known = {} if heat is None else heat.known
        names = [name for name in self._names[asked.start : end] if name in known and blocks.find([name])]
        more = end < there
        if not more:
            self._until = float("-inf")
        reference = None
        if names:
            self._open = f"{SEED_ID}{uuid4().hex}"
            reference = self._pool.lend(self._open, [block for name in names for block in blocks.find([name])])
            if reference is None:
                self._open = None
                return Refused(call=asked.call, reason="busy", message="too many leases are open")
        self.lent_blocks += len(names)
        described = tuple(HotBlock(name, one.parent, one.tokens, one.is_first) for name in names if (one := known[name]))
        return Hottest(call=asked.call, blocks=described, reference=reference, next=end, more=more)


def part_blocks(block_bytes: int, block_tokens: int) -> int:
    """Blocks of one part: by their bytes, and by those of their names and tokens."""
    return max(1, min(PART_BYTES // block_bytes, PART_MESSAGE_BYTES // (4 * block_tokens + 128)))
