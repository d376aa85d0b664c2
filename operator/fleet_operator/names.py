"""Labels, annotations and object names: one place, so that selectors and renderers cannot disagree."""

from __future__ import annotations

from typing import Any, Final

GROUP: Final = "inferencefleet.io"
FLEET: Final = f"{GROUP}/fleet"
NAMESPACE: Final = f"{GROUP}/namespace"
"""Label of a worker pod: fleets of two namespaces may have one name, and an affinity term cannot tell them apart otherwise."""
TIER: Final = f"{GROUP}/tier"
ROLE: Final = f"{GROUP}/role"
REVISION: Final = f"{GROUP}/revision"
METRICS: Final = f"{GROUP}/metrics"
"""Label of a router's pod whose metrics are at the port of this name alone; the chart's PodMonitor looks for it."""
COMPAT: Final = f"{GROUP}/compat"
MEMBER: Final = f"{GROUP}/member"
GANG: Final = f"{GROUP}/gang"
"""Label of every pod of a worker over several nodes: its Service selects it."""
GROUP_OF: Final = f"{GROUP}/group"
"""Label: the worker that a pod belongs to; the name of its leader's pod."""
GROUP_KEY: Final = f"{GROUP}/group-key"
"""Label of an exclusive worker's pods: namespace and name as one word. Workers of two namespaces may have one name."""
GROUP_UID: Final = f"{GROUP}/group-uid"
"""Annotation: uid of the leader that a pod was made to follow; leaders have none."""
ASKED_AGAIN: Final = f"{GROUP}/asked-again"
"""On a PodGroup: when its worker, that still has no nodes, was brought before the scheduler once more."""
LEADER: Final = f"{GROUP}/leader"
"""Annotation: host name of the leader."""
POOL: Final = f"{GROUP}/pool"
PLANNED: Final = f"{GROUP}/planned"
SIZE: Final = f"{GROUP}/size"
WISH: Final = f"{GROUP}/wish"
WRITTEN: Final = f"{GROUP}/written"
"""On a WorkerPool: planned, size and wish once more, as the operator wrote them (see `pool_sizes`)."""
ORDINAL: Final = f"{GROUP}/ordinal"
FLIP: Final = f"{GROUP}/flip"
"""On a worker pod: the role that it is told to take, while it changes."""
FLIP_SINCE: Final = f"{GROUP}/flip-since"
FLIPPED_AT: Final = f"{GROUP}/flipped-at"
"""When a worker pod last changed its role; its name still says the first one."""
RIGHTED_AT: Final = f"{GROUP}/righted-at"
"""When a worker pod that said another role than its label had its own again."""
ADAPTERS: Final = f"{GROUP}/adapters"
"""On a worker pod: the adapters that it should have; a container that starts again reads them there."""
SEED_PEERS: Final = f"{GROUP}/seed-peers"
"""On a worker pod: side channels of workers that were ready when it was made, and that it may take hot prefixes from."""
FETCH: Final = f"{GROUP}/fetch"
"""On a pod that fetches the model ahead: which model."""
FETCH_NODE: Final = f"{GROUP}/fetch-node"
FETCH_ROLE: Final = "fetch"
FETCH_CONTAINER: Final = "fetch"
OWN_CONTAINERS: Final = frozenset({"worker", "router", FETCH_CONTAINER})
"""Names of the containers that are ours: meshes and other injectors put theirs before and beside them."""
APPLIED: Final = f"{GROUP}/applied"
"""Hash of what the operator applied last: a difference means that the wish changed."""
CHANGED_BY: Final = f"{GROUP}/changed-by"
"""Who changed the spec last; written by the webhook."""
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "inferencefleet"
ROUTER_ROLE: Final = "router"


def router_name(fleet: str) -> str:
    """Deployment, Service, ConfigMap and the rest of a fleet's router."""
    return f"{fleet}-router"


def policy_name(fleet: str) -> str:
    """The NetworkPolicy of a fleet's workers."""
    return f"{fleet}-workers"


def group_service(fleet: str) -> str:
    """The headless Service of a fleet's workers over several nodes."""
    return f"{fleet}-workers"


def pool_name(fleet: str, tier: str, role: str, revision: str) -> str:
    """WorkerPool of one revision of one role, and its ResourceClaimTemplate."""
    return f"{fleet}-{tier}-{role}-{revision}"


def labels(fleet: str, **more: str) -> dict[str, str]:
    """Labels of everything that belongs to a fleet."""
    return {MANAGED_BY: MANAGER, FLEET: fleet, **more}


def owner_reference(owner: dict[str, Any]) -> dict[str, Any]:
    """Controller reference: deletion cascades."""
    meta = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"],
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
