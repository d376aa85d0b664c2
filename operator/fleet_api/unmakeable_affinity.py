"""Affinity that no API server takes (core/validation of Kubernetes 1.36), each with the field to blame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleet_api.metadata import key_findings, value_findings

Raw = Mapping[str, Any]
NONE = "no pod can be made"
_LISTED = ("In", "NotIn")
_COMPARED = ("Gt", "Lt")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def affinity_findings(affinity: Raw, field: str) -> Iterator[str]:
    """Of a podTemplate's affinity."""
    nodes = affinity.get("nodeAffinity") or {}
    at = f"{field}.nodeAffinity"
    for number, term in enumerate((nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or ()):
        yield from _requirements(term, f"{at}.{_REQUIRED}.nodeSelectorTerms[{number}]")
    for number, wish in enumerate(nodes.get(_PREFERRED) or ()):
        yield from _requirements(wish["preference"], f"{at}.{_PREFERRED}[{number}].preference", any_value=True)
    for kind in ("podAffinity", "podAntiAffinity"):
        terms, at = affinity.get(kind) or {}, f"{field}.{kind}"
        for number, term in enumerate(terms.get(_REQUIRED) or ()):
            yield from _pods(term, f"{at}.{_REQUIRED}[{number}]")
        for number, wish in enumerate(terms.get(_PREFERRED) or ()):
            yield from _pods(wish["podAffinityTerm"], f"{at}.{_PREFERRED}[{number}].podAffinityTerm")


def _pods(term: Raw, field: str) -> Iterator[str]:
    yield from map(str, key_findings(f"{field}.topologyKey", term["topologyKey"]))
    selector = term["labelSelector"]
    for key in selector.get("matchLabels") or ():
        yield from map(str, key_findings(f"{field}.labelSelector.matchLabels", key))
    yield from _requirements(selector, f"{field}.labelSelector")


def _requirements(term: Raw, field: str, *, any_value: bool = False) -> Iterator[str]:
    """`any_value`: of a wish for nodes, where nobody looks at values. Before Kubernetes 1.32 nobody did where nodes must meet a
    term either, and none met one with a value that no label can have."""
    for number, one in enumerate(term.get("matchExpressions") or ()):
        at, operator, values = f"{field}.matchExpressions[{number}]", one["operator"], one.get("values") or ()
        yield from map(str, key_findings(f"{at}.key", one["key"]))
        if operator in _LISTED and not values:
            yield f"{at}.values: Required value: operator {operator} needs one or more: {NONE}"
        elif operator in _COMPARED and len(values) != 1:
            yield f"{at}.values: Required value: operator {operator} needs exactly one: {NONE}"
        elif operator not in (*_LISTED, *_COMPARED) and values:
            yield f"{at}.values: Forbidden: operator {operator} takes none: {NONE}"
        elif not any_value:
            for place, value in enumerate(values):
                yield from map(str, value_findings(f"{at}.values[{place}]", value))
