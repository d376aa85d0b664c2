"""Telemetry from the Prometheus of `spec.telemetry.prometheus.url`, through prometheus-api-client.

The library is synchronous: it runs in threads of its own, few and bounded in time. It is imported when the first fleet asks for
it. Whoever may create fleets chooses the URL, so no redirect is followed, no proxy or netrc of ours is used, and of a failure
only its kind is told: never an answer's body, never the credentials inside a URL.
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
from fleet_operator.telemetry.aggregate import Reading, WorkerReading, tier_telemetry
from fleet_operator.telemetry.scrape import is_running, is_running_worker
from fleet_operator.telemetry.series import PodSeries, by_pod, query
from fleet_planner.types import TierTelemetry

THREADS = 4
REQUEST_TIMEOUT_S = 5
ANSWER_TIMEOUT_S = 10.0
"""A server may send a byte now and then: the whole answer has a bound, too."""
MAX_SERIES = 50_000


class PrometheusTelemetry:
    """Reads fleets' load from Prometheus."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prometheus")

    async def collect(self, fleet: InferenceFleet, url: str, pods: list[Object]) -> dict[str, TierTelemetry]:
        """Telemetry per tier; when Prometheus does not answer every tier says why."""
        now = self._now()
        question = query(fleet.metadata.namespace, fleet.metadata.name)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                found = await asyncio.get_running_loop().run_in_executor(self._threads, ask, url, question, now)
            series = by_pod(found)
        except Exception as error:  # requests, urllib3, the library and a wrong answer all raise their own; none may stop us
            problem = f"Prometheus at {shown(url)} gave no samples: {kind_of(error)}"
            return {tier.name: TierTelemetry(problem=problem) for tier in fleet.spec.tiers}
        return telemetry_of(fleet, pods, series, now)

    async def close(self) -> None:
        """Threads end with their last answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def telemetry_of(fleet: InferenceFleet, pods: list[Object], series: dict[str, PodSeries], now: float) -> dict[str, TierTelemetry]:
    """Per tier. A running pod without series is a worker that could not be read; series of other pods do not count."""

    def last(pod: Object) -> Reading | None:
        found = series.get(pod["metadata"]["name"])
        return found.last if found is not None else None

    workers = [
        WorkerReading(pod["metadata"]["labels"].get(TIER, ""), pod["metadata"]["labels"][ROLE], last(pod))
        for pod in pods
        if is_running_worker(pod)
    ]
    routers = [pod for pod in pods if pod["metadata"]["labels"].get(ROLE) == ROUTER_ROLE and is_running(pod)]
    earlier = [found.first if (found := series.get(pod["metadata"]["name"])) is not None else None for pod in routers]
    latest = [last(pod) for pod in routers]
    return {tier.name: tier_telemetry(tier.name, workers, latest, earlier, now) for tier in fleet.spec.tiers}


def ask(url: str, question: str, at: float) -> list[dict[str, Any]]:
    """One instant query, in a thread."""
    from prometheus_api_client.prometheus_connect import PrometheusConnect
    from requests import Session
    from urllib3.util import Retry

    session = Session()
    session.trust_env = False
    session.max_redirects = 0
    with PrometheusConnect(url.rstrip("/"), session=session, retry=Retry(0), timeout=REQUEST_TIMEOUT_S) as client:
        found: list[dict[str, Any]] = client.custom_query(question, params={"time": f"{at:.3f}", "limit": MAX_SERIES})
    if len(found) > MAX_SERIES:
        raise ValueError(f"more than {MAX_SERIES} series")
    return found


def shown(url: str) -> str:
    """Scheme, host and port: what a status may say."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def kind_of(error: Exception) -> str:
    """The kind of failure, without anything that the server said."""
    words = str(error).split()
    if type(error).__name__ == "PrometheusApiClientException" and words[:3] == ["HTTP", "Status", "Code"]:
        return f"HTTP {words[3]}"
    return type(error).__name__
