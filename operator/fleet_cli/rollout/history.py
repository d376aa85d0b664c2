"""What a fleet's revisions were, and the manifest that goes back to one. Pure: objects in, objects and text out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fleet_api.parse import ManifestError, parse_fleet
from fleet_cli.errors import InputError
from fleet_operator.cluster.interface import Object
from fleet_operator.names import REVISION, TIER
from fleet_operator.render.revision import MARKS, NOT_OF_PODS, RESTARTED_AT, SIZING, SPEC_PARTS, revision_of

ROLES = ("prefill", "decode")
HUB = "hf://"
SOURCE = ("source", "revision")
"""What a model of a tier's own has."""
FETCHES = ("tokenSecretRef", "cache")
KEY = "peerKey"
"""Of the fleet; a revision has it in its tier."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored revision of one tier."""

    tier: str
    number: int
    revision: str
    created: str
    inputs: Mapping[str, Any]


def entries(revisions: Iterable[Object]) -> list[Entry]:
    """Stored revisions, oldest first within each tier."""
    found = [
        Entry(
            tier=obj["metadata"]["labels"][TIER],
            number=int(obj["revision"]),
            revision=obj["metadata"]["labels"][REVISION],
            created=obj["metadata"].get("creationTimestamp", ""),
            inputs=obj["data"]["inputs"],
        )
        for obj in revisions
        if {TIER, REVISION} <= (obj["metadata"].get("labels") or {}).keys() and "inputs" in (obj.get("data") or {})
    ]
    return sorted(found, key=lambda entry: (entry.tier, entry.number))


def previous(found: Iterable[Entry], fleet: Object, tier: str, number: int | None) -> Entry:
    """The revision to go back to: as asked; else the one that serves, where the spec asks for another one that was rolled back or
    not begun; else the one that served before; else the newest one that the tier does not have now. InputError: there is none."""
    mine = [entry for entry in found if entry.tier == tier]
    if number is not None:
        match = [entry for entry in mine if entry.number == number]
        if not match:
            known = ", ".join(str(entry.number) for entry in mine) or "none"
            raise InputError(f"tier {tier} has no revision {number}; stored are: {known}")
        return match[0]
    tiers: list[Object] = (fleet.get("status") or {}).get("tiers", [])
    status = next((one for one in tiers if one.get("name") == tier), {})
    rollout, serves = status.get("rollout") or {}, status.get("revision")
    kept = [entry for entry in mine if entry.revision == serves]
    if kept and (rollout.get("failed") or _is_held(fleet, tier, mine, serves)):
        return kept[0]  # the spec asks for another one that nobody goes to
    now = {serves, rollout.get("failed")}
    others = [entry for entry in mine if entry.revision not in now]
    for served in (rollout.get("stable"), rollout.get("previous")):  # a number says when a revision was first seen, not last
        if match := [entry for entry in others if entry.revision == served]:
            return match[0]
    if not others:
        raise InputError(f"tier {tier} has no other revision to go back to")
    return others[-1]


def _is_held(fleet: Object, tier: str, mine: Iterable[Entry], serves: str | None) -> bool:
    """A pause keeps what the spec asks for from being begun."""
    if not ((fleet.get("spec") or {}).get("rollout") or {}).get("paused"):
        return False
    try:
        parsed = parse_fleet({key: part for key, part in fleet.items() if key != "status"})
    except ManifestError:
        return False
    asked = revision_of(parsed, parsed.tier(tier))
    return asked != serves and any(entry.revision == asked for entry in mine)


def returned(fleet: Object, tier: str, inputs: Mapping[str, Any]) -> Object:
    """The fleet with everything that its pods are made from as `inputs` has it; sizes, ratio and all the rest stay."""
    out = copy.deepcopy(fleet)
    spec = out["spec"]
    now = next(one for one in spec["tiers"] if one["name"] == tier)
    had = {part: spec.pop(part) for part in SPEC_PARTS if part in spec}
    spec |= {part: copy.deepcopy(inputs[part]) for part in SPEC_PARTS if part in inputs}
    if "model" in had and "model" in inputs:
        spec["model"] = _model(had["model"], spec["model"], now)
    _set_key(spec, inputs)
    _set(spec, "limits", "maxOutputTokens", inputs.get("maxOutputTokens"))
    _set(spec, "rollout", "drainTimeout", inputs.get("drainTimeout") or None)
    spec["tiers"] = [_tier(one, inputs["tier"]) if one["name"] == tier else one for one in spec["tiers"]]
    notes = out["metadata"].setdefault("annotations", {})
    notes.pop(RESTARTED_AT, None)
    if inputs.get("restartedAt"):
        notes[RESTARTED_AT] = inputs["restartedAt"]
    out.pop("status", None)
    return out


