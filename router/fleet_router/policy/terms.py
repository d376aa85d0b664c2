"""What the cost is asked and what it answers. Made for every request and read in its inner loops: plain classes, which the
compiler makes as cheap as C's."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fleet_router.policy.candidate import Candidate
    from fleet_router.policy.side import Depths


Costs = bytes | list[float]
"""Seconds, by worker; packed where they are kept."""


class Weighed:
    """One side of one group, as a decision saw it: costs by worker, in seconds."""

    __slots__ = ("costs", "depths", "group", "local", "tokens", "workers")

    def __init__(
        self, group: tuple[str, str], workers: Sequence[Candidate], tokens: float, depths: Depths, costs: list[float],
        local: list[float] | None = None,
    ) -> None:  # fmt: skip
        self.group, self.workers, self.tokens, self.depths = group, workers, tokens, depths
        self.costs: Costs = costs
        """Prefill: queue and prefill, `inf` where they alone are more than the least, or at the bound. Decode: lateness and the
        least transfer, for a prefill elsewhere. In a slow start without what most others hold."""
        self.local: Costs | None = local
        """Decode: when it prefills itself, `inf` as above; of prefill workers None."""

    def pack(self) -> None:
        """To be kept: eight bytes for each cost instead of an object."""
        costs, local = self.costs, self.local
        self.costs = _packed(costs)
        if local is not None:
            self.local = self.costs if local is costs else _packed(local)


FEW: Final = 128
_DOUBLES: Final = tuple(Struct(f"{count}d") for count in range(FEW))


def _packed(costs: Costs) -> bytes:
    """All of it takes 1,300 instructions for four numbers; to fill an array of that size took 3,100."""
    if isinstance(costs, bytes):
        return costs
    count = len(costs)
    return (_DOUBLES[count] if count < FEW else Struct(f"{count}d")).pack(*costs)


def seconds_of(costs: Costs) -> Sequence[float]:
    """One after the other, packed or not."""
    return memoryview(costs).cast("d") if isinstance(costs, bytes) else costs


class CostAsk:
    """What the cost depends on besides the workers.

    `tokens`: of the prompt. `min_uncached`: prompts that miss fewer tokens on the decode worker are prefilled there. `by_cost`
    False: all other prompts are prefilled by a prefill worker, whatever it costs. `local`: prefill workers have failed this
    request, none takes part. `others`: how much the seconds of others count against one's own, above 1 for classes that can
    wait. `session`: `ring_key` is that of a session, which stays where it is as long as the load allows it. `keeps`: a prefill
    worker may decode, too.
    """

    __slots__ = (
        "adapter", "bound", "by_cost", "keeps", "local", "min_uncached", "now", "others", "ring_key", "seen", "session", "tokens",
    )  # fmt: skip

    def __init__(
        self, tokens: float, ring_key: int, now: float, bound: float, min_uncached: float, by_cost: bool = True,
        local: bool = False, others: float = 1.0, adapter: str = "", session: bool = False, keeps: bool = True,
    ) -> None:  # fmt: skip
        self.tokens, self.ring_key, self.now, self.bound, self.min_uncached = tokens, ring_key, now, bound, min_uncached
        self.by_cost, self.local, self.others, self.adapter, self.session = by_cost, local, others, adapter, session
        self.keeps = keeps
        self.seen: list[Weighed] = []
        """Whoever decides adds what was compared: references alone, so that a record of the decision costs next to nothing."""

    def without_prefill(self) -> CostAsk:
        """The same, with no prefill worker to take part; what was compared so far stays with it."""
        same = CostAsk(
            self.tokens, self.ring_key, self.now, self.bound, self.min_uncached, self.by_cost, True, self.others, self.adapter,
            self.session, self.keeps,
        )  # fmt: skip
        same.seen = self.seen
        return same


class Offer:
    """The best way in one group. `prefill` None: the decode worker prefills. `missing`: tokens that whoever prefills has not
    cached. `moved`: tokens whose KV moves to the decode worker. `looked`: candidates and pairs that were compared."""

    __slots__ = ("cost_s", "decode", "looked", "missing", "moved", "prefill", "reason")

    def __init__(
        self, cost_s: float, prefill: Candidate | None, decode: Candidate, missing: float, moved: float, reason: str, looked: int
    ) -> None:
        self.cost_s, self.prefill, self.decode = cost_s, prefill, decode
        self.missing, self.moved, self.reason, self.looked = missing, moved, reason, looked


class Prefilling:
    """One prefill that a worker was sent: what was expected, so that what comes can be compared. Both expectations are less the
    lateness of the worker when it was sent. `begins`: when the tokens before it were expected to be done. `due`: when its first
    token was expected."""

    __slots__ = ("begins", "due", "sent_at", "tokens", "worker")

    def __init__(self, worker: Candidate, tokens: float, sent_at: float, begins: float, due: float) -> None:
        self.worker, self.tokens, self.sent_at, self.begins, self.due = worker, tokens, sent_at, begins, due
