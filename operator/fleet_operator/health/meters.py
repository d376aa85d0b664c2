"""Prometheus metrics of the operator. Labels of what is counted have few values: no fleet, namespace or object name becomes one.
What each fleet's status says is read when somebody asks, from the cache, and is gone with the fleet."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from importlib import metadata
from typing import Any, Final, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fleet_operator.cluster.guarded import Send, Write
from fleet_operator.cluster.interface import ClusterError, Object
from fleet_operator.health.cpu_of import CpuOf
from fleet_operator.health.fleets import cost_per_hour, exposition, readiness
from fleet_operator.health.pulse import Pulse

T = TypeVar("T")
_WEIGHED: Final[ContextVar[asyncio.Task[Any] | None]] = ContextVar("weighed", default=None)
"""The task whose steps are counted as a pass; those that it makes know of it, and are not part of its steps."""

REASONS_MOST: Final = 128
"""Reasons that get a label of their own; reasons are ours or the API server's CamelCase words, this bounds what else may come."""
ALARMING: Final = ("PoisonedReplaced", "HealingBudgetSpent", "FabricSuspected")
"""Warnings that somebody is woken for when they are told (RUNBOOK.md): a series that begins at 1 never grew to Prometheus."""
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Queue(Protocol):
    """What the reconciler shows of itself."""

    def backlog(self) -> tuple[int, float]:
        """Fleets that wait for a pass, and for how long the one that waits longest has waited, seconds."""
        ...

    def ours(self) -> Sequence[Object]:
        """Fleets that are ours, as the cache has them."""
        ...

    def ownerless(self) -> int:
        """Pods of fleets that are gone, which nobody owns."""
        ...


class Meters:
    """Counts passes and writes, and reads the rest when somebody asks."""

    def __init__(self, pulse: Pulse, clock: Callable[[], float] = time.perf_counter, *, of_fleets: bool = True) -> None:
        """`of_fleets`: whether each fleet's conditions, workers and objectives are shown, by its name."""
        self._pulse = pulse
        self._of_fleets = of_fleets
        self._fleets: Callable[[], Sequence[Object]] = lambda: ()
        self._clock = clock
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "fleet_operator_reconcile_seconds", "Length of a pass over one fleet.", buckets=BUCKETS, registry=self.registry
        )
        self._passes = Counter(
            "fleet_operator_reconciles", "Passes over a fleet: ok, problems (some write failed), error.", ["outcome"],
            registry=self.registry,
        )  # fmt: skip
        self._cpu = Counter(
            "fleet_operator_reconcile_cpu_seconds", "CPU that passes over fleets took, their writes included.",
            registry=self.registry,
        )  # fmt: skip
        self._errors = Counter("fleet_operator_errors", "Problems of passes, by reason.", ["reason"], registry=self.registry)
        self._writes = Counter(
            "fleet_operator_api_writes", "Writes to the API server.", ["verb", "kind", "outcome"], registry=self.registry
        )
        self._events = Counter("fleet_operator_events", "What users were told.", ["type", "reason"], registry=self.registry)
        self._reasons: set[str] = set()
        for reason in ALARMING:
            self._events.labels("Warning", reason)
        self._begun: dict[int, float] = {}
        Info("fleet_operator_build", "What runs.", registry=self.registry).info(
            {"version": metadata.version("inferencefleet"), "python": platform.python_version()}
        )
        ProcessCollector(namespace="fleet_operator", registry=self.registry)

    # -- hooks ------------------------------------------------------------------------------------------------------
    def turned(self) -> None:
        """The work loop turned."""
        self._pulse.turned()

    def began(self) -> int:
        """A pass begins; give what this returns to `ended`."""
        token = self._pulse.began()
        self._begun[token] = self._clock()
        return token

    def ended(self, begun: int, reasons: Iterable[str], *, failed: bool = False) -> None:
        """The pass is over; `reasons` of its problems, `failed` when it could not be carried out at all."""
        self._pulse.ended(begun)
        self._seconds.observe(self._clock() - self._begun.pop(begun))
        reasons = list(reasons)
        for outcome in ("ok", "problems", "error"):  # those that never were, too: one that begins at 1 never grew
            self._passes.labels(outcome)
        self._passes.labels("error" if failed else "problems" if reasons else "ok").inc()
        for reason in reasons:
            self._errors.labels(self._bounded(reason)).inc()

    def told(self, kind: str, reason: str) -> None:
        """A user was told something: Normal or Warning, and the event's reason."""
        self._events.labels(kind, self._bounded(reason)).inc()

    async def weighed(self, passing: Awaitable[T]) -> T:
        """Carry it out, and count its CPU."""
        taken, before = CpuOf(passing), _WEIGHED.set(asyncio.current_task())
        try:
            return await taken
        finally:
            _WEIGHED.reset(before)
            self._cpu.inc(taken.cpu_s)

    async def guard(self, write: Write, send: Send) -> Any:
        """Counts a write, how it ended, and the CPU of one that a pass left to a task of its own."""
        try:
            made = await (send() if _WEIGHED.get() in (None, asyncio.current_task()) else self.weighed(send()))
        except ClusterError as error:
            self._writes.labels(write.verb, write.kind.kind, self._bounded(error.reason)).inc()
            raise
        finally:
            self._pulse.answered()
        self._writes.labels(write.verb, write.kind.kind, "ok").inc()
        return made

    def _bounded(self, reason: str) -> str:
        known = reason in self._reasons or (len(self._reasons) < REASONS_MOST and reason.isalnum() and len(reason) <= 63)
        if known:
            self._reasons.add(reason)
        return reason if known else "Other"

    # -- reading ----------------------------------------------------------------------------------------------------
    def observe(
        self,
        queue: Queue,
        leading: Callable[[], bool],
        namespaces: Callable[[], tuple[int, int]],
        closed: Callable[[], int] = lambda: 0,
    ) -> None:
        """Also show these whenever somebody reads; `namespaces` are (ours, told to us but somebody else's), `closed` those that
        may not be read."""
        self._fleets = lambda: queue.ours() if self._of_fleets and leading() else ()
        self.registry.register(_Present(self._pulse, queue, leading, namespaces, closed))

    def text(self) -> bytes:
        """The exposition format."""
        fleets = self._fleets()
        return generate_latest(self.registry) + (exposition(fleets).encode() if fleets else b"")


