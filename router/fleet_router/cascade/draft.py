"""A draft: the flow of an answer whose client is us, until it was judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_router.admission.gate import Ticket
from fleet_router.admission.quota import Outcome
from fleet_router.admission.runaway import Why
from fleet_router.ask import Ask, Hints
from fleet_router.context import Client, Context
from fleet_router.errors import RequestError
from fleet_router.explain.record import Record
from fleet_router.flow import Flow
from fleet_router.policy.choose import NO_DECODE
from fleet_router.policy.chosen import Choice, Refusal

if TYPE_CHECKING:
    from fleet_router.cascade.climb import Climb


class Held:
    """Takes the client's place: keeps what the flow says, and tells the climb when it has said all."""

    def __init__(self, climb: Climb, client: Client, most_bytes: int) -> None:
        self._climb, self._client, self._most_bytes = climb, client, most_bytes
        self.parts: list[bytes] = []
        self.size_bytes = 0
        self.last = False
        """The answer's head says that the connection closes after it."""

    @property
    def request_id(self) -> str:
        """The client's."""
        return self._client.request_id

    @property
    def leg_id(self) -> str:
        """The client's: drafts of one request follow each other."""
        return self._client.leg_id

    @property
    def last_answer(self) -> bool:
        """The client's."""
        return self._client.last_answer

    def write(self, data: bytes) -> None:
        """A piece of the answer."""
        self.parts.append(data)
        self.size_bytes += len(data)
        self._climb.grew(self, len(data), over=self.size_bytes > self._most_bytes)

    def finish(self, *, last: bool) -> None:
        """The answer is complete."""
        self.last = last
        self._climb.drafted()

    def refuse(self, error: RequestError) -> None:
        """There is none."""
        self._climb.undrafted(error)

    def break_off(self, error: RequestError, *, stream: bool, last: bool) -> None:
        """It broke in the middle."""
        self._climb.undrafted(error)

    def abort(self) -> None:
        """Nobody waits for us to read."""

    def fail(self, error: RequestError) -> None:
        """Also what goes wrong behind a draft's end: nobody else would tell the client."""
        self._client.fail(error)


class Draft(Flow):
    """One held answer. It has no ticket to give back: that is the climb's."""

    __slots__ = ("ended", "used")

    def __init__(
        self, context: Context, held: Held, path: bytes, ask: Ask, ticket: Ticket, hints: Hints, record: Record | None
    ) -> None:  # fmt: skip
        super().__init__(context, held, path, ask, ticket, None, hints, record)
        self.ended: Outcome = "left"
        self.used: tuple[int, int] | None = None
        """Tokens (input, output), where they are counted."""

    def _count(self, status: int) -> None:
        """The climb counts what the client is told."""

    def _count_broken(self) -> None:
        """No client saw it."""

    def silent(self) -> None:
        """Where nobody else of the tier can be asked, the next tier can."""
        worker = self._leg_worker
        begun = self.started and not self.begins_anew()
        if worker is None or self.done or begun or worker.role == "prefill" or self._others(worker):
            super().silent()
            return
        self._abandon_leg()
        self.end_leg()
        self._release_lease()
        self._refuse(RequestError(503, f"{worker.endpoint.name} has said nothing for too long"))

    def _leave(self, outcome: Outcome, begun: bool = True, at: float = 0.0) -> None:
        self.ended = outcome
        if self._metered and outcome == "answered":
            self.used = self._used()

    def _hold(self, why: str, code: str) -> None:
        """A draft waits for no worker: the next tier is asked."""
        self._refuse(RequestError(503, why, code=code))

    def _end_runaway(self, why: Why) -> None:
        """An answer that had to be ended is none while there is a next tier; the worker sees a client that left."""
        self._context.desk.runaways[why] += 1
        self._abandon_leg()
        self._break(RequestError(502, f"the draft ran away: {why}"))

    def _last_resort(self, now: float, hints: Hints) -> tuple[Choice | Refusal, list[int]]:
        """The next tier is better than workers that failed."""
        return NO_DECODE, []

    def _back_by(self, now: float) -> float:
        """Nor for one that was there."""
        return 0.0

    def close(self, outcome: Outcome) -> None:
        """It was the last: close the request's record."""
        self._context.recorder.close(
            self.record, outcome, self.last_byte_at, self._gaps + (not self._first), self._context.clock()
        )

    def drop(self) -> None:
        """Stop it: the worker sees a client that left. Nothing of it is told to anybody."""
        if self.done:
            return
        self.done = True
        self._abandon_leg()
        self._trip_over()
        self.end_leg()
        self._release_lease()
        self._keep_no_more()
        self._leave("left")
