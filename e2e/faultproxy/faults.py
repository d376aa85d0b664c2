"""What a test may ask of the proxy. Choices by chance follow from the seed, the request and how often it came: no global order
of events decides, so that a run can be repeated."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from e2e.faultproxy.ledger import Request


@dataclass
class Crash:
    """Kill the operator at the k-th mutating request from now on, k = 1, 2, ..."""

    k: int
    when: Literal["before", "after"]
    """Before the API server sees it, or after it was carried out and before the answer is passed on."""
    kill: Callable[[], None]
    seen: int = 0
    hit: Request | None = None

    def due(self, request: Request) -> bool:
        """Whether this is the request; counts it."""
        if not request.mutating or self.hit is not None:
            return False
        self.seen += 1
        if self.seen == self.k:
            self.hit = request
        return self.hit is request


@dataclass
class Answer:
    """Answer requests instead of passing them on."""

    status: int
    probability: float = 1.0
    retry_after_s: int | None = None
    only: Callable[[Request], bool] = lambda request: True
    until_s: float | None = None
    """time.monotonic() at which it stops; None: until taken back."""
    carried_out: bool = False
    """The API server carries the request out first: the answer lies."""

    def applies(self, request: Request, draw: Callable[[Request], float]) -> bool:
        """Whether to answer this request."""
        over = self.until_s is not None and time.monotonic() >= self.until_s
        return not over and self.only(request) and draw(request) < self.probability


@dataclass
class EventFault:
    """Do something to watch events, at most `count` of them."""

    action: Literal["drop", "delay", "duplicate", "replay"]
    kind: str = ""
    """Plural; empty: every kind."""
    name: Callable[[str], bool] = lambda name: True
    types: frozenset[str] = frozenset({"ADDED", "MODIFIED", "DELETED"})
    count: int = 1
    hold_s: float = 0.0
    """delay: how long this event and all that follow it on its connection wait; replay: when it is told again."""
    done: list[str] = field(default_factory=list)

    def applies(self, kind: str, type_: str, name: str) -> bool:
        """Whether this event is one; counts it."""
        if len(self.done) >= self.count or type_ not in self.types or (self.kind and kind != self.kind) or not self.name(name):
            return False
        self.done.append(f"{type_} {kind}/{name}")
        return True


class Dice:
    """A number in [0, 1) per request: the same seed, request and occurrence give the same number."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._times: Counter[tuple[str, ...]] = Counter()
        self._drawn: dict[int, float] = {}

    def draw(self, request: Request) -> float:
        if request.number not in self._drawn:
            key = (request.method, request.kind, request.name, request.subresource, str(request.watch))
            self._times[key] += 1
            text = f"{self.seed}\n{key}\n{self._times[key]}"
            self._drawn[request.number] = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56
        return self._drawn[request.number]
