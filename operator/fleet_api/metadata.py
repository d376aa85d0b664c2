"""What kube-apiserver says about ObjectMeta (apimachinery's ValidateObjectMeta). Pure.

A field of a wrong type cannot even be decoded there; its words then are those of Go's JSON decoder and help nobody, so that
these are ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from fleet_api.structure import OBJECT_META, Finding, name_findings, quoted

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_LABEL_VALUE = rf"({_QUALIFIED})?"
_LABEL_MOST, _SUBDOMAIN_MOST = 63, 253
_ANNOTATIONS_MOST_BYTES = 256 * 1024
_MAPS = frozenset({"labels", "annotations"})
_LISTS = frozenset({"ownerReferences", "finalizers", "managedFields"})
_NUMBERS = frozenset({"generation", "deletionGracePeriodSeconds"})
_TIMES = frozenset({"creationTimestamp", "deletionTimestamp"})


def wrong_types(metadata: Any) -> list[str]:
    """Fields of metadata that have another type than ObjectMeta gives them; the rest is meaningless while there are any."""
    if not isinstance(metadata, Mapping):
        return ["metadata.name: Invalid value: metadata must be an object with a name that is text"]
    found = [f"metadata.{key}: Invalid value: {wrong}" for key in sorted(metadata) if (wrong := _wrong(key, metadata[key]))]
    for key in sorted(_MAPS & metadata.keys()):
        if isinstance(metadata[key], Mapping):
            found += [
                f"metadata.{key}[{name}]: Invalid value: {quoted(value)}: must be text: write it in quotes"
                for name, value in metadata[key].items()
                if not isinstance(value, str)
            ]
    return found


def _wrong(key: str, value: Any) -> str:
    if value is None or key not in OBJECT_META:
        return ""
    if key in _MAPS:
        return "" if isinstance(value, Mapping) else "must be an object whose values are text"
    if key in _LISTS:
        kind = str if key == "finalizers" else Mapping
        fits = isinstance(value, list) and all(isinstance(item, kind) for item in value)
        return "" if fits else f"must be a list of {'text' if kind is str else 'objects'}"
    if key in _NUMBERS:
        return "" if isinstance(value, int) and not isinstance(value, bool) else "must be a whole number"
    if not isinstance(value, str):
        return f"{quoted(value)}: must be text"
    return "must be a time such as 2026-01-31T12:00:00Z" if key in _TIMES and not is_time(value) else ""


def is_time(value: object) -> bool:
    """RFC 3339, with its zone."""
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def metadata_findings(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    """Problems of metadata that every resource may have; all types are right."""
    yield from name_findings(metadata.get("name"))
    namespace = metadata.get("namespace") or ""
    if len(namespace) > _LABEL_MOST:
        yield Finding("metadata.namespace", f"Invalid value: {quoted(namespace)}: must be no more than {_LABEL_MOST} characters")
    elif namespace and not re.fullmatch(_LABEL, namespace):
        yield Finding(
            "metadata.namespace",
            f"Invalid value: {quoted(namespace)}: a lowercase RFC 1123 label must consist of lower case alphanumeric characters "
            "or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for "
            f"validation is '{_LABEL}')",
        )
    for name, value in (metadata.get("labels") or {}).items():
        yield from key_findings("metadata.labels", name)
        yield from value_findings("metadata.labels", value)
    yield from annotation_findings("metadata.annotations", metadata.get("annotations") or {})


def annotation_findings(field: str, annotations: Mapping[str, str]) -> Iterator[Finding]:
    """Problems of annotations: of keys in lower case, letter by letter as Go does it, and of their size."""
    for name in annotations:
        yield from key_findings(field, "".join(letter.lower()[0] for letter in name))
    if sum(len(name.encode()) + len(value.encode()) for name, value in annotations.items()) > _ANNOTATIONS_MOST_BYTES:
        yield Finding(field, f"Too long: may not be more than {_ANNOTATIONS_MOST_BYTES} bytes")


def value_findings(field: str, value: str) -> Iterator[Finding]:
    """Problems of a label's value, and of what one is compared with."""
    if len(value) > _LABEL_MOST or not re.fullmatch(_LABEL_VALUE, value):
        yield Finding(
            field,
            f"Invalid value: {quoted(value)}: a valid label must be an empty string or at most {_LABEL_MOST} alphanumeric "
            "characters, '-', '_' or '.', and must start and end with an alphanumeric character",
        )


def key_findings(field: str, key: str) -> Iterator[Finding]:
    """Problems of the key of a label, or, in lower case, of an annotation."""
    prefix, slash, name = key.rpartition("/")
    good_prefix = not slash or (len(prefix) <= _SUBDOMAIN_MOST and re.fullmatch(_SUBDOMAIN, prefix))
    if not good_prefix or len(name) > _LABEL_MOST or not re.fullmatch(_QUALIFIED, name):
        yield Finding(
            field,
            f"Invalid value: {quoted(key)}: a qualified name is at most {_LABEL_MOST} alphanumeric characters, '-', '_' or '.', "
            "with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')",
        )
