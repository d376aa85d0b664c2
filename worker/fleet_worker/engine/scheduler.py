"""Who computes what in the next step. Pure bookkeeping over sequences and blocks: no tensors, no clock, no I/O.

Decode rows first (they stall a user each), then chunks of prefill inside the token budget, oldest first. A prompt is admitted
when the pool can hold all of it. When the pool runs out while decoding, the youngest sequence gives its blocks back and is
computed again later (its tokens are kept, so that its answer does not change).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fleet_wire.blocks import chain, tenant_root
from fleet_worker.engine.blocks import BlockAllocator
from fleet_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `count` tokens of `sequence` from position `start`; sample when that reaches its end."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """The last token of this work yields a new one."""
        return self.start + self.count == self.sequence.length


@dataclass(slots=True)
class Scheduler:
    """Waiting, pulling and running sequences over one allocator."""

    blocks: BlockAllocator
    block_tokens: int
    root: bytes
    max_batch: int
    step_tokens: int
    """Prefill tokens per step: bounds how long decode rows wait for a step."""
    waiting: deque[Sequence] = field(default_factory=deque)
    pulling: dict[str, Sequence] = field(default_factory=dict)
    running: list[Sequence] = field(default_factory=list)
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        self.waiting.append(sequence)

    def step(self) -> list[Work]:
        """The next step's work; sequences are moved between stages and blocks are taken."""
        work, budget = list[Work](), self.step_tokens
        for sequence in [s for s in self.running if s.todo == 1]:
            if sequence.stage == "running" and self._reserve(sequence, sequence.length):
                work.append(Work(sequence, sequence.computed, 1))
                budget -= 1
        for sequence in [s for s in self.running if s.todo > 1]:
            budget -= self._chunk(sequence, budget, work)
        while self.waiting and budget > 0 and len(self.running) + len(self.pulling) < self.max_batch:
            sequence = self.waiting[0]
            if sequence.reference is not None or not self.place(sequence):  # a decode leg is pulled, never computed here
                break
            self.waiting.popleft()
            sequence.stage = "running"
            self.running.append(sequence)
            budget -= self._chunk(sequence, budget, work)
        alive = {id(s) for s in self.running}
        return [w for w in work if id(w.sequence) in alive]

    def _chunk(self, sequence: Sequence, budget: int, work: list[Work]) -> int:
        count = min(sequence.todo, budget)
        if count < 1 or not self._reserve(sequence, sequence.computed + count):
            return 0
        work.append(Work(sequence, sequence.computed, count))
        return count

    def place(self, sequence: Sequence) -> bool:
        """Give a sequence its blocks: what the prefix cache has, and room for all its tokens. False when the pool is full."""
        names = self._named(sequence, sequence.length // self.block_tokens)
        reusable = (sequence.length - 1) // self.block_tokens  # the last token is always computed: it yields the next one
        found = self.blocks.find(names[:reusable])
        self.blocks.share(found)
        rest = self.blocks.allocate(self.blocks_for(sequence.length) - len(found))
        if rest is None:
            self.blocks.free(found)
            return False
        sequence.table = [*found, *rest]
        sequence.registered = len(found)
        sequence.computed = len(found) * self.block_tokens
        if not sequence.was_preempted:  # else it finds what it computed itself
            sequence.cached_tokens = sequence.computed
            self.prefix_queries += sequence.length
            self.prefix_hits += sequence.computed
            if self.blocks.heat is not None:
                self.blocks.heat.prompt(names[: len(found)])
        return True

    def _named(self, sequence: Sequence, count: int) -> list[bytes]:
        """Names of its first `count` blocks at least. Kept: what waits for blocks is looked at in each step, and its tokens
        do not change; more may come behind them."""
        names, size = sequence.names, self.block_tokens
        if len(names) < count:
            parent = names[-1] if names else self.root_of(sequence)
            names += chain(parent, sequence.tokens(len(names) * size, (count - len(names)) * size), size)
        return names

    def root_of(self, sequence: Sequence) -> bytes:
        """Parent of the sequence's first block: KV of one adapter or salt is never found by another, nor by the base model."""
        root = self.root if sequence.adapter is None else sequence.adapter.root(self.root)
        return tenant_root(root, sequence.cache_salt) if sequence.cache_salt else root

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for the first `tokens` tokens of a running sequence, preempting younger ones if need be."""
        missing = self.blocks_for(tokens) - len(sequence.table)
        while missing > 0:
            fresh = self.blocks.allocate(missing)
            if fresh is not None:
                sequence.table.extend(fresh)
                return True
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self.release(victim)
        victim.stage, victim.was_preempted = "waiting", True
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def release(self, sequence: Sequence) -> list[int]:
        """Free the sequence's blocks and forget how far it was computed; returns the blocks that it held."""
        held = sequence.table
        self.blocks.free(held)
        sequence.table, sequence.registered, sequence.computed = [], 0, 0
        return held

    def advance(self, work: Iterable[Work]) -> None:
        """The step was computed: full blocks become findable."""
        for item in work:
            item.sequence.computed += item.count
            self.register_full(item.sequence)

    def register_full(self, sequence: Sequence) -> None:
        """Name every block that is complete and not named yet."""
        size, complete = self.block_tokens, sequence.computed // self.block_tokens
        names = self._named(sequence, complete)
        adapter = sequence.adapter.name if sequence.adapter is not None else None
        is_given_on = self.blocks.heat is not None and adapter is None and sequence.registered < complete
        root = self.root_of(sequence) if is_given_on else None
        for index in range(sequence.registered, complete):
            parent = names[index - 1] if index else None
            tokens = tuple(sequence.tokens(index * size, size))
            self.blocks.register(sequence.table[index], names[index], parent, tokens, adapter, root)
        sequence.registered = max(sequence.registered, complete)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of whichever queue holds it."""
        if sequence.stage == "waiting":
            self.waiting.remove(sequence)
        elif sequence.stage == "running":
            self.running.remove(sequence)
        elif sequence.stage == "pulling":
            del self.pulling[sequence.request_id]
        sequence.stage = "finished"
