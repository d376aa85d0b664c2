"""The one interface through which anything here reads or writes cluster objects.

Objects are plain Kubernetes dicts (apiVersion, kind, metadata, spec, status); parsing happens in `observe.py`.
Both implementations obey the same contract (tests/fleet_operator/cluster/contract.py): server-side apply with one field
manager and force, uid preconditions on delete, graceful pod deletion, ownerReference garbage collection, status as a
subresource, generation bumped by spec changes only, resourceVersion on every change, no write when nothing changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Object = dict[str, Any]
FIELD_MANAGER = "inferencefleet-operator"


@dataclass(frozen=True, slots=True)
class Kind:
    """A resource type: how to address it."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True


FLEET = Kind("inferencefleet.io/v1alpha1", "InferenceFleet", "inferencefleets")
POOL = Kind("inferencefleet.io/v1alpha1", "WorkerPool", "workerpools")
POD = Kind("v1", "Pod", "pods")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
EVENT = Kind("events.k8s.io/v1", "Event", "events")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
CONTROLLER_REVISION = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
PDB = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
CLAIM_TEMPLATE = Kind("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")


class ClusterError(Exception):
    """Base of cluster failures; `reason` is the API's CamelCase reason, `retry` says whether trying again may help."""

    reason = "Unknown"
    retry = True


CRDS = "our CRDs come with the chart, or by kubectl apply --server-side -f crds"


class NotFoundError(ClusterError):
    """404."""

    reason = "NotFound"
    retry = False


class ConflictError(ClusterError):
    """409: a uid or resourceVersion precondition failed, or the object exists."""

    reason = "Conflict"


class InvalidError(ClusterError):
    """400/422: the object was refused; the message is the API server's, with the field's path."""

    reason = "Invalid"
    retry = False


class ForbiddenError(ClusterError):
    """401/403: RBAC, quota."""

    reason = "Forbidden"


class UnavailableError(ClusterError):
    """429/5xx/connection: the API server cannot answer now; `retry_after_s` when it said so."""

    reason = "Unavailable"
    retry_after_s: float | None = None


class UnauthorizedError(UnavailableError):
    """401 a moment ago: an API server that has just started, or its token webhook, does not know yet who we are."""

    reason = "Unauthorized"


class CredentialsRefusedError(ForbiddenError):
    """401 for so long that nothing but other credentials will help."""

    reason = "Unauthorized"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change; SYNCED once after the initial objects were delivered as ADDED."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "SYNCED"]
    object: Object


@dataclass(frozen=True, slots=True)
class Listed:
    """A complete list, reduced to versions."""

    versions: Mapping[tuple[str, str], str]
    """(namespace, name) → resourceVersion."""
    version: str
    """Of the list: what is newer is not in it."""


class Cluster(Protocol):
    """Read and write cluster objects."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """The object; NotFoundError."""
        ...

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object, None when there is none. Asks with the right to list, which whoever watches has."""
        ...

    async def list(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """All objects with these labels, in name order; `namespace=None` means every namespace."""
        ...

    async def versions(self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Listed:
        """Like `list`, without the contents."""
        ...

    def watch(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Current objects as ADDED, one SYNCED, then changes for ever; reconnects and re-lists by itself (410, cuts)."""
        ...

    async def apply(self, obj: Object, *, created: bool = False) -> Object:
        """Server-side apply under FIELD_MANAGER, force; creates when absent. Equal content writes nothing new. What was applied
        before and is not in `obj` goes; with `created`, so does what this manager made by `create`: for an object that may have
        been made so and that `obj` names the version of."""
        ...

    async def patch(self, kind: Kind, namespace: str | None, name: str, patch: Object) -> Object:
        """Merge-patch everything but the status; a uid or version in the patch that the object has not (any more) is refused."""
        ...

    async def create(self, obj: Object) -> Object:
        """Make an object that nobody else applies fields to; ConflictError when there is one of this name."""
        ...

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> None:
        """Delete; NotFoundError when absent, ConflictError when `uid` differs. Pods leave after their grace period."""
        ...

    async def patch_status(
        self, kind: Kind, namespace: str | None, name: str, status: Object, *, version: str | None = None
    ) -> Object:
        """Merge-patch the status subresource; ConflictError when the object has another version than this one."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
