"""`dataclasses.replace` for values that mostly have the wanted fields already: then the very same value is given back.

Most passes find a fleet as the last one left it, and making a frozen value anew takes several times as long as a comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

Value = TypeVar("Value")


def altered(value: Value, **fields: Any) -> Value:
    """`value` with these fields."""
    for name, wanted in fields.items():
        found = getattr(value, name)
        if found is not wanted and found != wanted:
            made: Value = replace(value, **fields)  # type: ignore[type-var]
            return made
    return value
