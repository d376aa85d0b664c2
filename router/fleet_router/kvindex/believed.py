"""Which of the two indexes is believed of which worker: streams of KV events into the precise index, worker by worker. Pure.

Every call passes `now`; `asks` collects the replays that are wanted, for whoever talks to the workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleet_router.kvindex.precise import PreciseIndex
from fleet_router.kvindex.stream import EventStream, State
from fleet_wire.events import BlockStored, KVEventBatch

Numbered = tuple[int, KVEventBatch]
HELD_MOST = 1_000
"""Live batches that wait for a replay; more are dropped, and are then the next gap."""
HELD_TOKENS_MOST = 4_000_000
"""Token ids in those of all workers together, 40 bytes each; a worker has an equal part."""
HELD_TOKENS_EACH = 256_000
"""In those of one worker, which are applied at once: 30 ms of the loop."""


class _Source:
    __slots__ = ("bit", "first", "held", "held_tokens", "stream", "unfilled", "up")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.stream = EventStream()
        self.first: int | None = None
        """First number of the replay that is coming in, from which on nothing is missing."""
        self.held: list[Numbered] = []
        self.held_tokens = 0
        self.up = False
        """It was heard of since the connection broke."""
        self.unfilled = False
        """It was asked for what a replay had left out, and has not got it: holes in its replays are for ever."""

    def let_go(self) -> list[Numbered]:
        """What was held."""
        held, self.held, self.held_tokens = self.held, [], 0
        return held


class Believed:
    """Precise knowledge of all workers that publish events."""

    def __init__(self, capacity: int) -> None:
        self.index = PreciseIndex(capacity)
        self.trusted = 0
        """Workers, as bits, of which the precise index alone is believed."""
        self.asks: list[tuple[str, int]] = []
        """(worker, first number) of wanted replays."""
        self._sources: dict[str, _Source] = {}

    def join(self, worker: str, bit: int, compat: str) -> None:
        """A worker that publishes."""
        self._sources[worker] = _Source(bit)
        self.index.join(worker, bit, compat)

    def leave(self, worker: str) -> None:
        """It is gone."""
        if self._sources.pop(worker, None) is not None:
            self.index.remove(worker)
            self._retrust()

    def state(self, worker: str) -> State | None:
        """For metrics; None: it publishes nothing."""
        found = self._sources.get(worker)
        return None if found is None else found.stream.state

    def connected(self, worker: str, now: float) -> None:
        """A connection stands: perhaps to the same life of the worker, perhaps to its next. All from the beginning."""
        if (source := self._sources.get(worker)) is not None:
            self._forget(worker, source)
            source.up = True
            self._ask(worker, source, now)

    def lost(self, worker: str) -> None:
        """The connection broke."""
        if (source := self._sources.get(worker)) is not None:
            self._forget(worker, source)

    def live(self, worker: str, number: int, batch: KVEventBatch, now: float) -> None:
        """A batch as it was published."""
        source = self._sources.get(worker)
        if source is None:
            return
        source.up = True
        if source.stream.is_asking(now):
            self._hold(source, number, batch)
            return
        verdict = source.stream.judge(number, batch.ts)
        if verdict == "apply":
            self._apply(worker, source, number, batch)
        elif verdict != "drop":
            if verdict == "restart":
                self._forget(worker, source)
            self._hold(source, number, batch)
            self._ask(worker, source, now)

    def replayed(self, worker: str, asked_from: int, batches: Sequence[Numbered], now: float, *, last: bool, whole: bool) -> None:
        """A part of a replay."""
        source = self._sources.get(worker)
        if source is None or source.stream.asked_from != asked_from or source.stream.asked_at is None:
            return  # it was asked of an earlier life, or another one was asked for since
        if not self._take_part(worker, source, batches):
            source.stream.broke_off(asked_from, source.first, now)
            source.stream.asked_at = None
            self._ask(worker, source, now)
            return
        if not last:
            source.stream.asked_at = now  # it goes on: no other one is asked for meanwhile
            return
        first, source.first = source.first, None
        if not whole:
            source.stream.broke_off(asked_from, first, now)
            return
        source.stream.replayed(asked_from, first)
        self._heal(worker, source)
        for number, batch in source.let_go():
            # one that still wants a replay is of another life, or `check` asks for it: not at once, for ever
            if source.stream.judge(number, batch.ts) != "replay":
                self.live(worker, number, batch, now)
        self._retrust()

    def not_replayed(self, worker: str) -> None:
        """It replays nothing. Among what was missed may be removals: what it held before is not believed any more."""
        source = self._sources.get(worker)
        if source is None or source.stream.asked_at is None:
            return
        stream = source.stream
        stream.not_replayed()
        self.index.doubt(worker)
        for number, batch in source.let_go():
            if stream.expected is not None and number < stream.expected and batch.ts <= stream.last_ts:
                continue  # heard twice
            if number != stream.expected:
                self.index.clear(worker)
            self._apply(worker, source, number, batch)
        self._retrust()

    def answered(self, worker: str, keys: Sequence[int], now: float) -> None:
        """It has just computed a prompt with these blocks."""
        source = self._sources.get(worker)
        if source is not None and keys and not self.index.holds(worker, keys[-1]):
            source.stream.answered(now)

    def check(self, now: float) -> None:
        """Now and then: silence, and replays that never came."""
        for worker, source in self._sources.items():
            source.stream.check(now)
            if source.up and source.stream.state in ("new", "behind"):
                self._ask(worker, source, now)
        self._retrust()

    def _hold(self, source: _Source, number: int, batch: KVEventBatch) -> None:
        tokens = source.held_tokens + sum(len(event.token_ids) for event in batch.events if isinstance(event, BlockStored))
        if len(source.held) < HELD_MOST and tokens <= min(HELD_TOKENS_EACH, HELD_TOKENS_MOST // len(self._sources)):
            source.held.append((number, batch))
            source.held_tokens = tokens

    def _ask(self, worker: str, source: _Source, now: float) -> None:
        self._retrust()
        if source.stream.may_ask(now):
            source.first = None
            self.asks.append((worker, source.stream.replay_from))

    def _take_part(self, worker: str, source: _Source, batches: Sequence[Numbered]) -> bool:
        """False: one is missing in the middle. vLLM sends a replay as fast as it can, and its socket drops what does not fit into
        a queue of a thousand: it still has it."""
        for number, batch in batches:
            begins = source.first is None
            if number > source.stream.replay_from:
                if not begins and not source.unfilled:
                    return False
                source.unfilled = source.unfilled or source.stream.asked_from > 0
                source.first = number
                self.index.clear(worker)  # among what is missing may be removals
                self.index.doubt(worker)
            if begins:
                source.first = number
            if number >= source.stream.replay_from:
                self._apply(worker, source, number, batch, trust=False)
        return True

    def _apply(self, worker: str, source: _Source, number: int, batch: KVEventBatch, *, trust: bool = True) -> None:
        self.index.apply(worker, batch.events)
        was = source.stream.state
        source.stream.applied(number, batch.ts)
        if trust:
            self._heal(worker, source)
        if trust and source.stream.state != was:
            self._retrust()

    def _heal(self, worker: str, source: _Source) -> None:
        if source.stream.state == "partial" and self.index.is_whole(worker):
            source.stream.healed()

    def _forget(self, worker: str, source: _Source) -> None:
        self.index.clear(worker)
        self.index.doubt(worker, whole=True)
        source.stream.lost()
        source.first, source.up, source.unfilled = None, False, False
        source.let_go()
        self._retrust()

    def _retrust(self) -> None:
        trusted = 0
        for source in self._sources.values():
            if source.stream.trusted:
                trusted |= source.bit
        self.trusted = trusted
