"""Affinity that no API server takes (core/validation of Kubernetes 1.36), or no scheduler reads, each with the field to blame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleet_api.metadata import key_findings, value_findings
from fleet_api.structure import quoted

Raw = Mapping[str, Any]
NONE = "no pod can be made"
WHOLE_MOST = 2**63 - 1
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
    for key in selector.get("matchLabels") or ():
        yield from map(str, key_findings(f"{field}.labelSelector.matchLabels", key))
    yield from _requirements(selector, f"{field}.labelSelector")


def _requirements(term: Raw, field: str) -> Iterator[str]:
    """The API server lets two kinds of values pass that the scheduler cannot read (component-helpers' nodeaffinity): what is no
    number for Gt and Lt, and in a wish for nodes what no label can have. A node never meets such a term; such a wish fails every
    pod for which two nodes would do. Before Kubernetes 1.32 values of terms passed as well, with the same end."""
    for number, one in enumerate(term.get("matchExpressions") or ()):
        at, operator, values = f"{field}.matchExpressions[{number}]", one["operator"], one.get("values") or ()
        yield from map(str, key_findings(f"{at}.key", one["key"]))
        if operator in _LISTED and not values:
            yield f"{at}.values: Required value: operator {operator} needs one or more: {NONE}"
        elif operator in _COMPARED and len(values) != 1:
            yield f"{at}.values: Required value: operator {operator} needs exactly one: {NONE}"
        elif operator not in (*_LISTED, *_COMPARED) and values:
            yield f"{at}.values: Forbidden: operator {operator} takes none: {NONE}"
        else:
            yield from _values(operator, values, f"{at}.values")


def _values(operator: str, values: Sequence[str], field: str) -> Iterator[str]:
    for place, value in enumerate(values):
        wrong = [str(finding) for finding in value_findings(f"{field}[{place}]", value)]
        yield from wrong
        if operator in _COMPARED and not wrong and not (value.isdecimal() and int(value) <= WHOLE_MOST):
            yield (
                f"{field}[{place}]: Invalid value: {quoted(value)}: operator {operator} compares whole numbers of 64 bits: no "
                "scheduler reads it"
            )
