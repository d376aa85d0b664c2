"""What a role flip writes to a pod, as merge patches. Pure. Every patch names the pod's uid: another pod of the same name is left
alone."""

from __future__ import annotations

from fleet_api.conditions import rfc3339
from fleet_operator.cluster.interface import Object
from fleet_operator.names import FLIP, FLIP_SINCE, FLIPPED_AT, POOL, RIGHTED_AT, ROLE, owner_reference
from fleet_planner.flip import other
from fleet_planner.wanted import FlipWanted, Relabel


def told(flip: FlipWanted) -> Object:
    """The role that a worker is told to take, or nothing of it any more."""
    since = rfc3339(flip.since) if flip.role is not None else None
    return {"metadata": {"uid": flip.uid, "annotations": {FLIP: flip.role, FLIP_SINCE: since}}}


def relabelled(relabel: Relabel, pool: Object) -> Object:
    """The pod moves to `pool`, or stays there; its name stays."""
    at = RIGHTED_AT if relabel.again else FLIPPED_AT
    return {
        "metadata": {
            "uid": relabel.uid,
            "labels": {ROLE: relabel.role, POOL: relabel.pool},
            "annotations": {FLIP: None, FLIP_SINCE: None, at: rfc3339(relabel.at)},
            "ownerReferences": [owner_reference(pool)],
        }
    }


def words(relabel: Relabel) -> str:
    """What happened, as it is told."""
    what = f"{relabel.role} again" if relabel.again else f"{other(relabel.role)} → {relabel.role}"
    return f"{what} in {relabel.took_s:.0f} s; {relabel.proof}"
