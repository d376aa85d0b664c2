"""What flows share, and what they need of a client's connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fleet_router.config import RouterConfig
from fleet_router.desk import Desk
from fleet_router.dialect.chat import Ends
from fleet_router.errors import RequestError
from fleet_router.explain.recorder import Recorder
from fleet_router.health.budget import RetryBudget
from fleet_router.health.sent import Room
from fleet_router.hints import ALWAYS
from fleet_router.holding import Holding
from fleet_router.inbound import Heads
from fleet_router.metrics import Metrics
from fleet_router.outbox import Outbox
from fleet_router.overtaken import Overtaken
from fleet_router.policy.hedge import HedgeBudget
from fleet_router.receiving import UNREAD, Receiving
from fleet_router.release import Releases
from fleet_router.spare import Spares
from fleet_router.workers import WorkerTable

if TYPE_CHECKING:
    from fleet_router.gathering import Gather
    from fleet_router.knowledge import Knowledge


class Client(Protocol):
    """The client's side of one request."""

    @property
    def request_id(self) -> str: ...

    @property
    def leg_id(self) -> str:
        """Unlike any other request's, whatever the client calls it: what a worker knows this request by."""
        ...

    @property
    def last_answer(self) -> bool:
        """The answer's head must say that the connection closes after it."""
        ...

    def write(self, data: bytes) -> None: ...
    def finish(self, *, last: bool) -> None: ...
    def refuse(self, error: RequestError) -> None: ...
    def break_off(self, error: RequestError, *, stream: bool, last: bool) -> None: ...
    def abort(self) -> None: ...
    def fail(self, error: RequestError) -> None:
        """A bug of ours: the request ends, told or not."""
        ...


@dataclass
class Drafts:
    """Answers of small models that are held until they were judged."""

    bytes: int = 0


@dataclass
class Context:
    """What every flow of a process shares."""

    table: WorkerTable
    config: RouterConfig
    metrics: Metrics
    clock: Callable[[], float]
    desk: Desk
    recorder: Recorder
    holding: Holding = field(default_factory=Holding)
    budget: RetryBudget = field(default_factory=RetryBudget)
    hedges: HedgeBudget = field(default_factory=HedgeBudget)
    room: Room = field(default_factory=Room)
    drafts: Drafts = field(default_factory=Drafts)
    releases: Releases = field(init=False)
    overtaken: Overtaken = field(init=False)
    outbox: Outbox = field(default_factory=Outbox)
    heads: Heads = field(default_factory=Heads)
    receiving: Receiving = field(default_factory=Receiving)
    unread: Receiving = field(default_factory=lambda: Receiving(UNREAD))
    ends: Ends = field(default_factory=Ends)
    spares: Spares = field(init=False)
    wall: Callable[[], float] = field(default_factory=lambda: time.time)
    """What time it is for engines; nothing is measured by it."""
    draining: bool = False
    knowledge: Knowledge | None = None
    """Precise knowledge of the workers' caches, where the fleet asks for it."""
    gather: Gather | None = None
    """Where several processes share the port: asks all of them."""
    wanted: frozenset[bytes] = ALWAYS
    """Headers that routing goes by, by lower-case name, and those that are always kept: before there is any document, too, a
    forwarded request is not the router's own host's."""

    def __post_init__(self) -> None:
        self.releases = Releases(self.metrics)
        self.overtaken = Overtaken(self)
        self.spares = Spares(self.metrics.requests)
        self.holding.faults = self.desk.faults
