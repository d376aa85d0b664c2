"""A worker over several nodes: how its pods find each other, where they go, and who must let them in.

All pods of a worker are made from the one spec that its revision stored; what differs between them is here. The leader has the
worker's name and talks to routers; the others add their place. They know each other by the uid of the leader, so that no pod ever
joins another life of its group. Environment and addresses are those of LeaderWorkerSet, so that its images run unchanged.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.tier import Role, TierSpec
from fleet_operator.cluster.interface import Object
from fleet_operator.cluster.kinds import POD_GROUP_KINDS
from fleet_operator.names import (
    FLEET,
    GANG,
    GROUP_KEY,
    GROUP_OF,
    GROUP_UID,
    LEADER,
    MEMBER,
    ROLE,
    TIER,
    group_service,
    labels,
    owner_reference,
)  # fmt: skip
from fleet_operator.render.network import PORTS
from fleet_operator.render.placement import PREFERRED, REQUIRED, WEIGHT
from fleet_planner.wanted import PodWanted
from fleet_worker.config import GROUP_SIZE_ENV, GROUP_UID_ENV, LEADER_ENV, MEMBER_ENV

QUEUE: Final = "kueue.x-k8s.io/queue-name"
QUEUE_GATE: Final = "kueue.x-k8s.io/admission"
QUEUE_GROUP: Final = "kueue.x-k8s.io/pod-group-name"
QUEUE_COUNT: Final = "kueue.x-k8s.io/pod-group-total-count"
QUEUE_SERVING: Final = "kueue.x-k8s.io/pod-group-serving"
QUEUE_MANAGED: Final = "kueue.x-k8s.io/managed"
QUEUE_PARENT: Final = "kueue.x-k8s.io/pod-suspending-parent"
QUEUE_PARENT_NAME: Final = "inferencefleet.io/inferencefleet"
COSCHEDULING_LABEL: Final = "scheduling.x-k8s.io/pod-group"
VOLCANO_ANNOTATION: Final = "scheduling.k8s.io/group-name"


def gang_of(tier: TierSpec, role: Role) -> Object:
    """What a revision stores of one role; empty for workers of one pod that no queue admits."""
    wanted, nodes = tier.placement, tier.nodes_of(role)
    found: Object = {"nodes": nodes} if nodes > 1 else {}
    if wanted is None:
        return found
    if nodes > 1 and wanted.gang is not None:
        found |= {"topologyKey": wanted.gang.topology_key, "policy": wanted.gang.policy}
    if nodes > 1 and wanted.pod_group is not None:
        found["podGroup"] = wanted.pod_group
    return found if wanted.queue is None else {**found, "queue": wanted.queue}


def environment(nodes: int) -> list[Object]:
    """Who a pod is in its group, in LeaderWorkerSet's names and in ours."""
    if nodes == 1:
        return []
    fields = ((MEMBER_ENV, MEMBER), (LEADER_ENV, LEADER), (GROUP_UID_ENV, GROUP_UID))
    return [
        {"name": GROUP_SIZE_ENV, "value": str(nodes)},
        *({"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{note}']"}}}
          for name, note in fields),
    ]  # fmt: skip


def hostname(wanted: PodWanted, member: int) -> str:
    """Of a pod inside the fleet's Service: 46 characters at most, while a pod's name may have more than the 63 of a host. As with
    LeaderWorkerSet a follower's is its leader's and its place: scripts make the one from the other."""
    leader = f"{wanted.tier}-{wanted.role}-{wanted.revision}-{wanted.ordinal}"
    return leader if member == 0 else f"{leader}-{member}"


def leader_of(wanted: PodWanted) -> str:
    """Name of the worker, which is that of its leader's pod."""
    return f"{wanted.pool}-{wanted.ordinal}"


def group_labels(worker: str, member: int) -> dict[str, str]:
    """By which a pod of a worker over several nodes is found: by its Service, its siblings, and whoever scales."""
    return {GANG: "true", GROUP_OF: worker, MEMBER: str(member)}


def join_gang(pod: Object, wanted: PodWanted, gang: Object, leader_uid: str | None) -> None:
    """Make a rendered pod one of its group; changes `pod`. `leader_uid` None: it leads."""
    meta, spec = pod["metadata"], pod["spec"]
    if queue := gang.get("queue"):
        meta["labels"][QUEUE] = queue
        spec["schedulingGates"] = [{"name": QUEUE_GATE}]  # Kueue adds it, too: without Kueue nothing slips through
    nodes, name = gang.get("nodes", 1), leader_of(wanted)
    if nodes == 1:
        return
    service = group_service(pod["metadata"]["labels"][FLEET])
    meta["labels"] |= group_labels(name, wanted.member)
    meta["annotations"][LEADER] = f"{hostname(wanted, 0)}.{service}.{meta['namespace']}"
    if leader_uid is not None:
        meta["annotations"][GROUP_UID] = leader_uid
    spec |= {"hostname": hostname(wanted, wanted.member), "subdomain": service}
    _together(pod, name, gang)
    _admitted(pod, name, nodes, gang)


