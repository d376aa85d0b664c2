"""Does an object already say what we want? Pure: decides whether a write is needed at all.

Two tests: the hash of our last wish (an annotation) must be the hash of this wish, and every field that we wish must be in the
live object. The first sees a wish that lost a field, the second sees somebody else's edit; defaults that the API server adds
are in neither. What others add to the routers' pods (a container, a variable: a mesh, a policy, Reloader) is not ours, and no
apply takes it away: it stays.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from fleet_operator.cluster.interface import DEPLOYMENT, Object
from fleet_operator.cluster.merge import named_in
from fleet_operator.names import APPLIED

WHOLE: Final = {"Service": ("selector",), "PodDisruptionBudget": ("selector",), "NetworkPolicy": ("podSelector", "ingress")}
"""Fields of a spec to which nobody may add: a selector selects less then, or nothing, and whom a policy lets in may be more."""


def stamped(wish: Object) -> Object:
    """The wish with the hash of itself; it shares everything else with `wish`."""
    digest = hashlib.sha256(json.dumps(wish, sort_keys=True).encode()).hexdigest()[:16]
    meta = wish["metadata"]
    return {**wish, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), APPLIED: digest}}}


def satisfied(wish: Object, live: Object | None) -> bool:
    """No write is needed. `wish` is stamped."""
    return live is not None and (contains(live, wish) or contains(_ours(live, wish), wish)) and not _added_to(live, wish)


def _ours(live: Object, wish: Object) -> Object:
    return named_in(wish, live) if wish.get("kind") == DEPLOYMENT.kind else live


def _added_to(live: Object, wish: Object) -> str:
    """Path of a field that is to be as wished and no more, and has more; everything of ours is still there. Empty: none."""
    fields = WHOLE.get(wish.get("kind", ""), ())
    return next((f"spec.{field}" for field in fields if live["spec"].get(field) != wish["spec"].get(field)), "")


def contains(live: Any, wish: Any) -> bool:
    """Every field of `wish` is in `live`; lists must have equal length and contain each other's entries in order."""
    # plain loops: this runs over every wish in every pass, and generators would double its cost
    if isinstance(wish, dict):
        if not isinstance(live, dict):
            return False
        for key, value in wish.items():  # noqa: SIM110
            if key not in live or not contains(live[key], value):
                return False
        return True
    if isinstance(wish, list):
        return isinstance(live, list) and len(live) == len(wish) and all(map(contains, live, wish))
    return bool(live == wish)


def difference(live: Any, wish: Any, path: str = "") -> str:
    """Path of the first field of `wish` that `live` has not, e.g. spec.ports[0].port; empty when it is as wished."""
    if not path and isinstance(live, dict) and isinstance(wish, dict):
        live = _ours(live, wish)
    if contains(live, wish):
        return _added_to(live, wish) if not path and isinstance(wish, dict) else ""
    if isinstance(wish, dict) and isinstance(live, dict):
        key = next(key for key, value in wish.items() if key not in live or not contains(live[key], value))
        return difference(live.get(key), wish[key], f"{path}.{key}" if path else key)
    if isinstance(wish, list) and isinstance(live, list) and len(live) == len(wish):
        index = next(i for i, value in enumerate(wish) if not contains(live[i], value))
        return difference(live[index], wish[index], f"{path}[{index}]")
    return path


def merge_patch(present: Object, wish: Object) -> Object:
    """The JSON merge patch that makes `wish` of `present`: what the wish no longer has becomes null, at every depth."""
    gone: Object = {key: None for key in present if key not in wish}
    for key, value in wish.items():
        inside = isinstance(value, dict) and isinstance(present.get(key), dict)
        gone[key] = merge_patch(present[key], value) if inside else value
    return gone


def data_patch(wish: Object, found: Object) -> Object:
    """The merge patch that makes `wish` of what was found, on top of its version: our marks on it and, where the wish has data,
    none but ours."""
    ours = {key: value for key, value in wish["metadata"].items() if key not in {"name", "namespace"}}
    marks = {"metadata": {**ours, "resourceVersion": found["metadata"]["resourceVersion"]}}
    return {**marks, "data": merge_patch(found.get("data") or {}, wish["data"])} if "data" in wish else marks
