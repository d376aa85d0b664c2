"""Requests that wait in this process until a worker comes, oldest first, and who wants to hear that some wait.

A request is held when nobody can answer it and the operator says that a tier is at zero or wakes from there, or, for seconds
only, when a worker that was there just now may be back (see `waiting`); bounded in number, bytes and time. Where no place is
left, the tenant that holds most of them by weight gives way. It goes on when workers come, in the order of arrival; it ends when
its client leaves, when its time is up, or when the router stops. What the operator reads is the number of those that wait now. No
clock and no socket in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fleet_router.config import HoldBounds
from fleet_router.errors import RequestError, leaving
from fleet_router.faults import Faults
from fleet_router.histogram import Histogram
from fleet_wire.endpoints import AtZero

HELD_BUCKETS_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
RETRY_WAKING_S = 10
"""When to come again: workers are on their way."""
RETRY_LIMITED_S = 60
"""When to come again: there are no nodes, or no quota, for the workers."""
LISTENERS_MOST = 64
"""More are answered at once: only operators listen."""
LISTEN_MOST_S = 30.0


class Waiting(Protocol):
    """A request that can be held."""

    def begin(self) -> None:
        """Workers came: try again."""
        ...

    def cut(self, error: RequestError) -> None:
        """It is not held any longer."""
        ...


class Listener(Protocol):
    """Somebody who asked whether requests wait."""

    def hear(self, held: int) -> None:
        """So many do."""
        ...


@dataclass
class _Place:
    size_bytes: int
    since: float
    until: float
    tenant: str
    weight: float
    tier: str = ""
    returning: tuple[str, str] | None = None
    """It waits for a worker that was there: words and code for what is wrong."""


def _shares(places: dict[Waiting, _Place], new: _Place) -> dict[str, list[float]]:
    """Requests and bytes of each tenant over its weight, with the newcomer's."""
    held: dict[str, list[float]] = {}
    for place in (*places.values(), new):
        share = held.setdefault(place.tenant, [0.0, 0.0])
        share[0] += 1 / place.weight
        share[1] += place.size_bytes / place.weight
    return held


