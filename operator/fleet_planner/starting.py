"""A tier that comes up for the first time, or wakes, is no outage: nobody is to be woken for it within the time that it may take
(`rollout.progressDeadline`). Pure: since when is kept in the status, so that it outlives the operator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1.status import FleetStatus
from fleet_planner.causes import SILENT_S
from fleet_planner.types import ObservedPod


def starting_since(tier: str, revision: str, present: FleetStatus, now: float) -> str | None:
    """Of a tier that does not serve; None when it has served before. One whose spec was mended begins anew."""
    known = next((one for one in present.tiers if one.name == tier), None)
    if known is None or (known.starting_since and known.revision != revision):
        return rfc3339(now)
    return known.starting_since


def exceeds(since: str | None, deadline_s: float, now: float) -> bool:
    """Whether a start takes longer than it may."""
    return since is not None and now - datetime.fromisoformat(since).timestamp() > deadline_s


def come_too_late(pods: Sequence[ObservedPod], since: str | None, deadline_s: float, now: float) -> bool:
    """Whether a start takes longer than it may though none of its workers does: they were replaced, again and again, or made
    late. Those that wait for a node or in a queue are told of elsewhere, and have their time from there on."""
    if since is None or not exceeds(since, deadline_s, now) or any(pod.unschedulable or pod.gated for pod in pods):
        return False
    begun = datetime.fromisoformat(since).timestamp()
    return all(pod.created_at - begun > SILENT_S for pod in pods)
