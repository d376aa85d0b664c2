"""What admission says about a fleet or a scale: pure functions of the request (and of the fleet that a pool belongs to)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet_api.compat import refusals_applied, risks
from fleet_api.parse import ManifestError, parse_fleet, parse_pool
from fleet_api.structure import normalised
from fleet_api.validate import refusal, validate
from fleet_operator.names import CHANGED_BY
from fleet_operator.pool_sizes import written_on
from fleet_operator.scale_targets import is_target
from fleet_operator.webhook.review import Request, Verdict

ALLOWED = Verdict()


def judge_fleet(request: Request) -> Verdict:
    """The same words as the API server for what its schema and CEL refuse, then what CEL cannot judge, then warnings.

    An update that leaves the spec alone (labels, finalizers) is never refused: a fleet that became invalid must stay deletable.
    """
    if request.operation not in ("CREATE", "UPDATE") or (request.old and _spec(request.old) == _spec(request.object)):
        return ALLOWED
    manifest = {**request.object, "kind": "InferenceFleet"}
    errors = validate(manifest) or refusals_applied(normalised(manifest))
    if errors:
        return Verdict(False, refusal(manifest, errors))
    return Verdict(warnings=tuple([*risks(normalised(manifest)), *_removed(request)]))


def mark_fleet(request: Request) -> Verdict:
    """Write down who changed the spec; whoever did not change it cannot change that either."""
    if request.operation not in ("CREATE", "UPDATE") or not isinstance(request.object.get("metadata"), dict):
        return ALLOWED
    annotations = _annotations(request.object)
    if request.old and _spec(request.old) == _spec(request.object):
        wanted = _annotations(request.old).get(CHANGED_BY)
    else:
        wanted = request.user or None
    if annotations.get(CHANGED_BY) == wanted:
        return ALLOWED
    return Verdict(patch=tuple(_patch(request.object, wanted)))


def judge_scale(request: Request, pool: Mapping[str, Any], fleet: Mapping[str, Any]) -> Verdict:
    """A size with which the pool's role would be outside of its bounds is refused, with the bounds; what cannot be judged is
    allowed, and what stays as it is."""
    replicas = _spec(request.object).get("replicas", 0)
    try:
        owned, parsed = parse_pool(pool), parse_fleet(fleet)
        bounds = parsed.tier(owned.spec.tier).role(owned.spec.role)
    except (ManifestError, KeyError):
        return ALLOWED
    if not isinstance(replicas, int) or replicas == owned.spec.replicas:
        return ALLOWED
    spec, role = owned.spec, _of_role(pool, replicas)
    if bounds.min_replicas <= role <= bounds.max_replicas:
        return ALLOWED
    together = f"all revisions together would have {role}: " if role != replicas else ""
    return Verdict(
        False,
        f"spec.replicas: Invalid value: {replicas}: {together}{spec.role} of tier {spec.tier} of InferenceFleet {spec.fleet} has "
        f"between {bounds.min_replicas} (minReplicas) and {bounds.max_replicas} (maxReplicas) workers",
    )


def _of_role(pool: Mapping[str, Any], replicas: int) -> int:
    """Workers of the whole role: while two revisions share it, what is added to one pool counts for the role (`sizing`)."""
    written = None if is_target(dict(pool)) else written_on(dict(pool))
    if written is None or written.planned is None or written.size is None:
        return replicas
    return max(0, written.size + replicas - written.planned)


def _spec(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    found = obj.get("spec")
    return found if isinstance(found, dict) else {}


def _annotations(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = obj.get("metadata")
    found = metadata.get("annotations") if isinstance(metadata, dict) else None
    return found if isinstance(found, dict) else {}


def _patch(obj: Mapping[str, Any], wanted: str | None) -> list[Mapping[str, Any]]:
    path = "/metadata/annotations"
    pointer = f"{path}/{CHANGED_BY.replace('~', '~0').replace('/', '~1')}"
    if wanted is None:
        return [{"op": "remove", "path": pointer}]
    if not _annotations(obj):
        return [{"op": "add", "path": path, "value": {CHANGED_BY: wanted}}]
    return [{"op": "add", "path": pointer, "value": wanted}]


def _removed(request: Request) -> list[str]:
    """Tiers that leave, with all of their workers."""
    if not request.old:
        return []
    before, after = _tiers(request.old), _tiers(request.object)
    return [f"spec.tiers: tier {name} is removed: its workers are drained and deleted" for name in sorted(before - after)]


def _tiers(obj: Mapping[str, Any]) -> set[str]:
    found = _spec(obj).get("tiers")
    return {str(tier.get("name")) for tier in found if isinstance(tier, dict)} if isinstance(found, list) else set()
