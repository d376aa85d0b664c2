"""What is read beside the passes: the load of tiers, workers that change their role, adapters, routers at zero. A fleet of which
something new was read is looked at again; a source that hangs costs its own fleet only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.adapters.follow import AdapterFollower
from fleet_operator.adapters.memory import AdapterMemory
from fleet_operator.cluster.interface import Object
from fleet_operator.fleet_objects import FleetObjects
from fleet_operator.fleet_state import FleetState, doubts_due
from fleet_operator.flip.follow import FlipFollower
from fleet_operator.health.logs import about
from fleet_operator.hearing import Hearing
from fleet_operator.ownership import without_strangers
from fleet_operator.picture import Places, pods_of, router_urls, workers
from fleet_operator.pool_names import as_named
from fleet_operator.settings import Platform
from fleet_operator.work_queue import Key
from fleet_planner.types import Demand, FlipReport, TierTelemetry

LOG = logging.getLogger("fleet.operator")
LOOK_S = 0.5
"""How often it is asked what is due."""
ENDING_S = 5.0
"""A fleet that ends waits for two readings that say idle: they are not further apart than this, however seldom it was read."""


class Telemetry(Protocol):
    """Reads the load of one fleet's tiers."""

    async def collect(self, fleet: InferenceFleet, pods: list[Object], routers: list[str]) -> dict[str, TierTelemetry]:
        """By tier; a tier that cannot be read is absent."""
        ...

    async def listen(self, routers: list[str]) -> Demand | None:
        """See `Listen`."""
        ...


@dataclass(frozen=True, slots=True)
class Sources:
    """Who is asked."""

    telemetry: Telemetry
    flips: FlipFollower
    adapters: AdapterFollower


@dataclass(frozen=True, slots=True)
class Known:
    """What the reconciler knows, as it changes."""

    objects: FleetObjects
    states: Mapping[Key, FleetState]
    places: Callable[[], Places]
    is_ours: Callable[[Key], bool]
    touch: Callable[[Key], None]

    def children(self, key: Key) -> dict[tuple[str, str], Object]:
        """Of a fleet, by kind and name: nobody else's worker is asked, or told anything."""
        raw = self.objects.fleets.get(key)
        return without_strangers(as_named(self.objects.children(key), raw)[0], raw) if raw is not None else {}


class Reader:
    """Reads for every fleet, one reading of a kind at a time per fleet."""

    def __init__(
        self, known: Known, sources: Sources, platform: Platform, now: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self._known = known
        self.sources = sources
        self._platform = platform
        self._now = now
        self._monotonic = monotonic
        self.hearing = Hearing(sources.telemetry.listen, self._router_urls, now)

    async def run(self) -> None:
        """Read each fleet's load on its interval, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(LOOK_S)
                for reading in (*self._due(), *self.listen_due()):
                    group.create_task(reading)

    async def read_due(self) -> None:
        """Read the load of every fleet whose interval is over, and wait for it."""
        await asyncio.gather(*self._due())

    def listen_due(self) -> list[Coroutine[Any, Any, None]]:
        """One question per fleet at zero that is not asked already."""
        return self.hearing.due(self._known.is_ours, self._known.touch)

    def _due(self) -> list[Coroutine[Any, Any, None]]:
        """One reading per fleet whose interval is over and that is not being read already; and one look at workers that change
        their role, or of whom it is doubtful which they have."""
        found, now = list[tuple[Key, Coroutine[Any, Any, None]]](), self._now()
        for key, state in self._known.states.items():
            if state.known is None or not self._known.is_ours(key):
                continue
            if not state.reading and not 0 <= now - state.read_at < _interval_s(state.known.fleet, state):
                state.reading, state.read_at = True, now
                found.append((key, self._read(key, state.known.fleet, state)))
            for uid in state.changing - state.following:
                state.following.add(uid)
                found.append((key, self._follow(key, state.known.fleet, state, uid)))
            if (doubts := doubts_due(state, now)) and not state.doubting:
                state.doubting, state.doubted_at = True, now
                found.append((key, self._doubt(key, state.known.fleet, state, doubts)))
            if state.adapters.due(state.known.fleet, now):
                found.append((key, self._adapt(key, state.known.fleet, state.adapters)))
        return [_alone(key, reading) for key, reading in found]

    async def _follow(self, key: Key, fleet: InferenceFleet, state: FleetState, uid: str) -> None:
        """Tell and hear one worker that changes its role."""
        try:
            live = self._known.children(key)
            there = workers(fleet, state, live, self._known.places())
            known = await self.sources.flips.follow(fleet, there, live, state.flips, {uid})
            self._said(key, state, {of: said for of, said in state.flips.items() if of != uid} | known)
        finally:
            state.following.discard(uid)

    async def _doubt(self, key: Key, fleet: InferenceFleet, state: FleetState, doubts: frozenset[str]) -> None:
        """Hear the workers of one fleet of whom it is doubtful which role they have. One that was told a role meanwhile is
        followed: what it says then stands."""
        try:
            live = self._known.children(key)
            there = workers(fleet, state, live, self._known.places())
            heard = await self.sources.flips.hear(there, live, state.flips, doubts)
            self._said(key, state, state.flips | {uid: said for uid, said in heard.items() if uid in state.doubtful})
        finally:
            state.doubting = False

    def _said(self, key: Key, state: FleetState, known: dict[str, FlipReport]) -> None:
        if known != state.flips:
            state.flips = known
            self._known.touch(key)

    async def _adapt(self, key: Key, fleet: InferenceFleet, memory: AdapterMemory) -> None:
        """Tell and hear the workers of one fleet about their adapters."""
        if await memory.look(self.sources.adapters, fleet, self._known.children(key), self._now):
            self._known.touch(key)

    async def _read(self, key: Key, fleet: InferenceFleet, state: FleetState) -> None:
        try:
            live = self._known.children(key)
            found = await self.sources.telemetry.collect(fleet, pods_of(live), router_urls(live, self._platform))
            # what stays unknown is no news; that it grows old is seen at the next resync
            if found != state.telemetry or not state.telemetry_read or state.restless:
                state.telemetry, state.telemetry_read = found, True
                state.telemetry_ahead_s = self._now() - self._monotonic()
                self._known.touch(key)
        finally:
            state.reading = False

    def _router_urls(self, key: Key) -> list[str]:
        return router_urls(self._known.children(key), self._platform)


def _interval_s(fleet: InferenceFleet, state: FleetState) -> float:
    interval_s = fleet.spec.telemetry.interval_s
    return interval_s if state.ending.began_at is None else min(interval_s, ENDING_S)


async def _alone(key: Key, reading: Coroutine[Any, Any, None]) -> None:
    """What one fleet's sources answer must not end the readings of all."""
    try:
        await reading
    except Exception:
        LOG.exception("fleet=%s/%s reading it failed", *key, extra=about(*key))
