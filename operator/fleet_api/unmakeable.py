"""Pods that no API server takes: Kubernetes' own rules (core/validation of 1.36) for what a fleet hands on to its pods and its
own schema cannot say. A fleet with one of these was accepted, and every pod of it refused. e2e/test_unmakeable.py asks a real API
server about each of them: whoever is refused here must be refused there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fleet_api.metadata import annotation_findings, key_findings, value_findings
from fleet_api.quantities import exact_quantity, parse_quantity
from fleet_api.structure import quoted
from fleet_api.unmakeable_affinity import NONE, affinity_findings
from fleet_api.unmakeable_annotations import read_findings

Raw = Mapping[str, Any]
HUGE = "hugepages-2Mi"
HUGE_BYTES = 2 * 1024**2
ROLES = ("prefill", "decode")
_NATIVE, _QUOTA = "kubernetes.io/", "requests."


def unmakeable(spec: Raw, index: int) -> Iterator[str]:
    """Why no pod of a tier can be made, each with the field to blame."""
    tier, at = spec["tiers"][index], f"spec.tiers[{index}]"
    yield from _placement(tier.get("placement") or {}, f"{at}.placement")
    yield from _resource((tier.get("kvTransfer") or {}).get("resource"), f"{at}.kvTransfer.resource")
    for role in ROLES:
        own = tier.get(role) or {}
        device, field = (own["accelerator"], f"{at}.{role}") if own.get("accelerator") else (tier["accelerator"], at)
        yield from _keys(device.get("nodeSelector"), f"{field}.accelerator.nodeSelector")
        yield from _resource(device.get("resource"), f"{field}.accelerator.resource")
        yield from _template(own.get("podTemplate") or {}, f"{at}.{role}.podTemplate")


def unmakeable_everywhere(spec: Raw) -> Iterator[str]:
    """The same of what all tiers share."""
    image, model = (spec.get("engine") or {}).get("image") or "", spec["model"]
    if any(map(str.isspace, image)):  # at its ends no API server takes one, elsewhere no kubelet
        yield f"spec.engine.image: Invalid value: {quoted(image)}: a name of an image has no blanks: no pod can be made or start"
    path = (model.get("cache") or {}).get("path") or ""
    if ".." in path.split("/"):
        yield f"spec.model.cache.path: Invalid value: {quoted(path)}: must not contain ..: {NONE}"
    yield from _secret_key(model.get("tokenSecretRef") or {}, "spec.model.tokenSecretRef")


def _template(template: Raw, field: str) -> Iterator[str]:
    for name in ("labels", "nodeSelector"):
        yield from _keys(template.get(name), f"{field}.{name}")
    yield from map(str, annotation_findings(f"{field}.annotations", template.get("annotations") or {}))
    yield from read_findings(template.get("annotations") or {}, f"{field}.annotations")
    for number, toleration in enumerate(template.get("tolerations") or ()):
        yield from _toleration(toleration, f"{field}.tolerations[{number}]")
    yield from affinity_findings(template.get("affinity") or {}, f"{field}.affinity")
    for number, variable in enumerate(template.get("env") or ()):
        for kind, ref in (variable.get("valueFrom") or {}).items():
            yield from _secret_key(ref or {}, f"{field}.env[{number}].valueFrom.{kind}")
    yield from _huge_pages(template.get("resources") or {}, f"{field}.resources")
    yield from _paths(template, field)


def _keys(labels: Raw | None, field: str) -> Iterator[str]:
    for key in labels or ():
        yield from map(str, key_findings(field, key))


def _placement(placement: Raw, field: str) -> Iterator[str]:
    for at, wish in ((field, placement), (f"{field}.gang", placement.get("gang") or {})):
        if (key := wish.get("topologyKey")) is not None:
            yield from map(str, key_findings(f"{at}.topologyKey", key))


def _resource(name: str | None, field: str) -> Iterator[str]:
    """An extended resource must have a name for its quota, too, unless it is one of Kubernetes' own."""
    if name is None:
        return
    own = _NATIVE in name
    if (not own and name.startswith(_QUOTA)) or any(key_findings(field, name if own else _QUOTA + name)):
        yield f"{field}: Invalid value: {quoted(name)}: not the name of a resource, such as nvidia.com/gpu: {NONE}"


def _secret_key(ref: Raw, field: str) -> Iterator[str]:
    """Also of a ConfigMap."""
    key = ref.get("key") or ""
    if key == "." or key.startswith(".."):
        yield f"{field}.key: Invalid value: {quoted(key)}: must not be . and must not start with ..: {NONE}"


def _toleration(toleration: Raw, field: str) -> Iterator[str]:
    key, value, exists = toleration.get("key"), toleration.get("value") or "", toleration.get("operator") == "Exists"
    if key:
        yield from map(str, key_findings(f"{field}.key", key))
    elif not exists:
        yield f"{field}.operator: Invalid value: must be Exists when there is no key, which means every taint: {NONE}"
    if value and exists:
        yield f"{field}.value: Invalid value: {quoted(value)}: operator Exists takes none: {NONE}"
    elif not exists:
        yield from map(str, value_findings(f"{field}.value", value))
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield f"{field}.effect: Invalid value: must be NoExecute when there are tolerationSeconds: {NONE}"


def _huge_pages(resources: Raw, field: str) -> Iterator[str]:
    """Whole pages, and nobody may use more of them than was set aside."""
    asked, most = ((resources.get(kind) or {}).get(HUGE) for kind in ("requests", "limits"))
    for kind, amount in (("requests", asked), ("limits", most)):
        if amount is not None and parse_quantity(str(amount)) % HUGE_BYTES:
            yield f"{field}.{kind}.{HUGE}: Invalid value: {quoted(amount)}: must be a multiple of 2Mi: {NONE}"
    if asked is not None and most is not None and exact_quantity(str(asked)) != exact_quantity(str(most)):
        yield f"{field}.requests.{HUGE}: Invalid value: {quoted(asked)}: must be limits.{HUGE}, or left out: {NONE}"


def unlimited(spec: Raw, index: int) -> Iterator[str]:
    """Huge pages of a tier without a limit: what no API server takes by itself, but a namespace's LimitRange may set it."""
    for role in ROLES:
        resources = ((spec["tiers"][index].get(role) or {}).get("podTemplate") or {}).get("resources") or {}
        asked, most = ((resources.get(kind) or {}).get(HUGE) for kind in ("requests", "limits"))
        if asked is not None and most is None:
            yield (
                f"spec.tiers[{index}].{role}.podTemplate.resources.requests.{HUGE}: {asked} and no limit: {NONE} unless a "
                f"LimitRange of the namespace sets the same one; say so in limits.{HUGE}"
            )


def _paths(template: Raw, field: str) -> Iterator[str]:
    found = [
        (f"{field}.volumes[{number}].hostPath.path", (volume.get("hostPath") or {}).get("path"))
        for number, volume in enumerate(template.get("volumes") or ())
    ]
    found += [
        (f"{field}.volumeMounts[{number}].subPath", mount.get("subPath"))
        for number, mount in enumerate(template.get("volumeMounts") or ())
    ]
    for at, path in found:
        if ".." in (path or "").split("/"):
            yield f"{at}: Invalid value: {quoted(path)}: must not contain ..: {NONE}"
