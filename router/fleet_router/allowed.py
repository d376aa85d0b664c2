"""What a typed field may say, so that a refusal can list it: msgspec names only the value that it did not take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import inspect

_INDEX: Final = re.compile(r"\[[^\]]*\]")
_STEP: Final = re.compile(r"\[\]|[^.\[\]]+")
_NOT_ONE_OF: Final = re.compile(r"^Invalid (enum )?value ")


def with_allowed(what: str, kind: type, where: str) -> str:
    """A refusal of msgspec and, where the field takes a few values only, these. `where`: its path, such as "messages[0].role"."""
    if not _NOT_ONE_OF.match(what) or not (values := _allowed(kind, _INDEX.sub("[]", where))):
        return what
    return f"{what}; allowed are {', '.join(values)}"


@lru_cache(256)
def _allowed(kind: type, where: str) -> tuple[str, ...]:
    found = list(_alternatives(inspect.type_info(kind)))
    for step in _STEP.findall(where):
        found = [inner for outer in found for one in _below(outer, step) for inner in _alternatives(one)]
    values = [value for one in found if isinstance(one, inspect.LiteralType) for value in one.values]
    return tuple(sorted(value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in values))


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _alternatives(one)
    else:
        yield kind


def _below(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
        if step == kind.tag_field and isinstance(kind.tag, str):
            yield inspect.LiteralType((kind.tag,))
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType) and step == "[]":
        yield kind.item_type
