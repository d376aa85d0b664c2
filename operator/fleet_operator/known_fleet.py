"""The parsed fleet of a raw object, parsed again only where it changed: most passes follow an event about a pod, and most changes
of a fleet are its own status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.fleet_telling import Words
from fleet_operator.recorder import present_status
from fleet_operator.render.revision import revision_of

OF_STATUS = ("resourceVersion", "managedFields")
"""Fields of the metadata that a write to the status changes."""


@dataclass(slots=True)
class KnownFleet:
    """One fleet, as last parsed."""

    raw: Object
    fleet: InferenceFleet
    revisions: dict[str, str]
    """By tier, the one that the spec asks for."""
    resolved: dict[str, Any]
    """For the status."""


def parse_again(known: KnownFleet | None, raw: Object, words: Words) -> KnownFleet:
    """The fleet of `raw`; its spec is the very same value while the user changed nothing. `words`: what was said of it last.
    ManifestError."""
    if known is not None and known.raw is raw:
        return known
    if known is None or not _same_wish(known.raw, raw):
        fleet = parse_fleet(raw)
        return KnownFleet(raw, fleet, {tier.name: revision_of(fleet, tier) for tier in fleet.spec.tiers}, fleet.resolved())
    metadata = known.fleet.metadata.model_copy(update={"resource_version": raw["metadata"].get("resourceVersion", "")})
    status = words.spoken(raw.get("status")) or present_status(raw)
    fleet = known.fleet.model_copy(update={"metadata": metadata, "status": status})
    return KnownFleet(raw, fleet, known.revisions, known.resolved)


def _same_wish(before: Object, after: Object) -> bool:
    mine, others = ({k: v for k, v in obj["metadata"].items() if k not in OF_STATUS} for obj in (before, after))
    return mine == others and before["spec"] == after.get("spec")
