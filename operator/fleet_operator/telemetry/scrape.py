"""Direct scrape: every worker's agent and every router, bounded in time, size and number. A target that fails is missing."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import httpx

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.names import ROLE, TIER
from fleet_operator.telemetry.aggregate import Reading, WorkerReading, decode_counts, tier_telemetry
from fleet_operator.telemetry.meter import KvMeter
from fleet_operator.telemetry.parse import parse_text
from fleet_planner.types import ROLES, KvProof, TierTelemetry
from fleet_worker.config import Ports

TIMEOUT_S = 2.0
"""From connection to last byte."""
MAX_BYTES = 4 * 1024 * 1024
CONCURRENCY = 32
LATENCY_READINGS = 12
"""Readings that the latency window spans: a minute at the default interval."""
FORGET_S = 900.0
"""A router that was not read for this long belongs to a fleet that is gone; an interval is 5 minutes at most."""
AGENT_PORT = Ports().agent


class ScrapeTelemetry:
    """Reads expositions over HTTP."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        plain = {"accept-encoding": "identity"}  # what is not compressed cannot grow
        limits = httpx.Limits(max_connections=CONCURRENCY)
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=limits, headers=plain)
        self._gate = asyncio.Semaphore(CONCURRENCY)
        self._history: dict[tuple[str, str], dict[str, deque[Reading]]] = {}
        """Routers' readings by fleet and URL."""
        self._meters: dict[tuple[str, str], dict[str, KvMeter]] = {}
        """By fleet and tier."""

    async def collect(self, fleet: InferenceFleet, pods: list[Object], routers: list[str]) -> dict[str, TierTelemetry]:
        """Telemetry per tier."""
        workers = [pod for pod in pods if is_running_worker(pod)]
        found = await asyncio.gather(*(self._worker(pod) for pod in workers), *(self._read(f"{url}/metrics") for url in routers))
        readings = [item for item in found if isinstance(item, WorkerReading)]
        latest = [item for item in found[len(workers) :] if not isinstance(item, WorkerReading)]
        now = self._now()
        earlier = self._remember((fleet.metadata.namespace, fleet.metadata.name), dict(zip(routers, latest, strict=True)), now)
        found_of = {tier.name: tier_telemetry(tier.name, readings, latest, earlier, now) for tier in fleet.spec.tiers}
        return {name: replace(found, kv=self._metered(fleet, name, readings, now)) for name, found in found_of.items()}

    def _metered(self, fleet: InferenceFleet, tier: str, readings: list[WorkerReading], now: float) -> KvProof | None:
        meters = self._meters.setdefault((fleet.metadata.namespace, fleet.metadata.name), {})
        return meters.setdefault(tier, KvMeter()).read(decode_counts(tier, readings), now)

    def _remember(self, fleet: tuple[str, str], latest: dict[str, Reading | None], now: float) -> list[Reading | None]:
        """Keep the readings of a fleet's routers, forget other routers of it and fleets that are gone. Answers the oldest
        reading kept of each: it begins the window. The first one is its own beginning, else all that a router ever did would
        pass for the present after a restart of the operator."""
        before = self._history.get(fleet, {})
        kept = {url: before.get(url, deque(maxlen=LATENCY_READINGS)) for url in latest}
        for url, reading in latest.items():
            if reading is not None:
                kept[url].append(reading)
        self._history[fleet] = kept
        for other, histories in list(self._history.items()):
            if all(not history or history[-1].read_at < now - FORGET_S for history in histories.values()):
                del self._history[other]
                self._meters.pop(other, None)
        return [history[0] if history else None for history in kept.values()]

    async def _worker(self, pod: Object) -> WorkerReading:
        labels, address = pod["metadata"]["labels"], pod["status"]["podIP"]
        base = f"http://{f'[{address}]' if ':' in address else address}:{AGENT_PORT}"
        reading, state = await asyncio.gather(self._read(f"{base}/metrics"), self._state(f"{base}/state"))
        transport = state.get("transport")
        return WorkerReading(
            labels.get(TIER, ""), labels[ROLE], reading, transport if _is_word(transport) else None, pod["metadata"]["name"]
        )

    async def _read(self, url: str) -> Reading | None:
        answer = await self._get(url)
        return None if answer is None else Reading(parse_text(answer.decode(errors="replace")), self._now())

    async def _state(self, url: str) -> dict[str, Any]:
        answer = await self._get(url)
        try:
            found = json.loads(answer) if answer is not None else {}
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _get(self, url: str) -> bytes | None:
        """The body of a 200 within TIMEOUT_S and MAX_BYTES, else None; httpx's own timeout starts again with every byte."""
        body = bytearray()
        async with self._gate:
            try:
                async with asyncio.timeout(TIMEOUT_S), self._http.stream("GET", url) as answer:
                    if answer.status_code != httpx.codes.OK:
                        return None
                    async for chunk in answer.aiter_raw():
                        body += chunk
                        if len(body) > MAX_BYTES:
                            return None
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError):
                return None
        return bytes(body)

    async def close(self) -> None:
        """Release connections."""
        await self._http.aclose()


def _is_word(value: object) -> TypeGuard[str]:
    """Fit for a status, whatever a worker says."""
    return isinstance(value, str) and re.fullmatch(r"[a-zA-Z0-9_,.-]{1,63}", value) is not None


def is_running_worker(pod: Object) -> bool:
    """A worker with an address that is not on its way out."""
    return pod["metadata"].get("labels", {}).get(ROLE) in ROLES and is_running(pod)


def is_running(pod: Object) -> bool:
    """Has an address and is not on its way out."""
    status = pod.get("status") or {}
    return bool(status.get("podIP")) and status.get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
