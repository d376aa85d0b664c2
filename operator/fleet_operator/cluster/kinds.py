"""Kinds beyond those that the operator manages, and the way from an object back to its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fleet_operator.cluster import interface
from fleet_operator.cluster.interface import InvalidError, Kind

NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
SECRET = Kind("v1", "Secret", "secrets")
PVC = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
PV = Kind("v1", "PersistentVolume", "persistentvolumes", namespaced=False)
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
POD_GROUP_KINDS = {
    name: Kind(version, "PodGroup", "podgroups")
    for name, version in (
        ("coscheduling", "scheduling.x-k8s.io/v1alpha1"),
        ("volcano", "scheduling.volcano.sh/v1beta1"),
        ("kubernetes", "scheduling.k8s.io/v1alpha2"),
    )
}
"""By placement.podGroup."""
CRD = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False)
MUTATING = Kind(
    "admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", "mutatingwebhookconfigurations", namespaced=False
)
VALIDATING = Kind(
    "admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", namespaced=False
)
CLUSTER_ROLE = Kind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", namespaced=False)
CLUSTER_ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False)

_KNOWN: Final = {
    (kind.api_version, kind.kind): kind
    for kind in [*vars(interface).values(), *list(globals().values()), *POD_GROUP_KINDS.values()]
    if isinstance(kind, Kind)
}


def kind_of(obj: Mapping[str, Any]) -> Kind:
    """The kind of `obj` by its apiVersion and kind; InvalidError for one that nothing here knows how to address."""
    wanted = (str(obj.get("apiVersion", "")), str(obj.get("kind", "")))
    if wanted not in _KNOWN:
        raise InvalidError(f'no matches for kind "{wanted[1]}" in version "{wanted[0]}"')
    return _KNOWN[wanted]


def key_of(obj: Mapping[str, Any]) -> tuple[str, str]:
    """(namespace, name), with "" as the namespace of cluster-wide objects."""
    metadata = obj["metadata"]
    return metadata.get("namespace") or "", metadata["name"]


def selects(labels: Mapping[str, str] | None, obj: Mapping[str, Any]) -> bool:
    """Whether `obj` carries all of `labels`."""
    if not labels:
        return True
    have = obj["metadata"].get("labels") or {}
    return all(have.get(name) == value for name, value in labels.items())
