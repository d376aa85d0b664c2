"""The shell around `admission`: who may ask, when it begins, what it used. One per process; flows and the server call it.

Begun flows may end at once and free their slot, so that starting the next one is a loop and never a recursion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from fleet_router.admission.gate import Gate, Ticket
from fleet_router.admission.keys import KeyTable
from fleet_router.admission.labels import Labels, Told, told_of
from fleet_router.admission.lanes import Entry, Lane, classes_of, open_entry, tenant_entries
from fleet_router.admission.quota import Account, Outcome
from fleet_router.admission.refused import Full, Over
from fleet_router.admission.runaway import FINISH, Runaway, Why
from fleet_router.admission.tenants import Tenants
from fleet_router.admission.usage import estimated_of
from fleet_router.ask import Ask
from fleet_router.config import RouterConfig
from fleet_router.errors import RequestError
from fleet_router.faults import Faults
from fleet_router.histogram import Histogram
from fleet_router.lengths import tells_prompt
from fleet_router.metrics import WAIT_BUCKETS_S
from fleet_router.request import asked_tokens, choices_of, sequences_of, with_fields

CLASS_HEADER: Final = "x-slo-class"
USUAL_OUTPUT_TOKENS: Final = 256
"""Cost of an answer in the fair queue when the client says no limit."""


class Waits(Protocol):
    """A request that the desk starts or turns away."""

    def begin(self) -> None: ...
    def admitted(self) -> None: ...
    def cut(self, error: RequestError) -> None: ...


class Worker(Protocol):
    """A worker that left."""

    @property
    def own(self) -> int:
        """Requests of ours that still run there."""
        ...


class Desk:
    """Admission of one router process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.gate = Gate()
        self.faults = Faults()
        self.accounts: dict[str, Account] = {}
        self._labels = Labels()
        self.waits: dict[str, Histogram] = {}
        self.refused_keys = 0
        self.runaways: dict[Why, int] = dict.fromkeys(FINISH, 0)
        self.slots: dict[str, int] = {}
        """By tier."""
        self.tenants_needed = False
        self._everybody = Account("")
        self._tenants: Tenants | None = None
        self._config = RouterConfig(fleet="", served_name="")
        self._open = open_entry(self._config, self._everybody)
        self._keys: KeyTable[Entry] | None = None
        self._flows: dict[Ticket, Waits] = {}
        self._gone: list[Worker] = []
        self._pushed: list[Ticket] = []
        """Who gave way and was not told yet."""
        self._turning = False
        self._starting = False
        self.closed = False
        """Who waits begins no more: the router cuts what is left."""

    # -- documents --------------------------------------------------------------------------------------------------
    def follow(self, config: RouterConfig, slots: dict[str, int], gone: Sequence[Worker]) -> list[str]:
        """New configuration, slots by tier, and the workers that left with requests of ours; returns what of the tenants file is
        odd under another configuration than before."""
        problems = list[str]()
        self.slots = slots
        self._gone += gone
        self.gate.follow(sum(slots.values()), config.queue_per_slot, classes_of(config).values())
        if config != self._config:
            self._config = config
            self._open = open_entry(config, self._everybody)
            if self._tenants is not None:
                problems = self.know(self._tenants)
        self.tick()
        return problems

    def know(self, tenants: Tenants) -> list[str]:
        """The tenants file; returns what is odd in it. From now on who has no key is nobody."""
        self._tenants = tenants
        self._keys, problems = tenant_entries(self._config, tenants, self.accounts, self._now_ns())
        self._labels.follow(self.accounts)
        return problems

    @property
    def ready(self) -> bool:
        """Requests can be told apart."""
        return not self.tenants_needed or self._keys is not None

    @property
    def config(self) -> RouterConfig:
        """What is followed."""
        return self._config

    def told(self) -> dict[str, Told]:
        """What tenants have used, by label; of everybody where none are needed."""
        return self._labels.told() if self.tenants_needed else {"": told_of([self._everybody])}

    @property
    def tenants(self) -> int:
        """Tenants that are known."""
        return len(self._tenants.tenants) if self._tenants is not None else 0

    # -- a request comes --------------------------------------------------------------------------------------------
    def entry(self, key: bytes) -> Entry:
        """Whose request it is; RequestError 401, or 503 as long as no tenants file could be read."""
        if not self.tenants_needed:
            return self._open
        if self._keys is None:
            raise RequestError(503, "the tenants of this router are not known yet", code="tenants_unknown")
        found = self._keys.find(key)
        if found is None:
            self.refused_keys += 1
            what = "Incorrect API key provided." if key else "You didn't provide an API key: Authorization: Bearer KEY is needed."
            raise RequestError(401, what, code="invalid_api_key", headers="www-authenticate: Bearer\r\n")
        return found

    def tenant_of(self, key: bytes) -> str:
        """Name of the tenant whose key this is; empty for nobody's, and where none are told apart."""
        found = self._keys.find(key) if self.tenants_needed and self._keys is not None else None
        return found.account.name if found is not None else ""

    def lane(self, key: bytes, slo_class: bytes) -> Lane:
        """Tenant and class; RequestError 401, 403, 400."""
        entry = self.entry(key) if self.tenants_needed else self._open
        if not slo_class:
            return entry.named
        name = slo_class.decode("latin-1")
        lane = entry.lanes.get(name)
        if lane is not None:
            return lane
        if entry is self._open:
            raise RequestError(400, f"there is no class of this name; there are {', '.join(entry.lanes)}", param=CLASS_HEADER)
        entry.account.counts["class"] += 1
        raise RequestError(403, "this key may not use that class", code="class_not_allowed", param=CLASS_HEADER)

    def admit(self, lane: Lane, ask: Ask, ttft_ms: int = 0) -> tuple[Ask, Ticket]:
        """The request as it is sent, and its ticket, running or waiting; RequestError 400, 403, 429, 529. `start` must follow."""
        account, now = lane.account, self._clock()
        if lane.models is not None and (ask.adapter or lane.config.served_name) not in lane.models:
            account.counts["model"] += 1
            raise RequestError(403, "this key may not use that model", code="model_not_allowed", param="model")
        tokens = 0 if ask.counts else estimated_of(ask)
        if (over := account.charge(tokens, int(now * 1e9))) is not None:
            raise self._quota(account, over, now)
        wanted = 0 if ask.alone else asked_tokens(ask)
        added = lane.added if ask.alone or wanted else lane.limit_for(ask)
        if added[0]:
            ask = with_fields(ask, added[0], added[1])  # with a star a list would be made, and a tuple of it
        ticket = Ticket(lane, tokens, now)
        if ask.counts:
            ticket.state = "free"
        elif not self.gate.start():
            each = wanted or min(USUAL_OUTPUT_TOKENS, lane.config.max_output_tokens)
            self._queue(ticket, ask, now, ttft_ms, 0 if ask.alone else each * sequences_of(ask))
        return ask, ticket

    def _queue(self, ticket: Ticket, ask: Ask, now: float, ttft_ms: int, wanted: int) -> None:
        """No slot is free, or others wait for it. `wanted`: tokens of the answer, all sequences
        together."""
        if self._gone:
            self._count_strays()
            if self.gate.start():
                return
        lane = ticket.lane
        budget_s = lane.slo_class.ttft_budget_s
        budget_s = min(budget_s, ttft_ms / 1000) if ttft_ms else budget_s
        ticket.waits(ticket.charged + wanted, ask.size_bytes, now, budget_s)
        told = self.gate.queue(ticket, now)
        if isinstance(told, Full):
            lane.account.counts[told.reason] += 1
            lane.account.settle(ticket.charged, "failed", (0, 0), int(now * 1e9))
            status = 529 if told.reason == "overloaded" else 429
            raise _turned_away(status, told.reason, "too many requests wait", told.retry_after_s)
        self._pushed += told

    def start(self, ticket: Ticket, flow: Waits) -> None:
        """Begin it now, or when it is its turn."""
        if not ticket.waiting:
            flow.begin()
            return
        self._flows[ticket] = flow
        self._turn_pushed_away()

    def forget(self, ticket: Ticket) -> None:
        """Instead of `start`: there is no flow for it after all. Nobody else would ever give back what it holds."""
        self._turn_pushed_away()
        self.leave(ticket, "failed", None)

    def _turn_pushed_away(self) -> None:
        """A loop and never a recursion: whoever is told may have its connection's next request come, which pushes out another."""
        if self._turning:
            return
        self._turning = True
        try:
            while self._pushed:
                self._turn_away(self._pushed.pop(0), "overloaded", "others wait for a larger share than theirs", status=529)
        finally:
            self._turning = False

    def _quota(self, account: Account, over: Over, now: float) -> RequestError:
        if over.retry_after_s is None:
            return RequestError(400, over.message, code=over.reason)
        told = account.headers(int(now * 1e9)).decode().removeprefix("\r\n")
        return _turned_away(429, over.reason, over.message, over.retry_after_s, told and told + "\r\n")

    def detector(self, ticket: Ticket, ask: Ask) -> Runaway | None:
        """Who looks at a stream for signs of running away; None when nobody has to."""
        if not self._config.runaway:
            return None
        return Runaway(ticket.lane.config.max_output_tokens * choices_of(ask), controls=not tells_prompt(ask.fields))

    # -- a request goes ---------------------------------------------------------------------------------------------
    def leave(self, ticket: Ticket, outcome: Outcome, used: tuple[int, int] | None, begun: bool = True, at: float = 0.0) -> None:
        """It ended having `used` (input, output) tokens, None where nobody counts; whoever waits may begin. `begun`: it was
        sent to a worker, which one that waits here never was. `at`: when, where somebody has looked at the clock."""
        if ticket.state == "done":
            return
        if ticket.waiting:
            self._flows.pop(ticket, None)
        begun = begun and not ticket.waiting
        now_ns = int((at or self._clock()) * 1e9)
        ticket.lane.account.settle(ticket.charged, outcome, used or (ticket.charged, 0), now_ns, begun)
        self.gate.leave(ticket)
        if self.gate.waiting:
            self.tick()

    def tick(self) -> None:
        """Turn away who waited too long, begin who has a slot. Called when something changed and some times a second."""
        if self._starting:
            return
        self._starting = True
        try:
            if self._gone:
                self._count_strays()
            now = self._clock()
            self.gate.sample(now)
            for late in self.gate.late(now):
                self._turn_away(late, "queue_timeout", "no worker was free in time", status=503)
            while not self.closed and (ticket := self.gate.next()) is not None:
                self._wait_of(ticket, now)
                self._admit(self._flows.pop(ticket))
        finally:
            self._starting = False

    def _admit(self, flow: Waits) -> None:
        """It is its turn. A bug in what it does then is its own."""
        try:
            flow.admitted()
        except Exception as error:
            self.faults.end(error, flow.cut)

    def _turn_away(self, ticket: Ticket, reason: str, message: str, *, status: int) -> None:
        """One that left the queue without having begun."""
        ticket.lane.account.counts[reason] += 1
        ticket.lane.account.settle(ticket.charged, "failed", (0, 0), self._now_ns())
        retry_after_s = self.gate.retry_after_s(self._clock())
        flow = self._flows.pop(ticket)
        try:
            flow.cut(_turned_away(status, reason, message, retry_after_s))
        except Exception as error:
            self.faults.end(error, flow.cut)

    def _wait_of(self, ticket: Ticket, now: float) -> None:
        histogram = self.waits.get(ticket.lane.slo_class.name)
        if histogram is None:
            histogram = self.waits[ticket.lane.slo_class.name] = Histogram(WAIT_BUCKETS_S)
        histogram.observe(now - ticket.at)

    def _count_strays(self) -> None:
        self._gone = [worker for worker in self._gone if worker.own > 0]
        self.gate.strays = sum(worker.own for worker in self._gone)

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)


