"""podTemplate → the pod. Maps gain keys, lists follow the operator's own entries; what the operator owns was refused before
(fleet_api/rules_pod.py), so that nothing here can be overridden."""

from __future__ import annotations

from typing import Any, Final

from fleet_api.v1alpha1.base import ApiModel
from fleet_api.v1alpha1.podtemplate import PodTemplateSpec
from fleet_operator.cluster.interface import Object

ROOT: Final = 0
USER: Final = 65532
NAMES: Final = {
    "priority_class_name": "priorityClassName",
    "runtime_class_name": "runtimeClassName",
    "scheduler_name": "schedulerName",
    "service_account_name": "serviceAccountName",
}


def rendered(model: ApiModel) -> Any:
    """What the user wrote, without defaults."""
    return model.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def extend_pod(spec: Object, template: PodTemplateSpec) -> None:
    """Add the template to a pod spec whose only container is the worker; changes `spec`."""
    (container,) = spec["containers"]
    container["env"] += [rendered(variable) for variable in template.env]
    extend_volumes(spec, template, claims=True)
    if template.tolerations:
        spec["tolerations"] = [*spec.get("tolerations", []), *tolerations(template)]
    if template.image_pull_secrets:
        spec["imagePullSecrets"] = [rendered(secret) for secret in template.image_pull_secrets]
    for field, name in NAMES.items():
        if (value := getattr(template, field)) is not None:
            spec[name] = value
    for kind, amounts in (("requests", template.resources.requests), ("limits", template.resources.limits)):
        if more := rendered(amounts):
            container["resources"][kind] = {**container["resources"].get(kind, {}), **more}


def extend_volumes(spec: Object, template: PodTemplateSpec, *, claims: bool) -> None:
    """Add the template's volumes and where they are mounted; without `claims` only what is the same on every node."""
    (container,) = spec["containers"]
    added = [volume for volume in template.volumes if claims or volume.persistent_volume_claim is None]
    names = {volume.name for volume in added}
    spec["volumes"] += [_volume(rendered(volume), volume.empty_dir is not None) for volume in added]
    container["volumeMounts"] += [rendered(mount) for mount in template.volume_mounts if mount.name in names]


def _volume(volume: Object, is_empty: bool) -> Object:
    return {**volume, "emptyDir": volume.get("emptyDir", {})} if is_empty else volume


def tolerations(template: PodTemplateSpec) -> list[Object]:
    """Tolerations of a template, as the API server writes them."""
    return [_toleration(rendered(toleration)) for toleration in template.tolerations]


def _toleration(toleration: Object) -> Object:
    return {"operator": "Equal", **toleration}


def security(template: PodTemplateSpec | None, shared_group: bool) -> Object:
    """The pod's security context. Without a group of its own a container runs in group 0; `shared_group` makes the files of a
    claim its own."""
    user = USER if template is None or template.run_as_user is None else template.run_as_user
    found: Object = {
        "runAsNonRoot": user != ROOT, "runAsUser": user, "runAsGroup": user, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    return {**found, "fsGroup": user} if shared_group else found