def _together(pod: Object, group: str, gang: Object) -> None:
    """Affinity between the pods of one worker; exclusive: and away from all other workers, of whatever namespace."""
    meta, spec, key = pod["metadata"], pod["spec"], gang.get("topologyKey")
    if key is None:
        return
    near = {"labelSelector": {"matchLabels": {GROUP_OF: group}}, "topologyKey": key}
    if gang["policy"] == "preferred":
        _add(spec, "podAffinity", PREFERRED, {"weight": WEIGHT, "podAffinityTerm": near})
        return
    _add(spec, "podAffinity", REQUIRED, near)
    if gang["policy"] == "exclusive":
        # One term for all namespaces: kube-scheduler 1.34 to 1.36 takes a namespaceSelector with NotIn for one that means every
        # namespace (kubernetes#141526), and followers would be kept away from their own leader.
        unique = hashlib.sha256(f"{meta['namespace']}/{group}".encode()).hexdigest()[:16]
        meta["labels"][GROUP_KEY] = unique
        others = [{"key": TIER, "operator": "Exists"}, {"key": GROUP_KEY, "operator": "NotIn", "values": [unique]}]
        term = {"labelSelector": {"matchExpressions": others}, "namespaceSelector": {}, "topologyKey": key}
        _add(spec, "podAntiAffinity", REQUIRED, term)


def _add(spec: Object, kind: str, strength: str, term: Object) -> None:
    terms = spec.setdefault("affinity", {}).setdefault(kind, {})
    terms[strength] = [*terms.get(strength, []), term]


def _admitted(pod: Object, group: str, nodes: int, gang: Object) -> None:
    """Labels by which queues and schedulers know the group."""
    meta, spec = pod["metadata"], pod["spec"]
    if gang.get("queue"):
        # With a parent Kueue puts no finalizer on the pods. It keeps its finalizer on pods of a group until others are in their
        # place: ours come back under the same names, and pods of a deleted fleet never do, so both would wait for ever.
        meta["labels"] |= {QUEUE_GROUP: group, QUEUE_MANAGED: "true"}
        meta["annotations"] |= {QUEUE_COUNT: str(nodes), QUEUE_SERVING: "true", QUEUE_PARENT: QUEUE_PARENT_NAME}
    kind = gang.get("podGroup")
    if kind == "coscheduling":
        meta["labels"][COSCHEDULING_LABEL] = group
    elif kind == "volcano":
        meta["annotations"][VOLCANO_ANNOTATION] = group
        spec.setdefault("schedulerName", "volcano")
    elif kind == "kubernetes":
        spec["schedulingGroup"] = {"podGroupName": group}


def render_pod_group(fleet: InferenceFleet, wanted: PodWanted, gang: Object, owner: Object) -> Object | None:
    """What tells the scheduler that the pods of this worker are placed all or none; None when nobody asked for it. Owned by the
    worker's pool."""
    kind, nodes = gang.get("podGroup"), gang.get("nodes", 1)
    if kind is None:
        return None
    spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": nodes}}} if kind == "kubernetes" else {"minMember": nodes}
    return {
        "apiVersion": POD_GROUP_KINDS[kind].api_version,
        "kind": "PodGroup",
        "metadata": {
            "name": leader_of(wanted),
            "namespace": fleet.metadata.namespace,
            "labels": labels(fleet.metadata.name, **{TIER: wanted.tier, ROLE: wanted.role}),
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": spec,
    }


def pod_group_of(pod: Object) -> tuple[str, str] | None:
    """(placement.podGroup, name) of the PodGroup that we made for a pod. It has its worker's name: one that a podTemplate
    names is somebody else's."""
    meta, spec = pod["metadata"], pod.get("spec") or {}
    own = (meta.get("labels") or {}).get(GROUP_OF)
    named = (
        ("coscheduling", (meta.get("labels") or {}).get(COSCHEDULING_LABEL)),
        ("volcano", (meta.get("annotations") or {}).get(VOLCANO_ANNOTATION)),
        ("kubernetes", (spec.get("schedulingGroup") or {}).get("podGroupName")),
    )
    return next(((kind, own) for kind, name in named if own is not None and name == own), None)


def render_group_service(fleet: InferenceFleet, owner: Object) -> Object:
    """The names of pods that belong to groups, ready or not: they find each other before any of them is ready."""
    name = fleet.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": group_service(name),
            "namespace": fleet.metadata.namespace,
            "labels": labels(name),
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {FLEET: name, GANG: "true"},
            "ports": [{"name": "group", "port": PORTS.group, "targetPort": PORTS.group, "protocol": "TCP"}],
        },
    }
