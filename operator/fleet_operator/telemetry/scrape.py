"""Direct scrape: every worker's agent and every router, bounded in time, size and number. A target that fails is missing."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.names import ROLE, TIER
from fleet_operator.observe import member_of
from fleet_operator.render.network import port_of
from fleet_operator.telemetry.aggregate import METRICS, Reading, WorkerReading, decode_counts, tier_telemetry, watch_tier
from fleet_operator.telemetry.cookies import no_cookies
from fleet_operator.telemetry.kvwatch import KvWatch
from fleet_operator.telemetry.meter import KvMeter, metered
from fleet_operator.telemetry.parse import parse_text
from fleet_operator.telemetry.reach import FIRST_WAVE, Reach
from fleet_planner.roles import ROLES
from fleet_planner.types import KvProof, TierTelemetry
from fleet_worker.config import Ports

TIMEOUT_S = 2.0
"""From connection to last byte."""
MAX_BYTES = 4 * 1024 * 1024
CONCURRENCY = 32
"""Connections to targets that answered last time."""
TRIES = 128
"""Connections to others: most of them only wait for their timeout."""
LATENCY_READINGS = 12
"""Readings that the latency window spans: a minute at the default interval."""
FORGET_S = 900.0
"""A fleet that nobody asked about for this long is gone; an interval is 5 minutes at most."""
SWEEP_S = 60.0
AGENT_PORT = Ports().agent


class ScrapeTelemetry:
    """Reads expositions over HTTP."""

    def __init__(self, now: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`now` dates readings; pauses and what is forgotten go by `monotonic`, which nobody sets."""
        self._now = now
        self._monotonic = monotonic
        plain = {"accept-encoding": "identity"}  # what is not compressed cannot grow
        limits = httpx.Limits(max_connections=CONCURRENCY + TRIES)
        self._http = httpx.AsyncClient(
            timeout=TIMEOUT_S, trust_env=False, limits=limits, headers=plain, cookies=no_cookies()
        )  # fmt: skip
        self._gates = {True: asyncio.Semaphore(CONCURRENCY), False: asyncio.Semaphore(TRIES)}
        self._reach = Reach()
        self._watches: dict[tuple[str, str, str], KvWatch] = {}
        """By fleet and tier."""
        self._history: dict[tuple[str, str], dict[str, deque[Reading]]] = {}
        """Routers' readings by fleet and URL."""
        self._asked_at: dict[tuple[str, str], float] = {}
        """When each fleet was last asked about, by `monotonic`."""
        self._swept_at = float("-inf")
        self._meters: dict[tuple[str, str], dict[str, KvMeter]] = {}
        """By fleet and tier."""

    async def collect(self, fleet: InferenceFleet, pods: list[Object], routers: list[str]) -> dict[str, TierTelemetry]:
        """Telemetry per tier. Pods may have one address for a while, after their node began anew: they are one router then."""
        routers = list(dict.fromkeys(routers))
        workers = {_target(pod): pod for pod in pods if is_running_worker(pod)}
        read: dict[str, Callable[[], Coroutine[Any, Any, Any]]]
        read = {url: partial(self._read, url, f"{url}/metrics") for url in routers}
        read |= {target: partial(self._worker, target, pod) for target, pod in workers.items()}
        found = await self._ask(read)
        readings = [found.get(target) or _read_from(pod, None) for target, pod in workers.items()]
        latest = [found.get(url) for url in routers]
        now, life = self._now(), life_of(fleet)
        by_router = dict(zip(routers, latest, strict=True))
        earlier = self._remember(life, by_router)
        found_tiers = {}
        for tier in tiers_of(fleet, pods):
            watch = self._watch((*life, tier), readings, by_router)
            found_of = tier_telemetry(tier, readings, latest, earlier, now, watch)
            found_tiers[tier] = replace(found_of, kv=self._metered(fleet, tier, readings, found_of.kv, now))
        return found_tiers

    def _watch(self, key: tuple[str, str, str], workers: list[WorkerReading], routers: dict[str, Reading | None]) -> KvWatch:
        """The tier's watch after this reading."""
        watch = self._watches[key] = watch_tier(key[2], self._watches.get(key, KvWatch()), workers, routers)
        return watch

    def _metered(
        self, fleet: InferenceFleet, tier: str, readings: list[WorkerReading], proof: KvProof | None, now: float
    ) -> KvProof | None:
        """The counters over restarts of engines; how many answers passed without KV is the watch's to say."""
        meters = self._meters.setdefault(life_of(fleet), {})
        return metered(meters.setdefault(tier, KvMeter()).read(decode_counts(tier, readings), now), proof)

    def _remember(self, fleet: tuple[str, str], latest: dict[str, Reading | None]) -> list[Reading | None]:
        """Keep the readings of a fleet's routers, forget other routers of it and fleets that are gone. Answers the oldest
        reading kept of each: it begins the window. The first one is its own beginning, else all that a router ever did would
        pass for the present after a restart of the operator."""
        before = self._history.get(fleet, {})
        kept = {url: before.get(url, deque(maxlen=LATENCY_READINGS)) for url in latest}
        for url, reading in latest.items():
            if reading is not None:
                kept[url].append(reading)
        self._history[fleet] = kept
        self._asked_at[fleet] = now = self._monotonic()
        if now - self._swept_at >= SWEEP_S:
            self._sweep(now)
        return [history[0] if history else None for history in kept.values()]

    def _sweep(self, now: float) -> None:
        """Not at every reading: it looks at every fleet."""
        self._swept_at = now
        self._asked_at = {fleet: at for fleet, at in self._asked_at.items() if now - at < FORGET_S}
        self._history = {key: kept for key, kept in self._history.items() if key in self._asked_at and any(kept.values())}
        self._watches = {key: watch for key, watch in self._watches.items() if key[:2] in self._asked_at}
        self._meters = {key: meters for key, meters in self._meters.items() if key in self._asked_at}

    async def _ask(self, read: Mapping[str, Callable[[], Coroutine[Any, Any, Any]]]) -> dict[str, Any]:
        """What each target answered. Those that did last time are all asked; the others in growing waves, until a whole wave
        stays silent: a fleet that cannot be reached costs a few tries, one that can is known within a round."""
        found: dict[str, Any] = {}

        async def one(target: str) -> None:
            found[target] = await read[target]()

        async def waves(left: list[str]) -> None:
            size = FIRST_WAVE
            while left:
                wave, left = left[:size], left[size:]
                await asyncio.gather(*map(one, wave))
                size = size * 2 if any(map(self._reach.answered, wave)) else 0
                left = left if size else []

        known, to_try = self._reach.split(read, self._monotonic())
        await asyncio.gather(waves(to_try), *map(one, known))
        return found

    async def _worker(self, target: str, pod: Object) -> WorkerReading:
        address, port = pod["status"]["podIP"], port_of(pod, "agent", AGENT_PORT)
        reading = await self._read(target, f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics")
        return _read_from(pod, reading)

    async def _read(self, target: str, url: str) -> Reading | None:
        answer = await self._get(target, url)
        return None if answer is None else Reading(parse_text(answer.decode(errors="replace"), METRICS), self._now())

    async def _get(self, target: str, url: str) -> bytes | None:
        """The body of a 200 within TIMEOUT_S and MAX_BYTES, else None; httpx's own timeout starts again with every byte."""
        body, answered, known = bytearray(), False, self._reach.answered(target)
        async with self._gates[known]:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    if not known:
                        await _connect(url)
                async with asyncio.timeout(TIMEOUT_S), self._http.stream("GET", url) as answer:
                    answered = True
                    if answer.status_code != httpx.codes.OK:
                        return None
                    async for chunk in answer.aiter_raw():
                        body += chunk
                        if len(body) > MAX_BYTES:
                            return None
            except (httpx.HTTPError, httpx.InvalidURL, OSError):
                answered = False
                return None
            finally:
                self._reach.told(target, answered, self._monotonic())
        return bytes(body)

    async def close(self) -> None:
        """Release connections."""
        await self._http.aclose()


async def _connect(url: str) -> None:
    """OSError when nobody listens there. A tenth of what a whole request costs, for targets of which most do not answer."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        await asyncio.get_running_loop().sock_connect(probe, (parts.hostname, parts.port or 80))


def _target(pod: Object) -> str:
    """A pod that became ready, or ceased to be, is another target: it is not made to wait for what it was before."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    since = next((condition.get("lastTransitionTime") for condition in conditions if condition.get("type") == "Ready"), None)
    return f"{pod['status']['podIP']} {port_of(pod, 'agent', AGENT_PORT)} {since}"


def _read_from(pod: Object, reading: Reading | None) -> WorkerReading:
    """What a worker said; None: it did not answer, or was not asked."""
    meta = pod["metadata"]
    return WorkerReading(meta["labels"].get(TIER, ""), meta["labels"][ROLE], reading, meta["name"])


def life_of(fleet: InferenceFleet) -> tuple[str, str]:
    """Under what readings of a fleet are kept: one of its name that is made anew has moved nothing, though its workers have the
    names of those before."""
    return fleet.metadata.namespace, f"{fleet.metadata.name}/{fleet.metadata.uid}"


def tiers_of(fleet: InferenceFleet, pods: Iterable[Object]) -> list[str]:
    """Names of the spec's tiers, and of those that left it and have workers still: what these run decides when they may go."""
    there = (pod["metadata"]["labels"].get(TIER, "") for pod in pods if is_running_worker(pod))
    return list(dict.fromkeys([*(tier.name for tier in fleet.spec.tiers), *there]))


def is_running_worker(pod: Object) -> bool:
    """A worker with an address that is not on its way out; of one over several nodes its leader, which speaks for it."""
    leads = member_of(pod["metadata"].get("annotations") or {}, pod["metadata"]["name"]) == 0
    return leads and pod["metadata"].get("labels", {}).get(ROLE) in ROLES and is_running(pod)


def is_running(pod: Object) -> bool:
    """Has an address and is not on its way out."""
    status = pod.get("status") or {}
    return bool(status.get("podIP")) and status.get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
