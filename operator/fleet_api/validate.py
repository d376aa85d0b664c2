"""A manifest judged as the API server would, without one: `validate` gives its words, `fleet up` prints them.

Order as in the server: unknown fields first (and alone), then the name, the structure, and the rules between fields unless the
structure already made them meaningless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleet_api.crd import fleet_schema, pool_schema
from fleet_api.metadata import metadata_findings, wrong_types
from fleet_api.rule import Rule
from fleet_api.rules import FLEET_RULES, POOL_RULES
from fleet_api.structure import Finding, broken_texts, findings, normalised, quoted, unknown_fields

STRICT = "strict decoding error: "
NOT_CHECKED = (
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation"
)
_KINDS = {"InferenceFleet": (fleet_schema, FLEET_RULES), "WorkerPool": (pool_schema, POOL_RULES)}


def validate(manifest: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with a manifest of our group, as kube-apiserver 1.36 words it; empty when it would be accepted.

    Raises KeyError for a kind that is not ours.
    """
    schema_of, rules = _KINDS[manifest.get("kind", "InferenceFleet")]
    schema = schema_of()
    if broken := broken_texts(manifest):
        return [f"{path}: Invalid value: must be text: half a surrogate pair is no character" for path in dict.fromkeys(broken)]
    if unknown := unknown_fields(manifest, schema):
        return [STRICT + ", ".join(f'unknown field "{name}"' for name in unknown)]
    raw = normalised(manifest)
    metadata = raw.get("metadata", {})
    if wrong := wrong_types(metadata):
        return wrong
    found = list(metadata_findings(metadata))
    found += findings({**raw, "metadata": {"name": metadata["name"]} if metadata.get("name") else {}}, schema)
    if any(finding.blocks for finding in found):
        found.append(Finding("<nil>", NOT_CHECKED))
    else:
        found += [finding for rule in rules for finding in _broken(rule, raw)]
    return list(dict.fromkeys(str(finding) for finding in found))


def refusal(manifest: Mapping[str, Any], errors: list[str]) -> str:
    """The API server's one message about `errors` of a manifest."""
    kind, version = manifest.get("kind", "InferenceFleet"), str(manifest.get("apiVersion", "")).rpartition("/")[2]
    if errors[0].startswith(STRICT):
        return f'{kind} in version "{version}" cannot be handled as a {kind}: {errors[0]}'
    metadata = manifest.get("metadata")
    name = (metadata.get("name") if isinstance(metadata, Mapping) else None) or ""
    listed = errors[0] if len(errors) == 1 else f"[{', '.join(errors)}]"
    return f"{kind}.inferencefleet.io {quoted(str(name))} is invalid: {listed}"


def _broken(rule: Rule, raw: Mapping[str, Any]) -> Iterator[Finding]:
    for path, value in _places(raw, rule.path):
        if not rule.holds(value):
            yield Finding((path + rule.field).removeprefix("."), f"Invalid value: {rule.message}")


def _places(value: Any, path: str, at: str = "") -> Iterator[tuple[str, Any]]:
    """(path with indexes, value) of every place that a rule's path names; absent places are none."""
    if not path:
        yield at, value
        return
    step, _, rest = path.partition(".")
    name = step.removesuffix("[]")
    if name not in value:
        return
    inner = f"{at}.{name}" if at else name
    if not step.endswith("[]"):
        yield from _places(value[name], rest, inner)
        return
    for index, item in enumerate(value[name]):
        yield from _places(item, rest, f"{inner}[{index}]")
