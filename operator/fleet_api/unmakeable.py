"""Pods that no API server takes: Kubernetes' own rules (core/validation of 1.36) for what a fleet hands on to its pods and its
own schema cannot say. A fleet with one of these was accepted, and every pod of it refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleet_api.metadata import key_findings
from fleet_api.quantities import exact_quantity
from fleet_api.structure import quoted

Raw = Mapping[str, Any]
NONE = "no pod can be made"
HUGE = "hugepages-2Mi"
_LISTED = ("In", "NotIn")
_COMPARED = ("Gt", "Lt")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def unmakeable(spec: Raw, index: int) -> Iterator[str]:
    """Why no pod of a tier can be made, each with the field to blame."""
    tier, at = spec["tiers"][index], f"spec.tiers[{index}]"
    yield from _keys(tier["accelerator"].get("nodeSelector"), f"{at}.accelerator.nodeSelector")
    for role in ("prefill", "decode"):
        own = tier.get(role) or {}
        yield from _keys((own.get("accelerator") or {}).get("nodeSelector"), f"{at}.{role}.accelerator.nodeSelector")
        template, field = own.get("podTemplate") or {}, f"{at}.{role}.podTemplate"
        for name in ("labels", "annotations", "nodeSelector"):
            yield from _keys(template.get(name), f"{field}.{name}")
        for number, toleration in enumerate(template.get("tolerations") or ()):
            yield from _toleration(toleration, f"{field}.tolerations[{number}]")
        yield from _affinity(template.get("affinity") or {}, f"{field}.affinity")
        yield from _huge_pages(template.get("resources") or {}, f"{field}.resources")
        yield from _paths(template, field)


def unmakeable_everywhere(spec: Raw) -> Iterator[str]:
    """The same of what all tiers share."""
    image, path = (spec.get("engine") or {}).get("image") or "", (spec["model"].get("cache") or {}).get("path") or ""
    if any(map(str.isspace, image)):
        yield f"spec.engine.image: Invalid value: {quoted(image)}: a name of an image has no blanks: {NONE}"
    if ".." in path.split("/"):
        yield f"spec.model.cache.path: Invalid value: {quoted(path)}: must not contain ..: {NONE}"


def _keys(labels: Raw | None, field: str) -> Iterator[str]:
    for key in labels or ():
        yield from map(str, key_findings(field, key.lower() if field.endswith("annotations") else key))


def _toleration(toleration: Raw, field: str) -> Iterator[str]:
    key, value, exists = toleration.get("key"), toleration.get("value"), toleration.get("operator") == "Exists"
    if key:
        yield from map(str, key_findings(f"{field}.key", key))
    elif not exists:
        yield f"{field}.operator: Invalid value: must be Exists when there is no key, which means every taint: {NONE}"
    if value and exists:
        yield f"{field}.value: Invalid value: {quoted(value)}: operator Exists takes none: {NONE}"
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield f"{field}.effect: Invalid value: must be NoExecute when there are tolerationSeconds: {NONE}"


def _affinity(affinity: Raw, field: str) -> Iterator[str]:
    nodes = affinity.get("nodeAffinity") or {}
    at = f"{field}.nodeAffinity"
    for number, term in enumerate((nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or ()):
        yield from _requirements(term, f"{at}.{_REQUIRED}.nodeSelectorTerms[{number}]")
    for number, wish in enumerate(nodes.get(_PREFERRED) or ()):
        yield from _requirements(wish["preference"], f"{at}.{_PREFERRED}[{number}].preference")
    for kind in ("podAffinity", "podAntiAffinity"):
        terms, at = affinity.get(kind) or {}, f"{field}.{kind}"
        for number, term in enumerate(terms.get(_REQUIRED) or ()):
            yield from _pods(term, f"{at}.{_REQUIRED}[{number}]")
        for number, wish in enumerate(terms.get(_PREFERRED) or ()):
            yield from _pods(wish["podAffinityTerm"], f"{at}.{_PREFERRED}[{number}].podAffinityTerm")


def _pods(term: Raw, field: str) -> Iterator[str]:
    yield from map(str, key_findings(f"{field}.topologyKey", term["topologyKey"]))
    selector = term["labelSelector"]
    yield from _keys(selector.get("matchLabels"), f"{field}.labelSelector.matchLabels")
    yield from _requirements(selector, f"{field}.labelSelector")


def _requirements(term: Raw, field: str) -> Iterator[str]:
    for number, one in enumerate(term.get("matchExpressions") or ()):
        at, operator, values = f"{field}.matchExpressions[{number}]", one["operator"], one.get("values") or ()
        yield from map(str, key_findings(f"{at}.key", one["key"]))
        if operator in _LISTED and not values:
            yield f"{at}.values: Required value: operator {operator} needs one or more: {NONE}"
        elif operator in _COMPARED and len(values) != 1:
            yield f"{at}.values: Required value: operator {operator} needs exactly one: {NONE}"
        elif operator not in (*_LISTED, *_COMPARED) and values:
            yield f"{at}.values: Forbidden: operator {operator} takes none: {NONE}"


def _huge_pages(resources: Raw, field: str) -> Iterator[str]:
    """Nobody may use more of them than was set aside."""
    asked, most = ((resources.get(kind) or {}).get(HUGE) for kind in ("requests", "limits"))
    if asked is None or (most is not None and exact_quantity(str(asked)) == exact_quantity(str(most))):
        return
    yield f"{field}.requests.{HUGE}: Invalid value: {quoted(asked)}: must be limits.{HUGE}, or left out: {NONE}"


def _paths(template: Raw, field: str) -> Iterator[str]:
    found = [
        (f"{field}.volumes[{number}].hostPath.path", (volume.get("hostPath") or {}).get("path"))
        for number, volume in enumerate(template.get("volumes") or ())
    ]
    found += [
        (f"{field}.volumeMounts[{number}].subPath", mount.get("subPath"))
        for number, mount in enumerate(template.get("volumeMounts") or ())
    ]
    for at, path in found:
        if ".." in (path or "").split("/"):
            yield f"{at}: Invalid value: {quoted(path)}: must not contain ..: {NONE}"
