"""What went through the proxy: every request with its answer, every watch event with what became of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

MUTATING = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass
class Request:
    """One request; `status` is None until it is answered, 0 when the connection was cut instead."""

    number: int
    at_s: float
    method: str
    kind: str
    """Plural, e.g. pods."""
    namespace: str
    name: str
    subresource: str
    watch: bool
    user_agent: str
    body: Any = None
    """Of a mutating request, parsed."""
    status: int | None = None
    fault: str = ""
    """What the proxy did to it; empty when it was passed on."""
    held_s: float = 0.0
    """How long the proxy kept it before it did anything."""

    @property
    def mutating(self) -> bool:
        return self.method in MUTATING

    def __str__(self) -> str:
        what = "/".join(part for part in (self.kind, self.name, self.subresource) if part)
        return f"{self.method} {what} -> {self.status}" + (f" ({self.fault})" if self.fault else "")


@dataclass(frozen=True)
class Passed:
    """One watch event and what the proxy did with it: passed, dropped, delayed, duplicated, replayed, frozen."""

    at_s: float
    kind: str
    type: str
    name: str
    done: str


@dataclass
class Ledger:
    """Appended to by the proxy's thread, read by the test's."""

    requests: list[Request] = field(default_factory=list)
    events: list[Passed] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, method: str, where: tuple[str, str, str, str], *, watch: bool, agent: str, body: Any) -> Request:
        """A request has arrived."""
        kind, namespace, name, subresource = where
        with self._lock:
            number = len(self.requests)
            made = Request(number, time.monotonic(), method, kind, namespace, name, subresource, watch, agent, body)
            self.requests.append(made)
        return made

    def writes(self, since: int = 0, *, carried_out: bool = False) -> list[Request]:
        """Mutating requests from number `since` on."""
        found = [request for request in self.requests[since:] if request.mutating]
        return [r for r in found if r.status is not None and 200 <= r.status < 300] if carried_out else found

    def mark(self) -> int:
        """A point in time to count from."""
        return len(self.requests)

    def faults(self) -> Counter[str]:
        """How often each fault happened, requests and events together."""
        told = Counter(request.fault for request in self.requests if request.fault)
        return told + Counter(event.done for event in self.events if event.done != "passed")

    def busiest(self, requests: Iterable[Request], window_s: float) -> int:
        """The most of `requests` that fall into any window of this length."""
        times = sorted(request.at_s for request in requests)
        return max((sum(1 for at in times[i:] if at < start + window_s) for i, start in enumerate(times)), default=0)

    def tail(self, count: int = 40) -> str:
        """The last requests, for failure messages."""
        return "\n".join(map(str, self._recent(count)))

    def _recent(self, count: int) -> Iterator[Request]:
        yield from [request for request in list(self.requests) if not request.watch][-count:]


def where(path: str) -> tuple[str, str, str, str]:
    """An API path as (plural, namespace, name, subresource); empty strings for what it does not name."""
    parts = [part for part in path.split("/") if part]
    rest = parts[2:] if parts[:1] == ["api"] else parts[3:]
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    kind, name, subresource = [*rest, "", "", ""][:3]
    return kind, namespace, name, subresource
