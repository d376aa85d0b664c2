"""Telemetry from the Prometheus of `spec.telemetry.prometheus.url`, through prometheus-api-client.

The library is synchronous: it runs in threads of its own, few and bounded in time. Only a look-up of a name cannot be ended: its
thread is left behind, with a bound on such threads, and others who ask that host wait until it came back. The library is imported
when the first fleet asks for it. Whoever may create fleets chooses the URL, so no redirect is followed, no proxy or netrc of ours
is used, nothing that comes back may raise out of here, and of a failure only its kind is told: never an answer's body, never the
credentials inside a URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.names import ROLE, ROUTER_ROLE, TIER
from fleet_operator.observe import timestamp
from fleet_operator.telemetry.aggregate import WorkerReading, decode_counts, tier_telemetry, watch_tier
from fleet_operator.telemetry.kvwatch import KvWatch
from fleet_operator.telemetry.line import Line
from fleet_operator.telemetry.meter import KvMeter, metered
from fleet_operator.telemetry.newest import Newest, Targets
from fleet_operator.telemetry.scrape import is_running, is_running_worker, life_of, tiers_of
from fleet_operator.telemetry.series import TargetSeries, by_pod, of_pod, query
from fleet_planner.types import KvProof, TierTelemetry
from fleet_wire.address import in_url

if TYPE_CHECKING:
    from requests import Response

THREADS_NAME = "prometheus"
THREADS = 16
"""Questions at the same time."""
LEFT_MOST = 64
"""Threads beyond those, for look-ups that nobody waits for any more: the resolver's own timeouts end them, in a minute or so."""
REQUEST_TIMEOUT_S = 4
"""For a connection, and between two bytes."""
ANSWER_TIMEOUT_S = 5.0
"""From question to last byte, waiting for a thread included: longer would make the load of other fleets stale."""
MAX_WATCHES = 10_000
"""Tiers of which earlier answers are kept."""
MAX_SERIES = 50_000
MAX_BYTES = 32 * 1024 * 1024
"""Some 1,000 workers, scraped every second."""
PARTIAL = b'"warnings":["', b'"isPartial":true'
"""What Prometheus (remote read), Thanos and VictoriaMetrics write beside an answer that may lack series. In a label they
would be escaped."""


class PartialAnswer(Exception):
    """Some of what the server asks did not answer it: what is missing is not known, and not 0."""


class PrometheusTelemetry:
    """Reads fleets' load from Prometheus."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._watches: dict[tuple[str, str, str], KvWatch] = {}
        """By fleet (`life_of`) and tier."""
        self._newest = Newest()
        self._meters: dict[tuple[str, str, str], KvMeter] = {}
        self._threads = ThreadPoolExecutor(THREADS + LEFT_MOST, thread_name_prefix=THREADS_NAME)
        self._gate = asyncio.Semaphore(THREADS)
        self._left: Counter[str] = Counter()
        """Threads in a look-up that nobody waits for any more, by host."""
        self._came_back = asyncio.Event()

    async def collect(self, fleet: InferenceFleet, url: str, pods: list[Object]) -> dict[str, TierTelemetry]:
        """Telemetry per tier; when Prometheus does not answer every tier says why."""
        now, key = self._now(), life_of(fleet)
        question = query(fleet.metadata.namespace, fleet.metadata.name, fleet.spec.telemetry.interval_s)
        try:
            answer = await self._ask(url, question, now)
            known = {tier: self._watches.get((*key, tier), KvWatch()) for tier in tiers_of(fleet, pods)}
            targets = self._newest.of(key, targets_of(pods, answer), now)
            workers = workers_of(pods, targets)
            found, watches = telemetry_of(pods, workers, targets, now, known)
            self._remember(key, watches)
            return {name: replace(one, kv=self._metered((*key, name), workers, one.kv, now)) for name, one in found.items()}
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

    def _metered(
        self, key: tuple[str, str, str], workers: list[WorkerReading], proof: KvProof | None, now: float
    ) -> KvProof | None:
        """The counters over restarts of engines, as the direct scrape has them."""
        meter = self._meters.pop(key, None) or KvMeter()
        self._meters[key] = meter
        while len(self._meters) > MAX_WATCHES:
            del self._meters[next(iter(self._meters))]
        return metered(meter.read(decode_counts(key[2], workers), now), proof)

    async def _ask(self, url: str, question: str, at: float) -> dict[str, list[TargetSeries]]:
        """The answer, or an error within ANSWER_TIMEOUT_S; the thread is free again soon after, or when its look-up ends."""
        line, host = Line(), host_of(url)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._in_turn(url, question, at, line, host)
        finally:
            line.hang_up()

    async def _in_turn(self, url: str, question: str, at: float, line: Line, host: str) -> dict[str, list[TargetSeries]]:
        """Behind the questions of others; while a look-up of `host` hangs another one would only cost another thread."""
        while True:
            while self._left[host]:
                self._came_back.clear()
                await self._came_back.wait()
            async with self._gate:
                if self._left[host]:
                    continue
                asked = self._threads.submit(ask, url, question, at, line)
                try:
                    return await asyncio.wrap_future(asked)
                finally:
                    if not (asked.done() or line.reached):
                        self._leave(host, asked)

    def _leave(self, host: str, asked: Future[Any]) -> None:
        """Count a thread that nobody waits for any more, until it ends."""
        loop = asyncio.get_running_loop()
        self._left[host] += 1

        def back() -> None:
            self._left[host] -= 1
            self._left += Counter()  # drops those at zero
            self._came_back.set()

        def ended(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
                loop.call_soon_threadsafe(back)

        asked.add_done_callback(ended)

    async def close(self) -> None:
        """Threads end with their last answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def targets_of(pods: list[Object], series: dict[str, list[TargetSeries]]) -> Targets:
    """The target that speaks for each pod; series of other pods do not count."""
    return {pod["metadata"]["name"]: of_pod(series.get(pod["metadata"]["name"], ()), _made_at(pod)) for pod in pods}


