"""Tells workers which adapters they should have, and hears which they have.

Level-based: every look reads a worker's own report; only one that works towards another set is told. Nothing is kept between
looks but the last report of a worker that does not answer at this moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal

import msgspec

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.adapters.told import Live, elsewhere, wished
from fleet_operator.cluster.interface import Object
from fleet_operator.flip.asking import AGENT_S, WORD_MOST, Answer, Ask, open_ask
from fleet_operator.flip.follow import base
from fleet_operator.names import ADAPTERS
from fleet_planner.types import AdapterSeen, ObservedPod
from fleet_wire.unreadable import UNREADABLE

AT_ONCE = 32
"""Workers that are asked at the same time."""
UNSETTLED_S, SETTLED_S = 0.5, 5.0
"""How often workers are asked: while something is to change, and at rest."""
UNCONCERNED_S = 30.0
"""How often a fleet without adapters is looked at, without asking anybody; a change of its spec is seen at once."""
Reports = Mapping[str, tuple[AdapterSeen, ...]]
OK, NOT_FOUND = 200, 404


class _Entry(msgspec.Struct, frozen=True):
    """One adapter of an agent's state; what is not known is passed over."""

    name: str
    source: str = ""
    state: Literal["Loaded", "Loading", "Failed", "Unloading"] = "Loading"
    digest: str = ""
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct, frozen=True):
    """What matters here of GET /state; None: an agent from before there were adapters."""

    adapters: list[_Entry] | None = None
    uid: str = ""
    """Of its pod; empty: it does not say."""


def concerned(fleet: InferenceFleet, pods: Sequence[Object], known: Reports) -> bool:
    """Whether the workers of this fleet have to be looked at: it has adapters, or some worker still has."""
    told = any((pod["metadata"].get("annotations") or {}).get(ADAPTERS) for pod in pods)
    return bool(fleet.spec.model.adapters) or told or any(known.values())


def pause_s(fleet: InferenceFleet, pods: Sequence[ObservedPod], live: Live, known: Reports) -> float:
    """Time between two looks."""
    others = elsewhere(fleet, live)
    alive = [pod for pod in pods if not pod.terminating and pod.ip is not None and not pod.member]
    settled = all(_settled(wished(fleet, pod.name, live, others), known.get(pod.uid)) for pod in alive)
    return SETTLED_S if settled else UNSETTLED_S


def _settled(wanted: Sequence[tuple[str, str]], seen: Sequence[AdapterSeen] | None) -> bool:
    if seen is None:
        return not wanted
    return sorted((one.name, one.source) for one in seen) == list(wanted) and all(
        one.state in ("Loaded", "Failed") for one in seen
    )


class AdapterFollower:
    """Talks to workers of all fleets."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Ask]] = open_ask) -> None:
        self._connect = connect

    async def follow(
        self, fleet: InferenceFleet, pods: Sequence[ObservedPod], live: Live, known: Reports
    ) -> dict[str, tuple[AdapterSeen, ...]]:
        """What is known now of every worker that is there, by uid."""
        others, slots = elsewhere(fleet, live), asyncio.Semaphore(AT_ONCE)
        there = [pod for pod in pods if not pod.terminating and pod.ip is not None and not pod.member]
        async with self._connect() as ask:

            async def look(pod: ObservedPod) -> tuple[AdapterSeen, ...] | None:
                async with slots:
                    mine = wished(fleet, pod.name, live, others)
                    return await _look(ask, base(pod, live, "agent"), pod.uid, mine, known.get(pod.uid))

            found = await asyncio.gather(*(look(pod) for pod in there))
        return {pod.uid: seen for pod, seen in zip(there, found, strict=True) if seen is not None}


async def _look(
    ask: Ask, agent: str, uid: str, wanted: Sequence[tuple[str, str]], before: tuple[AdapterSeen, ...] | None
) -> tuple[AdapterSeen, ...] | None:
    answer = await ask(f"{agent}/state", within_s=AGENT_S)
    seen = seen_of(answer, uid)
    if seen is None:
        return before
    if sorted((one.name, one.source) for one in seen if one.state != "Unloading") == list(wanted):
        return seen
    told = [{"name": name, "source": source} for name, source in wanted]
    answer = await ask(f"{agent}/adapters", told, within_s=AGENT_S)
    if answer is not None and answer.status == NOT_FOUND:
        return tuple(
            AdapterSeen(name, source, "Failed", "", "NotSupported", "its agent knows no adapters") for name, source in wanted
        )
    return seen_of(answer, uid) or seen


def seen_of(answer: Answer | None, uid: str = "") -> tuple[AdapterSeen, ...] | None:
    """An agent's adapters; None when it did not say, or is that of another pod than `uid` (see `flip.asking.state_of`)."""
    if answer is None or answer.status != OK:
        return None
    try:
        said = msgspec.json.decode(answer.body, type=_State)
    except UNREADABLE:
        return None
    if uid and said.uid not in ("", uid):
        return None
    return tuple(
        AdapterSeen(e.name, e.source, e.state, e.digest[:WORD_MOST], e.reason[:WORD_MOST], e.message[:WORD_MOST])
        for e in said.adapters or ()
    )
