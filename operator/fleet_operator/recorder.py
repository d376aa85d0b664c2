"""Writes what the planner says is news as Kubernetes Events. An event that cannot be written is logged and lost: no reconcile
fails or waits long for one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from pydantic import ValidationError

from fleet_api.parse import known_status
from fleet_api.v1alpha1.status import FleetStatus
from fleet_operator.cluster.interface import EVENT, Cluster, ClusterError, ConflictError, Object
from fleet_operator.health.logs import about
from fleet_operator.outcome import Outcome
from fleet_planner.events import Event, Pass, events_of, untold
from fleet_planner.telling import Told, admit, news
from fleet_planner.types import Problem

CONTROLLER: Final = "inferencefleet.io/operator"
INSTANCE_MOST: Final = 128
WRITING_S: Final = 5.0
"""Longest that one pass may spend on writing its events."""
LOG = logging.getLogger("fleet.operator")


@dataclass(frozen=True, slots=True)
class _Memory:
    status: FleetStatus
    """What the last pass said. The cache's status lags behind it, and one change would be told twice."""
    problems: tuple[Problem, ...] = ()
    told: Told = field(default_factory=Told)


class Recorder:
    """Events of all fleets, by uid: a fleet of the same name is another one."""

    def __init__(
        self,
        cluster: Cluster,
        now: Callable[[], float],
        instance: str | None = None,
        told: Callable[[str, str], None] = lambda kind, reason: None,
    ) -> None:
        """`told` hears of each event: its type and its reason."""
        self._cluster = cluster
        self._told = told
        self._now = now
        self._instance = (instance or socket.gethostname() or "operator")[:INSTANCE_MOST]
        self._fleets: dict[str, _Memory] = {}

    def forget(self, uid: str) -> None:
        """The fleet is gone."""
        self._fleets.pop(uid, None)

    def has_news(self, raw: Object, after: FleetStatus, outcome: Outcome) -> bool:
        """Whether `record` would find anything to tell or to remember of this pass."""
        memory = self._fleets.get(raw["metadata"]["uid"])
        if memory is None or outcome.done or outcome.problems or memory.problems:
            return True
        return memory.status is not after and memory.status != after

    async def record(self, raw: Object, after: FleetStatus | None, outcome: Outcome, sizing: Mapping[str, str]) -> None:
        """Tell what one pass of the fleet `raw` changed; `after` is None when the pass ended before it had a status."""
        uid, now = raw["metadata"]["uid"], self._now()
        memory = self._fleets.get(uid) or _Memory(untold(present_status(raw)))
        after = memory.status if after is None else after
        told, deeds = news(memory.told, outcome.done, now)
        problems = tuple(problem for problem in outcome.problems if problem not in memory.problems)
        meta = raw["metadata"]
        key = meta["namespace"], meta["name"]
        done = Pass(meta["name"], deeds, problems, sizing)
        told, events, dropped = admit(told, events_of(memory.status, after, done), now)
        self._fleets[uid] = _Memory(after, tuple(outcome.problems), told)
        for event in [event for event in events if not event.at]:
            self._told(event.type, event.reason)
        if dropped:
            LOG.warning("fleet=%s/%s events_dropped=%d: too many in a minute", *key, dropped, extra=about(*key))
        try:
            async with asyncio.timeout(WRITING_S):
                for event in events:
                    with suppress(ConflictError):  # a write that was tried again had arrived
                        await self._cluster.create(render_event(raw, event, _time(event) or now, self._instance))
                        if event.at:  # another life of the operator may have told it
                            self._told(event.type, event.reason)
        except (ClusterError, TimeoutError) as error:
            LOG.warning("fleet=%s/%s events not written: %s", *key, str(error) or "no answer in time", extra=about(*key))


def _time(event: Event) -> float:
    """0: now, also where a status that somebody edited says a time that no event can have."""
    try:
        at = datetime.fromisoformat(event.at).timestamp() if event.at else 0.0
        return at if at > 0 and datetime.fromtimestamp(at, UTC) else 0.0
    except (ValueError, OverflowError):
        return 0.0


def present_status(raw: Object) -> FleetStatus:
    """The status as the cache has it; an unreadable one is none."""
    try:
        return FleetStatus.model_validate({k: v for k, v in known_status(raw).items() if k != "resolved"})
    except ValidationError:
        return FleetStatus()


def render_event(raw: Object, event: Event, now: float, instance: str) -> Object:
    """An events.k8s.io/v1 Event about the fleet. Its name follows from what it says: a write that is tried again is the same. The
    time comes first: kubectl shows such events in the order of their names (it sorts by a field that this API refuses)."""
    meta = raw["metadata"]
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    digest = hashlib.sha256("\n".join((meta["uid"], at, event.reason, event.note)).encode()).hexdigest()[:16]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": f"{meta['name']}.{int(now * 1e6):x}.{digest}", "namespace": meta["namespace"]},
        "type": event.type,
        "reason": event.reason,
        "note": event.note,
        "action": event.action,
        "eventTime": at,
        "reportingController": CONTROLLER,
        "reportingInstance": instance,
        "regarding": {
            "apiVersion": raw["apiVersion"], "kind": raw["kind"], "name": meta["name"], "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
    }  # fmt: skip
