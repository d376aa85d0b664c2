"""A request that nobody can answer at this moment: it waits for a tier that wakes from zero, or for a decode worker that was
there just now and may come back (not ready, held, or not reached). Where neither is to come it is refused at once."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from fleet_router.ask import Hints
from fleet_router.carrying import Carrying
from fleet_router.errors import RequestError
from fleet_router.health.inband import for_the_record
from fleet_router.policy.chosen import Choice, Refusal
from fleet_router.workers import Worker

SLOTS_SHARE: Final = 4
"""While others serve, those that wait for one to come back take a quarter of the slots at most."""


class Awaiting(Carrying):
    """What is done while no worker can be asked; whom else to ask is the flow's."""

    __slots__ = ()

    def _last_resort(self, now: float, hints: Hints) -> tuple[Choice | Refusal, list[int]]:
        """Whoever is well cannot answer it: those who failed are asked, as in a panic."""
        ask, table = self._ask, self._context.table
        seed = self._ticket.lane.seed
        return table.choose(ask.prompt, self.config, now, self._excluded, seed, ask.adapter, hints, last_resort=True)

    def _hold(self, why: str, code: str) -> None:
        """Nobody can answer it now: it waits for workers, if any are to come or to come back. A client that has half an answer
        would hear nothing for minutes."""
        if self.started and not self.begins_anew():
            self._refuse(RequestError(503, why, code="no_worker"))
            return
        holding, now, lane, tier = self._context.holding, self._context.clock(), self._ticket.lane, self._tier_not_there()
        if self._held and self._due is None and self._excluded - self._barred and not holding.wakes(self.hints.tier):
            self._excluded = self._barred  # nobody else comes, and who failed it before may serve by now
            self.begin()
            return
        why = f"{why} in tier {tier}, which alone may answer" if tier else why
        waking = holding.wakes(tier) or (self._held and self._due is None)
        back_by = 0.0 if waking else self._back_by(now)
        try:
            self.deadline = holding.hold(
                self, self._ask.size_bytes, (why, code), now, self.config.hold, lane.account.name, lane.weight, tier, back_by
            )
        except RequestError as error:
            self._refuse(error)
            return
        self._held = True
        if not back_by:
            self._due = None
            return
        lost = {worker.uid for worker in self._context.table.by_role["decode"] if worker.is_lost}
        holding.lost |= lost
        self._excluded = (self._excluded - lost) | self._barred  # who is waited for may answer when it is back
        if self.record.tries:
            self.record.tries[-1].reason += "; waits for one that was there"

    def _tier_not_there(self) -> str:
        """The tier that alone may answer, where none of its workers decodes: what others at zero become is of no use."""
        tier = self.hints.tier
        return "" if any(worker.group[0] == tier for worker in self._context.table.by_role["decode"]) else tier

    def _back_by(self, now: float) -> float:
        """Until when it may wait for a worker to come back, its own deadline at the latest; 0: none is to. Waiting again ends
        when the first wait would have ended."""
        wait_s, table = self.config.return_wait_s, self._context.table
        within_s = wait_s if self._due is None else 2 * wait_s
        if self.started or not table.returns(self.hints.tier, self._ask.adapter, now, within_s, self._barred):
            return 0.0
        slots, others = self._context.desk.gate.slots, table.reached()
        if others and slots and self._context.holding.returning >= max(1, slots // SLOTS_SHARE):
            return 0.0
        if self._due is None:
            self._due = (min(now + wait_s, self.deadline), self.deadline)
        return self._due[0] if now < self._due[0] else 0.0

    def _waited(self, now: float) -> None:
        """A worker is there. How long the fleet took to wake says nothing of it; an outage's seconds are the request's own."""
        self._held = False
        if self._due is None:
            self.started_at, self.deadline = now, now + self.config.first_token_deadline_s
        else:
            self.deadline = self._due[1]
            self.record.went_wrong(now, "waited until a decode worker was there again")

    def _awaits(self, worker: Worker, why: str, *, gone: bool) -> bool:
        """The last worker that could decode it was not reached (`gone`), or died: it waits until one is back. False: it
        may not."""
        table, now, tier = self._context.table, self._context.clock(), self.hints.tier
        if not gone and self._decode_failures > 1:
            return False
        if any(
            not (other is worker or other.is_lost or other.uid in self._excluded) and tier in ("", other.group[0])
            for other in table.by_role["decode"]
        ):
            return False
        if not self._back_by(now) or not self._may_retry(free=gone):
            return False
        self._trip_over()
        self._unreached = 0
        name = worker.endpoint.name
        self.record.tried(now, 0.0, f"{name}: {for_the_record(why)}", None, None)
        self._hold(f"{name}: {why}", "no_worker")
        return True

    @abstractmethod
    def _may_retry(self, *, free: bool) -> bool:
        """One more attempt; `free`: nothing ran in the one before."""

    @abstractmethod
    def cut(self, error: RequestError) -> None:
        """End it now; the client is told why."""
