"""What kube-apiserver says about the structure of a custom resource, in its words (kube-openapi, apimachinery field errors).

Recorded from kube-apiserver 1.36 and held by tests/fleet_api/expected_words.json; a version that words things differently
fails the e2e test that sends the same manifests to a real server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

Schema = Mapping[str, Any]
OBJECT_META = frozenset(
    {
        "name", "generateName", "namespace", "selfLink", "uid", "resourceVersion", "generation", "creationTimestamp",
        "deletionTimestamp", "deletionGracePeriodSeconds", "labels", "annotations", "ownerReferences", "finalizers",
        "managedFields",
    }
)  # fmt: skip
INT_OR_STRING = "x-kubernetes-int-or-string"
AMOUNT = "integer,string"
"""As the API server calls what may be written with or without quotes."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_PYTHON_TYPES = {"object": Mapping, "array": list, "string": str, "boolean": bool}
_GO_ESCAPES = {"\a": r"\a", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v", '"': r"\"", "\\": r"\\"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. A blocking one keeps the API server from looking at CEL rules."""

    field: str
    text: str
    blocks: bool = False

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def broken_texts(value: Any, path: str = "") -> list[str]:
    """Paths of texts, and of maps with keys, that hold half a surrogate pair: JSON and YAML can spell it, kubectl sends none."""
    if isinstance(value, str):
        return [] if value.isascii() or _SURROGATE.search(value) is None else [path]
    if isinstance(value, list):
        return [name for index, item in enumerate(value) for name in broken_texts(item, f"{path}[{index}]")]
    found: list[str] = []
    for key, item in value.items() if isinstance(value, Mapping) else ():
        found += broken_texts(str(key), path) or broken_texts(item, f"{path}.{key}" if path else str(key))
    return found


def unknown_fields(value: Any, schema: Schema, path: str = "") -> list[str]:
    """Paths of fields that the schema does not have, as strict decoding reports them."""
    if isinstance(value, list):
        items = schema.get("items", {})
        return [name for index, item in enumerate(value) for name in unknown_fields(item, items, f"{path}[{index}]")]
    if not isinstance(value, Mapping) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    found: list[str] = []
    if "additionalProperties" in schema:
        return sorted(f for k, item in value.items() for f in unknown_fields(item, schema["additionalProperties"], f"{path}.{k}"))
    for key, item in value.items():
        inner = f"{path}.{key}" if path else key
        if inner == "metadata":
            found += [f"metadata.{name}" for name in (item if isinstance(item, Mapping) else ()) if name not in OBJECT_META]
        elif key in schema.get("properties", {}):
            found += unknown_fields(item, schema["properties"][key], inner)
        else:
            found.append(inner)
    return sorted(found)


def known_fields(value: Any, schema: Schema) -> Any:
    """The value without fields that the schema does not have."""
    if isinstance(value, list):
        return [known_fields(item, schema.get("items", {})) for item in value]
    if not isinstance(value, Mapping) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    properties = schema.get("properties", {})
    if (inner := schema.get("additionalProperties")) is not None:
        return {key: known_fields(item, inner) for key, item in value.items()}
    return {key: known_fields(item, properties[key]) for key, item in value.items() if key in properties}


def fitting_part(value: Any, schema: Schema) -> Any:
    """The value without the fields and items of it that break the schema; None when it cannot be mended by leaving some out."""
    if isinstance(value, list) and "items" in schema:
        value = [kept for item in value if (kept := fitting_part(item, schema["items"])) is not None]
    elif isinstance(value, Mapping) and "properties" in schema:
        known = schema["properties"]
        parts = ((key, fitting_part(item, known[key]) if key in known else item) for key, item in value.items())
        value = {key: kept for key, kept in parts if kept is not None}
    return None if any(True for _ in findings(value, schema)) else value


def normalised(value: Any) -> Any:
    """As the object arrives in validation: absent instead of null, and kubectl turns 2048.0 into 2048."""
    if isinstance(value, Mapping):
        return {key: normalised(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [normalised(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def name_findings(name: Any) -> Iterator[Finding]:
    """Problems of metadata.name that every resource has."""
    if not name:
        yield Finding("metadata.name", "Required value: name or generateName is required", blocks=True)
    elif len(name) > 253:
        yield Finding("metadata.name", f"Invalid value: {quoted(name)}: must be no more than 253 characters")
    elif not re.fullmatch(_SUBDOMAIN, name):
        yield Finding(
            "metadata.name",
            f"Invalid value: {quoted(name)}: a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, "
            "'-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation "
            f"is '{_SUBDOMAIN}')",
        )


def findings(value: Any, schema: Schema, path: str = "") -> Iterator[Finding]:
    """Structural problems of `value`, children included."""
    kind = AMOUNT if schema.get(INT_OR_STRING) else schema.get("type")
    fits = _is_a(value, kind)
    if not fits:
        yield Finding(
            path, f'Invalid value: "{_type_name(value)}": {path} in body must be of type {kind}: "{_type_name(value)}"', True
        )
        if kind == "integer" and isinstance(value, float):
            yield Finding("<nil>", f'Invalid value: "": Checked value must be of type integer (default format) in {path}', True)
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(quoted(option) for option in schema["enum"])
        yield Finding(path, f"Unsupported value: {quoted(value)}: supported values: {supported}", True)
    if not fits:
        return
    if isinstance(value, Mapping):
        yield from _object_findings(value, schema, path)
    elif isinstance(value, list):
        yield from _list_findings(value, schema, path)
    elif isinstance(value, str):
        yield from _text_findings(value, schema, path)
    else:
        yield from _number_findings(value, schema, path)


def _object_findings(value: Mapping[str, Any], schema: Schema, path: str) -> Iterator[Finding]:
    prefix = f"{path}." if path else ""
    for key in schema.get("required", ()):
        if key not in value:
            yield Finding(f"{prefix}{key}", "Required value", True)
    for key, inner in schema.get("properties", {}).items():
        if key in value:
            yield from findings(value[key], inner, f"{prefix}{key}")
    if "additionalProperties" in schema:
        if len(value) > schema.get("maxProperties", len(value)):
            yield Finding(path, f"Too many: {len(value)}: must have at most {schema['maxProperties']} items", True)
        for key, item in value.items():
            yield from findings(item, schema["additionalProperties"], f"{prefix}{key}")


def _list_findings(value: list[Any], schema: Schema, path: str) -> Iterator[Finding]:
    if len(value) < schema.get("minItems", 0):
        yield Finding(path, f"Invalid value: {len(value)}: {path} in body should have at least {schema['minItems']} items")
    if len(value) > schema.get("maxItems", len(value)):
        yield Finding(path, f"Too many: {len(value)}: must have at most {schema['maxItems']} items", True)
    for index, item in enumerate(value):
        yield from findings(item, schema["items"], f"{path}[{index}]")
    if schema.get("x-kubernetes-list-type") == "map":
        yield from _key_findings(value, schema["x-kubernetes-list-map-keys"], path)


def _key_findings(value: list[Any], keys: list[str], path: str) -> Iterator[Finding]:
    seen: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        if item is None:
            continue
        if not isinstance(item, Mapping):
            yield Finding(f"{path}[{index}]", f"Invalid value: {quoted(item)}: must be an object for an array of list-type map")
            continue
        identity = {key: item[key] for key in keys if key in item}
        if identity in seen:
            yield Finding(f"{path}[{index}]", f"Duplicate value: {quoted(identity)}")
        seen.append(identity)


def _text_findings(value: str, schema: Schema, path: str) -> Iterator[Finding]:
    if len(value) > schema.get("maxLength", len(value)):
        yield Finding(path, f"Too long: may not be more than {schema['maxLength']} bytes", True)
    elif len(value) < schema.get("minLength", 0):
        yield Finding(path, f"Invalid value: {quoted(value)}: {path} in body should be at least {schema['minLength']} chars long")
    elif "pattern" in schema and not go_match(schema["pattern"], value):
        yield Finding(path, f"Invalid value: {quoted(value)}: {path} in body should match '{schema['pattern']}'")


def _number_findings(value: float, schema: Schema, path: str) -> Iterator[Finding]:
    if "minimum" in schema and value < schema["minimum"]:
        yield Finding(
            path, f"Invalid value: {quoted(value)}: {path} in body should be greater than or equal to {schema['minimum']:g}"
        )
    if "maximum" in schema and value > schema["maximum"]:
        limit = quoted(schema["maximum"])
        yield Finding(path, f"Invalid value: {quoted(value)}: {path} in body should be less than or equal to {limit}")


def go_match(pattern: str, value: str) -> bool:
    """`pattern` as Go's RE2 reads it: $ is the very end, not before a final line break."""
    return re.search(re.sub(r"\$$", r"\\Z", pattern), value, re.ASCII) is not None


def quoted(value: Any) -> str:
    """A value as Go prints it in a field error."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_go_char(char) for char in value) + '"'
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, float) and 1e-4 <= abs(value) < 1e21:
        return format(Decimal(repr(value)), "f")
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _go_char(char: str) -> str:
    if char in _GO_ESCAPES:
        return _GO_ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _is_a(value: Any, kind: Any) -> bool:
    if kind == AMOUNT:
        return isinstance(value, int | str) and not isinstance(value, bool)
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return kind is None or isinstance(value, _PYTHON_TYPES[kind])


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return next((name for name, kind in _PYTHON_TYPES.items() if isinstance(value, kind)), type(value).__name__)