@dataclass
class Holding:
    """What one process holds."""

    at_zero: tuple[AtZero, ...] = ()
    """Tiers that a held request wakes, or that wake already."""
    size_bytes: int = 0
    """Bodies of all requests that wait."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """released, refused (nothing wakes any more), left, expired, full, pushed (another tenant had less), stopped."""
    faults: Faults = field(default_factory=Faults)
    waited: Histogram = field(default_factory=lambda: Histogram(HELD_BUCKETS_S))
    """Of those that were tried again."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why they wait: waking, returning."""
    returning: int = 0
    """Those that wait for a worker to come back."""
    lost: set[str] = field(default_factory=set)
    """Workers that were not reached when these came: who of them is there again lets them go on."""
    _places: dict[Waiting, _Place] = field(default_factory=dict)
    _since: dict[Waiting, float] = field(default_factory=dict)
    """While they are tried again: when those that were released began to wait."""
    _served: bool = False
    """A worker serves: what was held and finds none for itself, because its adapter is still being loaded, waits on."""
    _listeners: set[Listener] = field(default_factory=set)
    _pushed: list[tuple[Waiting, _Place]] = field(default_factory=list)
    """Who gave way and was not told yet: telling one may bring its connection's next request here."""
    _telling: bool = False
    _stopped: bool = False

    def __len__(self) -> int:
        return len(self._places)

    # -- requests ---------------------------------------------------------------------------------------------------
    def hold(
        self, one: Waiting, size_bytes: int, why: tuple[str, str], now: float, bounds: HoldBounds, tenant: str = "",
        weight: float = 1.0, tier: str = "", back_by: float = 0.0,
    ) -> float:  # fmt: skip
        """Let it wait; returns until when. RequestError when it may not; `why`: words and code for why nobody can
        answer it. `tenant`, of this weight: whose share of the places it takes. `tier`: of which no worker is there, and which
        alone may answer; empty: whoever comes may. `back_by`: no tier wakes, but a worker that was there may be back by
        then; 0: it will not."""
        if self._stopped and not back_by:
            raise leaving()
        if not back_by and not self.wakes(tier) and (tier or not (self._served and one in self._since)):
            raise RequestError(503, why[0], code=why[1])
        since = self._since.get(one, now)
        until = min(back_by, since + bounds.time_s) if back_by else since + bounds.time_s
        place = _Place(size_bytes, since, until, tenant, weight, tier, why if back_by else None)
        gives_way = self._room_for(place, bounds)
        if gives_way is None:
            self.outcomes["full"] += 1
            held = f"{len(self._places)} requests with {self.size_bytes} bytes"
            raise self._refusal(f"{held} wait for workers already", "hold_full", place)
        self._places[one] = place
        self.size_bytes += size_bytes
        if one not in self._since:
            self.reasons["returning" if back_by else "waking"] += 1
        if back_by:
            self.returning += 1
        pushed = [(other, self._places[other]) for other in gives_way]
        for other in gives_way:
            self.drop(other, "pushed")
        listeners, self._listeners = self._listeners, set()
        for listener in listeners:
            listener.hear(len(self._places))
        self._tell(pushed)
        return place.until

    def wakes(self, tier: str = "") -> bool:
        """This tier rests at zero or wakes from there; empty: some tier does."""
        return any(tier in ("", one.tier) for one in self.at_zero)

    def _room_for(self, place: _Place, bounds: HoldBounds) -> list[Waiting] | None:
        """Who gives way to it: the newest of the tenant with the largest share, as long as that stays the larger one. None when
        the newcomer's own is."""
        requests, size_bytes = len(self._places) + 1, self.size_bytes + place.size_bytes
        if requests <= bounds.requests and size_bytes <= bounds.bytes:
            return []
        gone, held = list[Waiting](), _shares(self._places, place)
        newest = {tenant: [one for one, other in self._places.items() if other.tenant == tenant] for tenant in held}
        while requests > bounds.requests or size_bytes > bounds.bytes:
            by_bytes = requests <= bounds.requests  # of what there is too much of
            fullest = max(held, key=lambda tenant: held[tenant][by_bytes])
            if fullest == place.tenant or held[fullest][by_bytes] <= held[place.tenant][by_bytes]:
                return None
            gone.append(newest[fullest].pop())
            found = self._places[gone[-1]]
            held[fullest][0] -= 1 / found.weight
            held[fullest][1] -= found.size_bytes / found.weight
            requests, size_bytes = requests - 1, size_bytes - found.size_bytes
        return gone

    def _tell(self, gone: list[tuple[Waiting, _Place]]) -> None:
        """Those that gave way. A loop and never a recursion, however many requests their connections send behind each other."""
        self._pushed += gone
        if self._telling:
            return
        self._telling = True
        try:
            while self._pushed:
                one, place = self._pushed.pop(0)
                error = self._refusal("others wait with a smaller share of the places than yours", "hold_share", place)
                try:
                    one.cut(error)
                except Exception as fault:
                    self.faults.end(fault, one.cut)
        finally:
            self._telling = False

    def drop(self, one: Waiting, outcome: str) -> bool:
        """It waits no longer; False when it did not."""
        place = self._places.get(one)
        if place is None:
            return False
        self._leaves(one, place)
        self.outcomes[outcome] += 1
        return True

    def expired(self, one: Waiting) -> RequestError | None:
        """Its time is up: what to tell its client; None when it does not wait here."""
        place = self._places.get(one)
        if place is None or not self.drop(one, "expired"):
            return None
        came = "was there again" if place.returning else "came"
        return self._refusal(f"no worker {came} within {place.until - place.since:.3g} s", "waking", place)

    def follow(self, at_zero: Sequence[AtZero], now: float, *, served: bool, reached: bool = True) -> None:
        """New endpoints. `served`: a worker can answer; then all that wait are tried again, those that wait for one to come back
        unless none of these workers can be reached. Otherwise those are of whose tiers none wakes any more."""
        self.at_zero, self._served = tuple(at_zero), served
        self._try({
            one: place for one, place in self._places.items()
            if (reached or not served if place.returning else served or not self.wakes(place.tier))
        }, now)  # fmt: skip

    def returned(self, now: float) -> None:
        """A worker that could not be reached is there again: those that wait for one are tried again."""
        served, self._served = self._served, True
        self._try({one: place for one, place in self._places.items() if place.returning}, now)
        self._served = served

    def _leaves(self, one: Waiting, place: _Place) -> None:
        del self._places[one]
        self.size_bytes -= place.size_bytes
        self.returning -= place.returning is not None

    def _try(self, places: dict[Waiting, _Place], now: float) -> None:
        """They begin; who finds no worker is back in its place, or refused."""
        for one, place in places.items():
            self._leaves(one, place)
        self._since = {one: place.since for one, place in places.items()}
        for one, place in places.items():
            try:
                one.begin()
            except Exception as error:
                self.faults.end(error, one.cut)
            if one not in self._places:
                self.outcomes["released" if self._served else "refused"] += 1
                self.waited.observe(now - place.since)
        self._since = {}

    def stop(self) -> None:
        """The router goes: nobody waits for a tier to wake, of which the operator would hear no more from here. A worker that was
        there just now is back in seconds, or it was in vain: the drain has that time."""
        self._stopped = True
        for one in [one for one, place in self._places.items() if place.returning is None]:
            self.drop(one, "stopped")
            try:
                one.cut(leaving())
            except Exception as fault:
                self.faults.end(fault, one.cut)
        listeners, self._listeners = self._listeners, set()
        for listener in listeners:
            listener.hear(0)

    def _refusal(self, what: str, code: str, place: _Place) -> RequestError:
        """503 that says when to come again, and whether the cluster is full."""
        tier = place.tier
        if place.returning is not None:
            words, known = place.returning
            return RequestError(503, f"{words}; {what}", code=known if code == "waking" else code)
        limited = any(one.limited for one in self.at_zero if tier in ("", one.tier))
        if limited:
            what, code = f"{what}; the cluster has no room for them at this moment", "no_capacity"
        seconds = RETRY_LIMITED_S if limited else RETRY_WAKING_S
        return RequestError(503, f"the model wakes from zero: {what}", code=code, headers=f"retry-after: {seconds}\r\n")

    # -- who wants to hear --------------------------------------------------------------------------------------------
    def listen(self, listener: Listener) -> None:
        """It hears at once when something waits, else when something does."""
        if self._places or self._stopped or len(self._listeners) >= LISTENERS_MOST:
            listener.hear(len(self._places))
        else:
            self._listeners.add(listener)

    def unlisten(self, listener: Listener) -> None:
        """It has heard, or left."""
        self._listeners.discard(listener)

    # -- metrics ----------------------------------------------------------------------------------------------------
    def lines(self) -> Iterable[str]:
        """Prometheus text."""
        yield "# TYPE fleet_router_held gauge"
        yield f"fleet_router_held {len(self._places)}"
        yield "# TYPE fleet_router_held_bytes gauge"
        yield f"fleet_router_held_bytes {self.size_bytes}"
        yield "# TYPE fleet_router_held_total counter"
        yield from (f'fleet_router_held_total{{outcome="{name}"}} {n}' for name, n in sorted(self.outcomes.items()))
        yield "# TYPE fleet_router_held_for_total counter"
        yield from (f'fleet_router_held_for_total{{reason="{name}"}} {n}' for name, n in sorted(self.reasons.items()))
        yield "# TYPE fleet_router_held_seconds histogram"
        yield from self.waited.lines("fleet_router_held_seconds", 'end="tried"')
