"""Telemetry from the Prometheus of `spec.telemetry.prometheus.url`, through prometheus-api-client.

The library is synchronous: it runs in threads of its own, few and bounded in time. It is imported when the first fleet asks for
it. Whoever may create fleets chooses the URL, so no redirect is followed, no proxy or netrc of ours is used, nothing that comes
back may raise out of here, and of a failure only its kind is told: never an answer's body, never the credentials inside a URL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.names import ROLE, ROUTER_ROLE, TIER
from fleet_operator.observe import timestamp
from fleet_operator.telemetry.aggregate import WorkerReading, tier_telemetry, watch_tier
from fleet_operator.telemetry.kvwatch import KvWatch
from fleet_operator.telemetry.line import Line
from fleet_operator.telemetry.scrape import is_running, is_running_worker
from fleet_operator.telemetry.series import TargetSeries, by_pod, of_pod, query
from fleet_planner.types import TierTelemetry

THREADS = 16
REQUEST_TIMEOUT_S = 4
"""For a connection, and between two bytes."""
ANSWER_TIMEOUT_S = 5.0
"""From question to last byte, waiting for a thread included: longer would make the load of other fleets stale."""
MAX_WATCHES = 10_000
MAX_SERIES = 50_000
MAX_BYTES = 32 * 1024 * 1024
"""Some 1,000 workers, scraped every second."""


class PrometheusTelemetry:
    """Reads fleets' load from Prometheus."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._watches: dict[tuple[str, str, str], KvWatch] = {}
        """By namespace, fleet and tier."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prometheus")

    async def collect(self, fleet: InferenceFleet, url: str, pods: list[Object]) -> dict[str, TierTelemetry]:
        """Telemetry per tier; when Prometheus does not answer every tier says why."""
        now, key = self._now(), (fleet.metadata.namespace, fleet.metadata.name)
        question = query(fleet.metadata.namespace, fleet.metadata.name, fleet.spec.telemetry.interval_s)
        try:
            answer = await self._ask(url, question, now)
            known = {tier.name: self._watches.get((*key, tier.name), KvWatch()) for tier in fleet.spec.tiers}
            found, watches = telemetry_of(fleet, pods, answer, now, known)
            self._remember(key, watches)
            return found
        except Exception as error:  # requests, urllib3, the library and a wrong answer all raise their own; none may stop us
            problem = f"Prometheus at {shown(url)} gave no samples: {kind_of(error)}"
            return {tier.name: TierTelemetry(problem=problem) for tier in fleet.spec.tiers}

    def _remember(self, key: tuple[str, str], watches: dict[str, KvWatch]) -> None:
        """What was compared; of at most MAX_WATCHES tiers, those read last."""
        for tier, watch in watches.items():
            self._watches.pop((*key, tier), None)
            self._watches[*key, tier] = watch
        while len(self._watches) > MAX_WATCHES:
            del self._watches[next(iter(self._watches))]

    async def _ask(self, url: str, question: str, at: float) -> dict[str, list[TargetSeries]]:
        """The answer, or an error within ANSWER_TIMEOUT_S; the thread is free again soon after."""
        line = Line()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, ask, url, question, at, line)
        finally:
            line.hang_up()

    async def close(self) -> None:
        """Threads end with their last answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def telemetry_of(
    fleet: InferenceFleet, pods: list[Object], series: dict[str, list[TargetSeries]], now: float, before: dict[str, KvWatch]
) -> tuple[dict[str, TierTelemetry], dict[str, KvWatch]]:
    """Per tier, and what to compare the next answer with.

    A running pod without series is a worker that could not be read; series of other pods do not count."""

    def found(pod: Object) -> TargetSeries | None:
        meta = pod["metadata"]
        return of_pod(series.get(meta["name"], ()), timestamp(meta.get("creationTimestamp")) or 0.0)

    workers = [
        WorkerReading(
            pod["metadata"]["labels"].get(TIER, ""),
            pod["metadata"]["labels"][ROLE],
            target.last if target else None,
            pod["metadata"]["name"],
        )
        for pod, target in ((pod, found(pod)) for pod in pods if is_running_worker(pod))
    ]
    router_pods = [pod for pod in pods if pod["metadata"]["labels"].get(ROLE) == ROUTER_ROLE and is_running(pod)]
    routers = [found(pod) for pod in router_pods]
    earlier = [target.first if target else None for target in routers]
    latest = [target.last if target else None for target in routers]
    by_router = {pod["metadata"]["name"]: reading for pod, reading in zip(router_pods, latest, strict=True)}
    watches = {name: watch_tier(name, watch, workers, by_router) for name, watch in before.items()}
    return {name: tier_telemetry(name, workers, latest, earlier, now, watch) for name, watch in watches.items()}, watches


def ask(url: str, question: str, at: float, line: Line) -> dict[str, list[TargetSeries]]:
    """One instant query at the time `at`, in a thread; `line` may be hung up meanwhile."""
    from prometheus_api_client.prometheus_connect import PrometheusConnect
    from requests import Session

    from fleet_operator.telemetry.bounded import BoundedAdapter

    session = Session()
    session.trust_env = False
    session.max_redirects = 0
    with PrometheusConnect(url.rstrip("/"), session=session, timeout=REQUEST_TIMEOUT_S) as client:
        adapter = BoundedAdapter(line, MAX_BYTES)
        # the library mounts one of its own for its URL, and `requests` may spell that differently
        for prefix in (client.url, "http://", "https://"):
            session.mount(prefix, adapter)
        found: list[dict[str, Any]] = client.custom_query(question, params={"time": f"{at:.3f}", "limit": MAX_SERIES + 1})
    if len(found) > MAX_SERIES:
        raise ValueError(f"more than {MAX_SERIES} series")
    return by_pod(found)


def shown(url: str) -> str:
    """Scheme, host and port: what a status may say. Never raises, because the schema lets URLs pass that are none."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return "its URL"


def kind_of(error: Exception) -> str:
    """The kind of failure, without anything that the server said."""
    words = str(error).split()
    if type(error).__name__ == "PrometheusApiClientException" and words[:3] == ["HTTP", "Status", "Code"]:
        return f"HTTP {words[3]}"
    return type(error).__name__