def _turned_away(status: int, reason: str, message: str, retry_after_s: int, headers: str = "") -> RequestError:
    code = {429: "rate_limit_exceeded", 529: "overloaded"}.get(status, reason)
    return RequestError(status, message, code=code, reason=reason, headers=f"retry-after: {retry_after_s}\r\n{headers}")


def models_of(config: RouterConfig, loaded: Iterable[str]) -> bytes:
    """The answer of /v1/models: the model, and the adapters that some decode worker can answer for now (`loaded`)."""
    card = {"object": "model", "created": 0, "owned_by": "inferencefleet"}
    there = frozenset(loaded)
    found = [{"id": config.served_name, **card}] if config.served_name else []
    if found:
        found += [{"id": name, **card, "parent": config.served_name} for name in config.adapters if name in there]
    return msgspec.json.encode({"object": "list", "data": found})


def one_of(models: bytes, name: str) -> bytes:
    """The answer of /v1/models/NAME out of the one of /v1/models; RequestError when it is not there."""
    for found in msgspec.json.decode(models)["data"]:
        if found["id"] == name:
            return msgspec.json.encode(found)
    raise RequestError(404, f"the model {name[:200]!r} does not exist", code="model_not_found", param="model")


def usable(models: bytes, names: frozenset[str]) -> bytes:
    """The answer of /v1/models with those that a key may ask for."""
    found = msgspec.json.decode(models)
    return msgspec.json.encode({**found, "data": [one for one in found["data"] if one["id"] in names]})