def _model(now: Object, then: Object, tier: Object) -> Object:
    """spec.model with what the revision was made from: `then`, which has the source of a tier's own model where `tier` has one.
    Adapters stay, but for those that lay below another model's folder, and so does how nodes fetch."""
    found = copy.deepcopy(then)
    if "model" in tier:
        tier["model"] = {part: found.pop(part) for part in SOURCE if part in found}
        found |= {part: now[part] for part in SOURCE if part in now}
    if not then["source"].startswith(HUB):  # what fetches from there is no part of it
        found |= {part: now[part] for part in FETCHES if part in now and part not in found}
    if "prefetch" in now.get("cache", {}) and found.get("cache", {}).get("type") == "nodeLocal":
        found["cache"] = {**found["cache"], "prefetch": now["cache"]["prefetch"]}
    below = f"{found.get('adapterRoot', found['source'])}/"
    adapters = [one for one in now.get("adapters", ()) if one["source"].startswith((HUB, below))]
    return {**found, "adapters": adapters} if adapters else found


def _set_key(spec: Object, inputs: Mapping[str, Any]) -> None:
    """spec.peerKey, where it is part of the revision: of torch workers, unless they are not seeded and nobody named one."""
    shape, engine = inputs["tier"], inputs.get("engine", {}).get("type", "torch")
    seeded = shape.get("kvTransfer", {}).get("seed", {}).get("enabled", True)
    if KEY in shape or (engine == "torch" and seeded):
        spec.pop(KEY, None)
        if shape.get(KEY):
            spec[KEY] = copy.deepcopy(shape[KEY])


def _set(spec: Object, part: str, field: str, value: Any) -> None:
    section = {key: old for key, old in spec.get(part, {}).items() if key != field}
    if value is not None:
        section[field] = value
    if section or part in spec:
        spec[part] = section


def _tier(now: Object, shape: Mapping[str, Any]) -> Object:
    """The present sizes and ratio with the stored shape."""
    out = {key: value for key, value in now.items() if key in NOT_OF_PODS or key == "name"}
    out |= {key: copy.deepcopy(value) for key, value in shape.items() if key not in (*ROLES, KEY)}
    for role in ROLES:
        sizes = {key: value for key, value in now.get(role, {}).items() if key in SIZING}
        both = {**copy.deepcopy(dict(shape.get(role, {}))), **sizes}
        marks = {key: value for key, value in now.get(role, {}).get("podTemplate", {}).items() if key in MARKS}
        if marks:  # labels and annotations restart nothing and are part of no revision: they stay
            both["podTemplate"] = {**both.get("podTemplate", {}), **marks}
        if both:
            out[role] = both
    return out


def table(found: Iterable[Entry], fleet: Object) -> str:
    """`fleet rollout history`: one line per revision, and what marks it."""
    status = {tier.get("name"): tier for tier in (fleet.get("status") or {}).get("tiers", [])}
    lines = [f"{'TIER':<20} {'NO':>4}  {'REVISION':<9} {'CREATED':<21} STATE"]
    for entry in found:
        tier = status.get(entry.tier, {})
        rollout = tier.get("rollout") or {}
        marks = [
            word
            for word, revision in (
                ("stable", rollout.get("stable")), ("target", rollout.get("target")), ("rolled back", rollout.get("failed")),
            )
            if revision == entry.revision
        ]  # fmt: skip
        lines.append(f"{entry.tier:<20} {entry.number:>4}  {entry.revision:<9} {entry.created:<21} {', '.join(marks)}".rstrip())
    return "\n".join(lines)


def progress(fleet: Object) -> tuple[str, bool, bool]:
    """`fleet rollout status`: the words, whether it is over, whether it failed."""
    if "deletionTimestamp" in fleet["metadata"]:
        return "the fleet is deleted: nothing is rolled out any more", True, True
    found = {c["type"]: c for c in (fleet.get("status") or {}).get("conditions", [])}
    rolling = found.get("RollingOut")
    generation = fleet["metadata"].get("generation", 0)
    unseen = (fleet.get("status") or {}).get("observedGeneration", 0) < generation
    accepted = found.get("Accepted", {})
    if accepted.get("status") == "False" and not unseen:  # the other condition is still what the last accepted spec made it
        return _words(accepted), True, True
    if rolling is None or unseen:
        return "the operator has not seen this version of the fleet yet", False, False
    reason = rolling.get("reason")
    failed = reason in ("Stuck", "ProgressDeadlineExceeded", "RolledBack")
    return _words(rolling), reason == "Complete" or failed, failed


def _words(condition: Mapping[str, Any]) -> str:
    """What somebody edited may lack either."""
    return f"{condition.get('reason', 'no reason')}: {condition.get('message', '')}"
