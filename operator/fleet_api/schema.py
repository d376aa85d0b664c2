"""Pydantic models to structural OpenAPI schemas as a CustomResourceDefinition wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet_api.rule import Rule
from fleet_api.structure import INT_OR_STRING
from fleet_api.v1alpha1.base import ApiModel

Schema = dict[str, Any]
_KEPT = (
    "description",
    "type",
    "enum",
    "format",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "maxProperties",
    INT_OR_STRING,
)


def structural(model: type[ApiModel], *, output: bool = False) -> Schema:
    """The structural schema of `model`; with `output`, of what we write (computed fields included, nothing required)."""
    raw = model.model_json_schema(by_alias=True, mode="serialization" if output else "validation")
    return _convert(raw, raw.get("$defs", {}), output)


def _convert(node: Mapping[str, Any], definitions: Mapping[str, Any], output: bool) -> Schema:
    node = _resolve(node, definitions)
    result: Schema = {key: node[key] for key in _KEPT if key in node}
    if node.get(INT_OR_STRING):
        del result["type"]  # it says both
    if "const" in node:
        result["enum"] = [node["const"]]
    if node.get("additionalProperties") is True:
        result["x-kubernetes-preserve-unknown-fields"] = True
    elif node.get("additionalProperties"):
        result["additionalProperties"] = _convert(node["additionalProperties"], definitions, output)
    if "items" in node:
        result["items"] = _convert(node["items"], definitions, output)
    if "properties" in node:
        if node.get("required") and not output:
            result["required"] = sorted(node["required"])
        result["properties"] = {key: _convert(value, definitions, output) for key, value in node["properties"].items()}
    return result


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace a reference or an optional by what it means; the description next to it wins."""
    while "$ref" in node or "anyOf" in node:
        if "$ref" in node:
            target = definitions[str(node["$ref"]).rsplit("/", 1)[-1]]
        else:
            (target,) = [option for option in node["anyOf"] if option.get("type") != "null"]
        node = {**target, **{key: value for key, value in node.items() if key not in ("$ref", "anyOf")}}
    return node


def list_map(schema: Schema, path: str, key: str) -> None:
    """Make the list at `path` a map keyed by `key`, so that server-side apply merges entries and duplicates are refused."""
    found = at(schema, path)
    found["x-kubernetes-list-type"] = "map"
    found["x-kubernetes-list-map-keys"] = [key]
    required = set(found["items"].get("required", ())) | {key}
    found["items"] = {**found["items"], "required": sorted(required)}


def atomic(schema: Schema, path: str) -> None:
    """What stands at `path` is written as a whole, by one writer: the API server keeps no note of who owns which leaf of it, and
    neither reads nor writes one at every write of the object."""
    found = at(schema, path)
    if found["type"] == "array":
        found["x-kubernetes-list-type"] = "atomic"
    else:
        found["x-kubernetes-map-type"] = "atomic"


def at(schema: Schema, path: str) -> Schema:
    """The sub-schema at a path such as "spec.tiers[].ratio"."""
    for step in filter(None, path.split(".")):
        schema = schema["properties"][step.removesuffix("[]")]
        if step.endswith("[]"):
            schema = schema["items"]
    return schema


def add_rules(schema: Schema, rules: tuple[Rule, ...]) -> None:
    """Attach CEL rules where they apply."""
    for rule in rules:
        entry = {"rule": rule.cel, "message": rule.message}
        if rule.field:
            entry["fieldPath"] = rule.field
        at(schema, rule.path).setdefault("x-kubernetes-validations", []).append(entry)
