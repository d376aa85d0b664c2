"""YAML as kubectl reads it: the scalars of sigs.k8s.io/yaml 1.6 (YAML 1.1's booleans, Go's numbers, dates that stay text).

tests/fleet_cli/test_kubeyaml.py holds what that library answered. Nothing but JSON's types comes out.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Hashable
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_TRUE = frozenset({"y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"})
_FALSE = frozenset({"n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"})
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_NOT_FINITE = re.compile(r"^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_INT = re.compile(r"^([-+]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_DIGITS_MOST = 64
"""Longer ones are no 64-bit integers in any base that is written here."""


class KubeLoader(yaml.SafeLoader):
    """Refuses a key written twice, as kubectl does; plain YAML would silently keep the last."""

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        """The tag of a node that names none."""
        if kind is yaml.ScalarNode and implicit[0] and value is not None:
            return _TAG + ("merge" if value == "<<" else _kind(plain(value)))
        if kind is yaml.ScalarNode:
            return _TAG + "str"
        return _TAG + ("seq" if kind is yaml.SequenceNode else "map")

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """`<<` is replaced by what it merges, where it stands: what comes later wins, of a list of maps what comes first. Each
        key is there once: a node that an alias names comes here again."""
        pairs: dict[Hashable, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            for each in self._merged(value) if key.tag == _TAG + "merge" else [(key, value)]:
                name = each[0]
                pairs[_key(name, self.construct_object(name)) if isinstance(name, yaml.ScalarNode) else id(name)] = each
        node.value = list(pairs.values())

    def _merged(self, node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
        maps = node.value[::-1] if isinstance(node, yaml.SequenceNode) else [node]
        pairs: list[tuple[yaml.Node, yaml.Node]] = []
        for one in maps:
            if not isinstance(one, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(None, None, "<< merges a map or a list of maps", one.start_mark)
            self.flatten_mapping(one)
            pairs += one.value
        return pairs

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A map with text for keys."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _TAG + "merge":
                name = _key(key, self.construct_object(key))
                if name in seen:
                    raise yaml.constructor.ConstructorError(None, None, f'key "{name}" already set in map', key.start_mark)
                seen.add(name)
        self.flatten_mapping(node)
        found: dict[Hashable, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            found[_key(key, self.construct_object(key))] = self.construct_object(value, deep=deep)
        return found


def plain(text: str) -> Any:
    """The value of an unquoted scalar; a float that is not finite for the infinities and NaN, which JSON does not have."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _NOT_FINITE.match(text):
        return math.nan if text.lower().endswith("nan") else math.inf
    if text[0] not in "+-.0123456789":
        return text
    digits = text.replace("_", "")
    whole = _INT.match(digits) if len(digits) <= _DIGITS_MOST else None
    if whole is not None and _INT_MIN <= (number := _whole(*whole.groups())) <= _INT_MAX:
        return number
    if _FLOAT.match(digits) and math.isfinite(real := float(digits)):
        return real
    return text


def _whole(sign: str, digits: str) -> int:
    prefix = digits[:2].lower()
    bases = {"0x": 16, "0b": 2, "0o": 8}
    base = bases.get(prefix, 8 if digits[0] == "0" and len(digits) > 1 else 10)
    number = int(digits[2:] if prefix in bases else digits, base)
    return -number if sign == "-" else number


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "bool", int: "int", float: "float"}.get(type(value), "str")


def _key(node: yaml.ScalarNode, value: Any) -> str:
    if value is None:
        raise yaml.constructor.ConstructorError(None, None, "a key must be text, not null", node.start_mark)
    if isinstance(value, bool):
        return "true" if value else "false"
    return format(value, "g") if isinstance(value, float) else str(value)


def _scalar(kind: str) -> Any:
    def construct(_: KubeLoader, node: yaml.ScalarNode) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, f"cannot decode it as a !!{kind}", node.start_mark)
        value = plain(node.value)
        found = float(value) if kind == "float" and type(value) is int else value
        if _kind(found) != kind:
            shown = node.value if len(node.value) <= 100 else node.value[:100] + "..."
            raise yaml.constructor.ConstructorError(None, None, f"cannot decode `{shown}` as a !!{kind}", node.start_mark)
        if isinstance(found, float) and not math.isfinite(found):
            raise yaml.constructor.ConstructorError(None, None, f"unsupported value: {node.value}", node.start_mark)
        return found

    return construct


def _binary(_: KubeLoader, node: yaml.ScalarNode) -> str:
    try:
        return base64.b64decode(node.value, validate=True).decode()
    except (ValueError, binascii.Error):
        raise yaml.constructor.ConstructorError(None, None, "!!binary value holds no base64 text", node.start_mark) from None


def _text(loader: KubeLoader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


KubeLoader.yaml_constructors = {
    **{_TAG + kind: _scalar(kind) for kind in ("null", "bool", "int", "float")},
    **{_TAG + kind: _text for kind in ("str", "timestamp", "merge", "value")},
    _TAG + "binary": _binary,
    _TAG + "seq": yaml.SafeLoader.construct_yaml_seq,
    _TAG + "map": yaml.SafeLoader.construct_yaml_map,
    None: yaml.SafeLoader.construct_undefined,
}
