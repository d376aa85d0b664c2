"""Server-side apply as arithmetic on field sets: pure, no store.

A field is named by its path. Lists whose items Kubernetes identifies by keys (containers by name, conditions by type) are
walked item by item; every other list is one value, and so is a selector. Each manager owns the set of paths that it applied or
changed last. An apply writes its own fields over the live object and removes those that the same manager applied before, does
not apply now, and nobody else owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec


@dataclass(frozen=True, slots=True)
class Item:
    """A step into a keyed list: the item whose keys have these values."""

    keys: tuple[tuple[str, Any], ...]


Step = str | Item
Path = tuple[Step, ...]

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "tiers": ("name",),
    "webhooks": ("name",),
}
_ATOMIC: Final = frozenset({"selector", "podSelector", "namespaceSelector", "labelSelector"})
"""Maps that are one value: an apply leaves nothing of what others added."""
_PORT_KEYS: Final = (("containerPort", "protocol"), ("port", "protocol"))


def clone(value: Any) -> Any:
    """A deep copy of JSON data, made in C: every pod begins as one of its template, and the store copies on every read."""
    return msgspec.to_builtins(value)


def leaves(value: Any, field: str = "") -> Iterable[Path]:
    """The paths of everything that `value` says; keyed items and empty maps count as fields of their own."""
    if isinstance(value, dict) and value and field not in _ATOMIC:
        for name, item in value.items():
            if item is not None:
                yield from ((name, *path) for path in leaves(item, name))
        return
    keys = _list_keys(field, value)
    if not keys:
        yield ()
        return
    for item in value:
        step = _item(item, keys)
        yield (step,)
        yield from ((step, *path) for path in leaves(item) if path)


def merge(live: Any, applied: Any, field: str = "") -> Any:
    """`live` with the fields of `applied` written over it; maps and keyed lists merge, everything else is replaced."""
    if isinstance(live, dict) and isinstance(applied, dict) and field not in _ATOMIC:
        merged = dict(live)
        for name, value in applied.items():
            if value is not None:
                merged[name] = merge(live.get(name), value, name)
        return merged
    keys = _list_keys(field, applied)
    if keys and isinstance(live, list):
        return _merge_items(live, applied, keys)
    return _without_nulls(applied)


def named_in(applied: Any, live: Any, field: str = "") -> Any:
    """`live` with no items in its keyed lists but those that `applied` names, in that order: what others added is left out. A
    list that lacks one of these, or has it twice, stays as it is."""
    if isinstance(live, dict) and isinstance(applied, dict):
        return {name: named_in(applied[name], value, name) if name in applied else value for name, value in live.items()}
    keys = _list_keys(field, applied)
    if not keys or not isinstance(live, list):
        return live
    found = [(item, [one for one in live if _is(one, _item(item, keys))]) for item in applied]
    return [named_in(item, same[0]) for item, same in found] if all(len(same) == 1 for _, same in found) else live


def remove(obj: Any, path: Path, kept: set[Path]) -> None:
    """Take the field at `path` out of `obj`, and maps and lists that this empties unless `kept` names them."""
    _drop(obj, path)
    for length in range(len(path) - 1, 0, -1):
        above = path[:length]
        if above in kept or _value(obj, above) not in ({}, []) or isinstance(above[-1], Item):
            return
        _drop(obj, above)


def apply(live: Any, applied: Any, before: set[Path], others: set[Path]) -> tuple[Any, set[Path]]:
    """The object after an apply and the paths that the manager owns now.

    `before` are the paths that it owned, `others` the paths that any other manager owns.
    """
    owned = set(leaves(applied))
    merged = clone(merge(live, applied))
    kept = others | owned
    for path in sorted(before - owned, key=len):
        if not any(other[: len(path)] == path for other in kept):
            remove(merged, path, kept)
    return merged, owned


def merge_patch(target: Any, patch: Any) -> Any:
    """JSON merge patch, RFC 7386: null removes, lists are replaced."""
    if not isinstance(patch, dict):
        return clone(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def changed(before: Any, after: Any) -> set[Path]:
    """The paths of `after` whose values are new or differ from `before`: what an update takes ownership of."""
    old = {path: _value(before, path) for path in leaves(before)}
    return {path for path in leaves(after) if path not in old or old[path] != _value(after, path)}


def _list_keys(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value) or not value:
        return ()
    if field == "ports":
        return next((keys for keys in _PORT_KEYS if all(keys[0] in item for item in value)), ())
    keys = _KEYS.get(field, ())
    return keys if all(key in item for item in value for key in keys) else ()


def _item(item: Mapping[str, Any], keys: tuple[str, ...]) -> Item:
    return Item(tuple((key, item.get(key, "TCP" if key == "protocol" else None)) for key in keys))


def _merge_items(live: list[Any], applied: list[Any], keys: tuple[str, ...]) -> list[Any]:
    if not all(isinstance(item, dict) for item in live):
        return list(_without_nulls(applied))
    mine = {_item(item, keys): item for item in applied}
    theirs = {_item(item, keys): item for item in live}
    # Our items stand in our order; an item of somebody else follows the one that it followed before.
    order: list[Item] = list(mine)
    place = 0
    for step in theirs:
        if step not in mine:
            order.insert(place, step)
        place = order.index(step) + 1
    return [merge(theirs.get(step), mine[step]) if step in mine else theirs[step] for step in order]


def _drop(obj: Any, path: Path) -> None:
    """Delete one field; nothing when it is not there."""
    for step in path[:-1]:
        obj = _child(obj, step)
    last = path[-1]
    if isinstance(last, Item) and isinstance(obj, list):
        obj[:] = [item for item in obj if not _is(item, last)]
    elif isinstance(last, str) and isinstance(obj, dict):
        obj.pop(last, None)


def _child(obj: Any, step: Step) -> Any:
    if isinstance(step, Item):
        return next((item for item in obj if _is(item, step)), {}) if isinstance(obj, list) else {}
    return obj.get(step, {}) if isinstance(obj, dict) else {}


def _is(item: Any, step: Item) -> bool:
    return isinstance(item, dict) and _item(item, tuple(key for key, _ in step.keys)) == step


def _value(obj: Any, path: Path) -> Any:
    """What is at `path`; a keyed item stands for its presence, its fields are paths of their own."""
    for step in path:
        obj = _child(obj, step)
    return {} if path and isinstance(path[-1], Item) else obj


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