class _Present(Collector):
    """Gauges that are read, not counted."""

    def __init__(
        self,
        pulse: Pulse,
        queue: Queue,
        leading: Callable[[], bool],
        namespaces: Callable[[], tuple[int, int]],
        closed: Callable[[], int],
    ) -> None:
        self._pulse, self._queue, self._leading, self._namespaces, self._closed = pulse, queue, leading, namespaces, closed

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All of them."""
        leads = self._leading()
        yield GaugeMetricFamily("fleet_operator_leader", "1 when this process reconciles.", value=int(leads))
        yield from self._work() if leads else ()
        owned, foreign = self._namespaces()
        spaces = GaugeMetricFamily("fleet_operator_namespaces", "Namespaces with fleets, by who owns them.", labels=["owner"])
        spaces.add_metric(["this"], owned)
        spaces.add_metric(["other"], foreign)
        yield spaces
        closed = "Namespaces that this operator was told and may not read."
        yield GaugeMetricFamily("fleet_operator_namespaces_closed", closed, value=self._closed())
        ages = GaugeMetricFamily("fleet_operator_watch_age_seconds", "Since a watch last carried anything.", labels=["kind"])
        for kind, age_s in self._pulse.watch_ages().items():
            ages.add_metric([kind], age_s)
        yield ages

    def _work(self) -> Iterator[GaugeMetricFamily]:
        """Of the process that does it: a standby does none, its queue only grows, and its fleets would be counted twice."""
        depth, oldest_s = self._queue.backlog()
        yield GaugeMetricFamily("fleet_operator_queue_depth", "Fleets that wait for a pass.", value=depth)
        yield GaugeMetricFamily("fleet_operator_queue_oldest_seconds", "How long the first of them has waited.", value=oldest_s)
        ready = GaugeMetricFamily("fleet_operator_fleets", "Our fleets by the status of their Ready condition.", labels=["ready"])
        fleets = self._queue.ours()
        for status, count in readiness(fleets).items():
            ready.add_metric([status], count)
        yield ready
        if (cost := cost_per_hour(fleets)) is not None:
            words = "What the devices of our fleets cost an hour, of those that say it (tiers[].cost)."
            yield GaugeMetricFamily("fleet_operator_cost_per_hour", words, value=cost)
        left = "Pods without an owner whose fleet is gone: they stay, with their devices."
        yield GaugeMetricFamily("fleet_operator_ownerless_pods", left, value=self._queue.ownerless())
