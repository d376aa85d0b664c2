"""Direct scrape: every worker's agent and every router, bounded in time, size and number. A target that fails is missing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import httpx

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.names import ROLE, TIER
from fleet_operator.telemetry.aggregate import Reading, WorkerReading, tier_telemetry
from fleet_operator.telemetry.parse import parse_text
from fleet_planner.types import ROLES, TierTelemetry
from fleet_worker.config import Ports

TIMEOUT_S = 2.0
MAX_BYTES = 4 * 1024 * 1024
CONCURRENCY = 32
LATENCY_READINGS = 12
"""Readings that the latency window spans: a minute at the default interval."""
AGENT_PORT = Ports().agent


class ScrapeTelemetry:
    """Reads expositions over HTTP."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_connections=CONCURRENCY))
        self._gate = asyncio.Semaphore(CONCURRENCY)
        self._history: dict[str, deque[Reading]] = {}

    async def collect(self, fleet: InferenceFleet, pods: list[Object], routers: list[str]) -> dict[str, TierTelemetry]:
        """Telemetry per tier."""
        workers = [pod for pod in pods if is_running_worker(pod)]
        found = await asyncio.gather(*(self._worker(pod) for pod in workers), *(self._read(f"{url}/metrics") for url in routers))
        readings = [item for item in found if isinstance(item, WorkerReading)]
        latest = [item for item in found[len(workers) :] if not isinstance(item, WorkerReading)]
        earlier = [self._remember(url, reading) for url, reading in zip(routers, latest, strict=True)]
        for gone in self._history.keys() - set(routers):
            del self._history[gone]
        now = self._now()
        return {tier.name: tier_telemetry(tier.name, readings, latest, earlier, now) for tier in fleet.spec.tiers}

    def _remember(self, url: str, reading: Reading | None) -> Reading | None:
        """Keep the reading; the oldest one kept begins the window."""
        history = self._history.setdefault(url, deque(maxlen=LATENCY_READINGS))
        oldest = history[0] if history else None
        if reading is not None:
            history.append(reading)
        return oldest

    async def _worker(self, pod: Object) -> WorkerReading:
        labels, address = pod["metadata"]["labels"], pod["status"]["podIP"]
        base = f"http://{address}:{AGENT_PORT}"
        reading, state = await asyncio.gather(self._read(f"{base}/metrics"), self._state(f"{base}/state"))
        return WorkerReading(labels.get(TIER, ""), labels[ROLE], reading, state.get("transport"))

    async def _read(self, url: str) -> Reading | None:
        answer = await self._get(url)
        return None if answer is None else Reading(parse_text(answer.text), self._now())

    async def _state(self, url: str) -> dict[str, Any]:
        answer = await self._get(url)
        try:
            found = answer.json() if answer is not None else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    async def _get(self, url: str) -> httpx.Response | None:
        async with self._gate:
            try:
                answer = await self._http.get(url)
            except httpx.HTTPError:
                return None
        return answer if answer.status_code == httpx.codes.OK and len(answer.content) <= MAX_BYTES else None

    async def close(self) -> None:
        """Release connections."""
        await self._http.aclose()


def is_running_worker(pod: Object) -> bool:
    """A worker with an address that is not on its way out."""
    return pod["metadata"].get("labels", {}).get(ROLE) in ROLES and is_running(pod)


def is_running(pod: Object) -> bool:
    """Has an address and is not on its way out."""
    status = pod.get("status") or {}
    return bool(status.get("podIP")) and status.get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
