"""Which adapters each worker should have. Pure.

The spec's, where the worker runs the spec's model: an adapter over another model loads if the shapes fit, and answers nonsense. A
worker of a revision with another model (a rollout, or one that was rolled back) keeps what it was told while the spec had that,
and so does one of a revision whose stored template is lost: nobody knows its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import CONTROLLER_REVISION, POD, Object
from fleet_operator.names import ADAPTERS, REVISION, TIER
from fleet_operator.render.revision import place_of
from fleet_operator.render.worker import adapters_told
from fleet_planner.adapters import wishes
from fleet_worker.config import decode_adapters

Live = Mapping[tuple[str, str], Object]
Place = tuple[str, str]
"""(tier, revision)."""
NOWHERE: Final[Place] = ("", "")
"""Of a pod that is no worker, or whose labels somebody took."""
BASE: Final = ("source", "revision", "adapterRoot")
"""Fields of a model that decide what an adapter's source means, and over which weights it may lie."""


def elsewhere(fleet: InferenceFleet, live: Live) -> frozenset[Place]:
    """Revisions with another model, or adapters in another root, than the spec says; and those of workers whose template is not
    there: somebody deleted it. A template that does not tell has the spec's."""
    model = fleet.spec.model.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    known, found = {NOWHERE}, set[Place]()
    for (kind, _), stored in live.items():
        at = place_of(stored) if kind == CONTROLLER_REVISION.kind else None
        if at is None:
            continue
        known.add(at)
        theirs = ((stored.get("data") or {}).get("inputs") or {}).get("model")
        if theirs is not None and any(theirs.get(part) != model.get(part) for part in BASE):
            found.add(at)
    found |= {place_of_pod(pod) for (kind, _), pod in live.items() if kind == POD.kind} - known
    return frozenset(found)


def worker_told(fleet: InferenceFleet, place: Place, live: Live, others: frozenset[Place]) -> str:
    """What the annotation of a new worker says; `others`: see `elsewhere`."""
    if place not in others:
        return adapters_told(fleet)
    alike = (pod for (kind, _), pod in sorted(live.items()) if kind == POD.kind and place_of_pod(pod) == place)
    return next((told for pod in alike if (told := (pod["metadata"].get("annotations") or {}).get(ADAPTERS))), "")


def wished(fleet: InferenceFleet, name: str, live: Live, others: frozenset[Place]) -> tuple[tuple[str, str], ...]:
    """(name, source) of what the worker of this pod should have, in order of names."""
    pod = live.get((POD.kind, name))
    if pod is None or place_of_pod(pod) not in others:
        return wishes(fleet)
    try:
        told = decode_adapters((pod["metadata"].get("annotations") or {}).get(ADAPTERS) or "[]")
    except msgspec.DecodeError:  # somebody edited it
        return ()
    return tuple(sorted((wish.name, wish.source) for wish in told))


def place_of_pod(pod: Object) -> Place:
    """NOWHERE without such labels."""
    labels = pod["metadata"].get("labels") or {}
    return labels.get(TIER, ""), labels.get(REVISION, "")
