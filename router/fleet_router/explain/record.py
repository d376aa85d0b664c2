"""What is remembered of one request: references and times, filled in by its flow. Text is made when somebody asks for it.

Never a prompt, a key or a body: sizes and names only, so that whoever may read records learns nothing that was said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fleet_router.health.inband import for_the_record

if TYPE_CHECKING:
    from fleet_router.admission.lanes import Lane
    from fleet_router.ask import Ask
    from fleet_router.errors import RequestError
    from fleet_router.explain.trace import Trace
    from fleet_router.policy.terms import CostAsk, Offer, Weighed
    from fleet_router.workers import Worker

Ended = Literal["", "answered", "refused", "failed", "left"]
"""Empty: it runs. `left`: the client did not wait for the first byte."""


class Second:
    """A prefill leg that was sent because the first one was late."""

    __slots__ = ("at", "outcome", "why", "worker")

    def __init__(self, worker: Worker, at: float) -> None:
        self.worker, self.at = worker, at
        self.outcome = ""
        """won, lost, failed, cut; empty: it runs."""
        self.why = ""
        """It failed, in our words."""


class Try:
    """One attempt: what was decided, and when its legs were sent and over. Times are on the router's clock, 0: not so far.

    Numbers are copied out of the decision: a thousand decisions of thirty objects each would fill a core's cache, and every
    request would wait for memory when the oldest one is given up (a twentieth of its CPU time).
    """

    __slots__ = (
        "at", "by_cost", "compared", "cost_s", "decided_s", "decode", "missing_tokens", "moved_tokens", "prefill", "prefilled_at",
        "prompt_tokens", "reason", "replaced", "second", "sides", "why", "wrong_at",
    )  # fmt: skip

    def __init__(self, at: float, decided_s: float, reason: str, prefill: Worker | None, decode: Worker | None) -> None:
        self.at = at
        """When the first leg was sent."""
        self.decided_s = decided_s
        self.reason = reason
        self.prefill, self.decode = prefill, decode
        """Prefill None: the decode worker prefills; both None: nobody was found."""
        self.sides: list[Weighed] | None = None
        """Who was compared; None: the policy knows no costs, and what follows is 0."""
        self.by_cost = False
        self.compared = 0
        self.cost_s = self.prompt_tokens = self.missing_tokens = self.moved_tokens = 0.0
        self.prefilled_at = 0.0
        """When the KV was ready and the decode leg was sent."""
        self.second: Second | None = None
        """The prompt was prefilled by two."""
        self.wrong_at = 0.0
        self.why = ""
        """What went wrong, in our words."""
        self.replaced = False
        """Nothing did, but its answer was a draft that was not good enough: another tier was asked."""

    def weighed(self, offer: Offer, ask: CostAsk) -> None:
        """It was decided by cost. The decision is over: what was compared is the record's from here on."""
        self.sides, self.by_cost, self.compared = ask.seen, ask.by_cost, offer.looked
        self.cost_s, self.prompt_tokens = offer.cost_s, ask.tokens
        self.missing_tokens, self.moved_tokens = offer.missing, offer.moved

    def pack(self) -> None:
        """To be kept when the request is over: not before, for its first byte would wait for it."""
        for side in self.sides or ():
            side.pack()


class Record:
    """One request."""

    __slots__ = (
        "adapter", "begun_at", "came_at", "ended", "ended_at", "error", "first_at", "lane", "last_at", "leg_id", "onward", "path",
        "prompt_bytes", "request_id", "shown", "status", "stream", "trace", "tries", "waited", "writes",
    )  # fmt: skip

    def __init__(self, ids: tuple[str, str], path: bytes, ask: Ask, lane: Lane, came_at: float, waited: bool) -> None:
        self.request_id, self.leg_id = ids
        self.path, self.lane, self.adapter, self.prompt_bytes = path, lane, ask.adapter, len(ask.prompt)
        self.came_at, self.stream = came_at, ask.stream
        self.waited = waited
        """For a slot, or for workers."""
        self.begun_at = 0.0
        """When a slot was free and the first decision was begun."""
        self.tries: list[Try] = []
        self.first_at = self.last_at = self.ended_at = 0.0
        self.writes = 0
        """Times that the answer's bytes came."""
        self.status = 0
        """Of the answer; 0: none was begun."""
        self.ended: Ended = ""
        self.error: RequestError | None = None
        """What the client was told instead of an answer, or at its end."""
        self.shown = False
        """The answer's head tells of the decision."""
        self.trace: Trace | None = None
        """Set while its spans are wanted."""
        self.onward = b""
        """Header lines for workers."""

    def tried(self, at: float, decided_s: float, reason: str, prefill: Worker | None, decode: Worker | None) -> Try:
        """A decision was made; both workers None: nobody can answer now."""
        if self.tries and self.tries[-1].decode is None and not self.tries[-1].why:
            self.tries.pop()  # it waited for workers: how often it looked says nothing
            self.waited = True
        if not self.tries:
            self.begun_at = at - decided_s
        one = Try(at, decided_s, reason, prefill, decode)
        self.tries.append(one)
        if self.trace is not None:
            self.onward = self.trace.to_leg(2 * len(self.tries) - 1)
        return one

    def prefilled(self, at: float) -> None:
        """The prefill leg is done, the decode leg is sent."""
        self.tries[-1].prefilled_at = at
        if self.trace is not None:
            self.onward = self.trace.to_leg(2 * len(self.tries))

    def went_wrong(self, at: float, why: str) -> None:
        """The last attempt failed; there may be another."""
        if self.tries:
            self.tries[-1].wrong_at, self.tries[-1].why = at, for_the_record(why)

    def draft_replaced(self, at: float, why: str) -> None:
        """The last attempt's answer was a draft, and no client sees anything of it."""
        self.status, self.first_at, self.error = 0, 0.0, None
        if self.tries:
            one = self.tries[-1]
            one.replaced = not one.why
            self.went_wrong(one.wrong_at or at, f"{one.why}; {why}" if one.why else why)

    @property
    def smooth(self) -> bool:
        """Answered, at the first attempt of the tier that answered, and without any trouble in those before it."""
        if self.ended != "answered" or self.error is not None or not self.tries or self.tries[-1].why:
            return False
        return all(one.replaced for one in self.tries[:-1])