def _made_at(pod: Object) -> float:
    return timestamp(pod["metadata"].get("creationTimestamp")) or 0.0


def workers_of(pods: list[Object], targets: Targets) -> list[WorkerReading]:
    """A running pod without series is a worker that could not be read."""
    return [
        WorkerReading(
            pod["metadata"]["labels"].get(TIER, ""),
            pod["metadata"]["labels"][ROLE],
            target.last if target else None,
            pod["metadata"]["name"],
        )
        for pod, target in ((pod, targets.get(pod["metadata"]["name"])) for pod in pods if is_running_worker(pod))
    ]


def telemetry_of(
    pods: list[Object],
    workers: list[WorkerReading],
    targets: Targets,
    now: float,
    before: dict[str, KvWatch],
) -> tuple[dict[str, TierTelemetry], dict[str, KvWatch]]:
    """Per tier, and what to compare the next answer with."""
    router_pods = [pod for pod in pods if pod["metadata"]["labels"].get(ROLE) == ROUTER_ROLE and is_running(pod)]
    routers = [targets.get(pod["metadata"]["name"]) for pod in router_pods]
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
    session.hooks["response"].append(refuse_partial)
    with PrometheusConnect(url.rstrip("/"), session=session, timeout=REQUEST_TIMEOUT_S) as client:
        adapter = BoundedAdapter(line, MAX_BYTES)
        # the library mounts one of its own for its URL, and `requests` may spell that differently
        for prefix in (client.url, "http://", "https://"):
            session.mount(prefix, adapter)
        found: list[dict[str, Any]] = client.custom_query(question, params={"time": f"{at:.3f}", "limit": MAX_SERIES + 1})
    if len(found) > MAX_SERIES:
        raise ValueError(f"more than {MAX_SERIES} series")
    return by_pod(found)


def refuse_partial(answer: Response, *_: Any, **__: Any) -> None:
    """PartialAnswer; the library drops the words that say so."""
    if any(words in answer.content for words in PARTIAL):
        raise PartialAnswer


def host_of(url: str) -> str:
    """Whose name is looked up; of an URL that is none: itself."""
    try:
        return urlsplit(url).hostname or url
    except ValueError:
        return url


def shown(url: str) -> str:
    """Scheme, host and port: what a status may say. Never raises, because the schema lets URLs pass that are none."""
    try:
        parts = urlsplit(url)
        host = in_url(parts.hostname or "")
        return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return "its URL"


def kind_of(error: Exception) -> str:
    """The kind of failure, without anything that the server said."""
    words = str(error).split()
    if type(error).__name__ == "PrometheusApiClientException" and words[:3] == ["HTTP", "Status", "Code"]:
        return f"HTTP {words[3]}"
    return type(error).__name__
