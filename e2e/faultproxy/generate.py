"""Fleets that nobody would write, made from the CRD's schema: wrong types, values at and beyond bounds, strange text, huge, null.

The same seed and number give the same fleet. Sizes that would be accepted stay small: a thousand pods prove nothing here.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SIZES = frozenset({"replicas", "minReplicas", "maxReplicas", "warm"})
SMALL = 3
TEXTS = (
    "", " ", "a" * 5_000, "Ωμέγα", "模型", "\u202egnp.exe", "a\u0000b", "line\nbreak", "\U0001f680",
    "../../etc/passwd", "$(id)", "{{.Env}}", "%s%s%n", "'; drop", "-", "true", "null", "0x10", "1e999", "١٢",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2**31, 2**53, 2**63 - 1, -(2**63), 10**30, 0.5, -0.0, 1e308)
OTHERS = (None, True, False, [], {}, [None], {"": None}, [[[[]]]], {"a": {"b": {"c": []}}}, "text", 7)


def schema() -> dict[str, Any]:
    """Of spec."""
    crd = yaml.safe_load((ROOT / "crds/inferencefleets.yaml").read_text())
    found: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def fleets(seed: int, count: int, base: dict[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """(manifest, paths that were changed)."""
    tree = schema()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        made, touched = copy.deepcopy(base), []
        made["metadata"]["name"] = f"g{number}"
        for _ in range(rng.choice((1, 1, 2, 3))):
            touched += _spoil(made["spec"], tree, "spec", rng)
        yield made, tuple(touched)


def _spoil(value: Any, tree: dict[str, Any], path: str, rng: random.Random) -> list[str]:
    """Change one field somewhere below; where, after the objects that had to be made for it: they may lack what they need."""
    properties = tree.get("properties")
    if isinstance(value, dict) and properties:
        if rng.random() < 0.04:
            name = rng.choice(("unknown", "Model", "tier", "ratio ", "$ref", "__proto__"))
            value[name] = rng.choice((*TEXTS, *OTHERS))
            return [f"{path}.{name}"]
        name = rng.choice(sorted(properties))
        inner, below = properties[name], value.get(name)
        deeper = inner.get("properties") or inner.get("items", {}).get("properties")
        if deeper and rng.random() < 0.85:
            where = f"{path}.{name}"
            if below is not None:
                return _into(below, inner, where, rng)
            value[name] = [{}] if inner.get("type") == "array" else {}
            return [where, *_into(value[name], inner, where, rng)]
        value[name] = _bad(inner, name, rng)
        return [f"{path}.{name}"]
    return [path]


def _into(value: Any, tree: dict[str, Any], path: str, rng: random.Random) -> list[str]:
    if isinstance(value, list) and value and "items" in tree:
        index = rng.randrange(len(value))
        return _spoil(value[index], tree["items"], f"{path}[{index}]", rng)
    return _spoil(value, tree, path, rng)


def _bad(tree: dict[str, Any], name: str, rng: random.Random) -> Any:
    """A value that fits the schema badly, or just so."""
    choices: list[Any] = [rng.choice(OTHERS), rng.choice(TEXTS), rng.choice(NUMBERS)]
    if "enum" in tree:
        choices += [rng.choice(tree["enum"]), str(tree["enum"][0]).upper()]
    if tree.get("type") in ("integer", "number"):
        low, high = tree.get("minimum", 0), tree.get("maximum", 2**31)
        inside = [min(high, low + step) for step in range(SMALL)] if name in SIZES else [low, high, (low + high) // 2]
        choices += [rng.choice(inside), low - 1, high + 1]
    if tree.get("type") == "string":
        choices += [rng.choice(TEXTS), "x" * (tree.get("maxLength", 100) + 1), rng.choice(("10s", "1h", "1:2", "2:1", "1Gi"))]
    if tree.get("type") == "array":
        choices += [[], [rng.choice(OTHERS)] * (tree.get("maxItems", 10) + 1), [rng.choice(TEXTS)]]
    return rng.choice(choices)
