"""Decode workers that serve no more for the moment: their pods are there, or were just now, and nobody said that they go.

The operator's document leaves a worker out while its pod is not ready (a failed probe, a container that starts anew), names it as
absent beside the others for a while, and as held while there is no place for it. All may serve again soon, or another one in
their place. Who drains, has another role now, or went with its whole tier (at zero), does not. Pure: the clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fleet_wire.endpoints import Endpoint, Endpoints

KEPT_S = 120.0
"""Twice as long as anybody may wait (RouterConfig.return_wait_s)."""
MOST = 4_096
"""Workers that are remembered; of more the oldest are forgotten."""


class Absent(NamedTuple):
    """One."""

    tier: str
    adapters: Mapping[str, str]
    since: float


def followed(
    before: Mapping[str, Absent],
    document: Endpoints,
    left: Mapping[str, tuple[Endpoint, float]],
    serving: Iterable[str],
    now: float,
) -> dict[str, Absent]:
    """Those of a new document. `left`: decode workers that serve no more, each with the time since which it has not; `serving`:
    uids of those that do."""
    named = {one.uid: one for one in document.workers}
    found = {uid: Absent(one.tier, one.adapters, now) for uid, one in named.items() if one.state == "held"}
    told = {one.uid: Absent(one.tier, one.adapters, now) for one in document.absent}
    found |= told
    found |= before
    found |= {uid: Absent(one.tier, one.adapters, since) for uid, (one, since) in left.items()}
    there, resting = set(serving), {zero.tier for zero in document.at_zero}
    stay = {
        uid: one for uid, one in found.items()
        if uid not in there and one.tier not in resting
        and (_may_return(named[uid]) if uid in named else uid in told or now - one.since <= KEPT_S)
    }  # fmt: skip
    return dict(list(stay.items())[-MOST:])


def _may_return(one: Endpoint) -> bool:
    return one.role == "decode" and one.state != "draining"


def awaited(absent: Mapping[str, Absent], tier: str, adapter: str, since: float) -> bool:
    """One that could answer such a request serves no more `since` then, or later. An empty tier: any of them."""
    return any(
        one.since >= since and tier in ("", one.tier) and (not adapter or adapter in one.adapters) for one in absent.values()
    )
