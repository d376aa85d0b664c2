"""One rule between fields, said twice: as CEL for the API server and as a Python predicate for `fleet up`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """One cross-field rule: `cel` and `holds` say the same about the object at `path`."""

    path: str
    """Where it applies: "" is the whole object, "spec.tiers[]" each tier."""
    cel: str
    message: str
    holds: Callable[[Raw], bool]
    field: str = ""
    """The field to blame, relative to `path`, with a leading dot; empty blames the object itself."""


def dig(raw: Raw, path: str, default: Any) -> Any:
    """The value at a dotted path, or `default` when a step is absent."""
    missing = object()
    found = reduce(lambda at, key: at.get(key, missing) if isinstance(at, Mapping) else missing, path.split("."), raw)
    return default if found is missing else found


def either(path: str, default: Any) -> str:
    """CEL of `dig`. Optional chains (self.?a.?b) would be shorter, but the API server cannot bound their cost."""
    literal = f"'{default}'" if isinstance(default, str) else str(default)
    return f"({_there(path)} ? self.{path} : {literal})"


def unless_absent(paths: Sequence[str], cel: str) -> str:
    """CEL that looks no further when none of these is there, which must satisfy `cel`. The API server evaluates every rule at
    every write of an object, also of its status, and each field that a rule reads costs it a copy of the list of its fields."""
    return f"({' && '.join(f'!({_there(path)})' for path in paths)}) || ({cel})"


def _there(path: str) -> str:
    steps = path.split(".")
    return " && ".join(f"has(self.{'.'.join(steps[: end + 1])})" for end in range(len(steps)))
