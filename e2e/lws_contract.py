"""What "LWS-style" means: groups of LeaderWorkerSet beside ours, row by row. A row says what LeaderWorkerSet does, whether we do
the same, and why not where we do not; `e2e/test_lws.py` reads both sides of every row from a real control plane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from e2e.kube.lws import MARK
from fleet_operator.runtime.paths import expand
from fleet_operator.runtime.volumes import field_of

Object = dict[str, Any]
Group = list[Object]
"""The pods of one group in order of their places, the leader first."""
NAMES: Final = ("LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX")
RACK: Final = "rack"
USERS: Final = {"name": "MINE", "value": "$(LWS_LEADER_ADDRESS):6379"}
"""A variable that both templates have."""
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True)
class Keys:
    """By which labels a side knows its groups, and what carries their names."""

    group: str
    place: str
    service: str
    kind: str
    """Of what the user wrote."""


THEIRS: Final = Keys(f"{MARK}group-key", f"{MARK}worker-index", "theirs", "LeaderWorkerSet")
OURS: Final = Keys("inferencefleet.io/group", "inferencefleet.io/member", "loop-workers", "InferenceFleet")


def groups_of(pods: list[Object], keys: Keys) -> dict[str, Group]:
    """By the group's key; pods of nobody's groups are left out."""
    found: dict[str, Group] = {}
    for pod in sorted(pods, key=lambda pod: labels_of(pod).get(keys.place, "")):
        if keys.group in labels_of(pod):
            found.setdefault(labels_of(pod)[keys.group], []).append(pod)
    return found


def labels_of(pod: Object) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def name_of(pod: Object) -> str:
    return str(pod["metadata"]["name"])


@dataclass(frozen=True)
class Side:
    """One controller's groups in a namespace that both use."""

    keys: Keys
    everyone: list[Object]
    """All pods of the namespace, the other side's among them."""
    service: Object
    slices: list[Object]
    racks: Mapping[str, str]
    """Node → rack."""
    born: list[str]
    """Names of pods in the order in which they were made."""

    @property
    def groups(self) -> list[Group]:
        return [group for _, group in sorted(groups_of(self.everyone, self.keys).items())]

    @property
    def pods(self) -> list[Object]:
        return [pod for group in self.groups for pod in group]


SAME: Final = object()


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    read: Callable[[Side], Any]
    lws: Any
    ours: Any = SAME
    why: str = ""
    """Where ours differs: the reason."""


def each(side: Side, read: Callable[[Object, Group], Any]) -> Any:
    """What is read from the pods of a group, which must be equal in all groups."""
    found = [[read(pod, group) for pod in group] for group in side.groups]
    return found[0] if all(one == found[0] for one in found) else found


# -- environment ----------------------------------------------------------------------------------------------------------
def environment(pod: Object, container: Object) -> dict[str, str]:
    """As a kubelet gives it, of what needs no Secret and no ConfigMap."""
    given: dict[str, str] = {}
    for item in container.get("env") or []:
        source = item.get("valueFrom") or {}
        field = source.get("fieldRef")
        value = field_of(pod, field["fieldPath"]) if field else item.get("value", "")
        given[item["name"]] = expand(value, given)
    return given


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])]


def variable(name: str) -> Callable[[Side], Any]:
    return lambda side: each(side, lambda pod, _: environment(pod, pod["spec"]["containers"][0])[name])


def variables(side: Side) -> list[str]:
    """LWS_ variables that every container of every pod has, those included that run before the others."""
    found = {tuple(sorted(n for n in environment(pod, c) if n.startswith("LWS_"))) for pod in side.pods for c in containers(pod)}
    return list(found.pop()) if len(found) == 1 else sorted(map(str, found))


def abstract(text: str, pod: Object, group: Group) -> str:
    """An address with its parts named instead of written."""
    spec, namespace = group[0]["spec"], pod["metadata"]["namespace"]
    return text.replace(f"{spec['hostname']}.{spec['subdomain']}.{namespace}", "HOST.SUBDOMAIN.NAMESPACE")


def address(name: str) -> Callable[[Side], Any]:
    def read(pod: Object, group: Group) -> str:
        return abstract(environment(pod, pod["spec"]["containers"][0])[name], pod, group)

    return lambda side: each(side, read)


def literal(side: Side) -> bool:
    """Whether the variables' values stand in the pod's spec."""
    items = [item for pod in side.pods for item in pod["spec"]["containers"][0]["env"] if item["name"] in NAMES]
    return all("value" in item for item in items)


# -- names ----------------------------------------------------------------------------------------------------------------
def pod_names(side: Side) -> Any:
    return each(side, lambda pod, group: name_of(pod).replace(name_of(group[0]), "NAME"))


def host_names(side: Side) -> Any:
    return each(side, lambda pod, group: pod["spec"]["hostname"].replace(group[0]["spec"]["hostname"], "HOST"))


def named_like_pods(side: Side) -> bool:
    return all(pod["spec"]["hostname"] == name_of(pod) for pod in side.pods)


def in_service(side: Side) -> bool:
    """Whether the pods' subdomain is the Service."""
    return {pod["spec"]["subdomain"] for pod in side.pods} == {name_of(side.service)}


def service_form(side: Side) -> Any:
    spec = side.service["spec"]
    return {key: spec.get(key) for key in ("type", "clusterIP", "publishNotReadyAddresses")}


def service_ports(side: Side) -> list[str]:
    return [port["name"] for port in side.service["spec"].get("ports") or []]


def service_owner(side: Side) -> bool:
    """Whether the Service goes with what the user wrote."""
    owners = side.service["metadata"]["ownerReferences"]
    return [(owner["kind"], owner["controller"]) for owner in owners] == [(side.keys.kind, True)]


def resolvable(side: Side) -> bool:
    """EndpointSlices are what a DNS server answers from: the side's pods by their host names, and nobody else."""
    found = {
        (entry.get("hostname"), *entry["addresses"]) for one in side.slices for entry in one.get("endpoints") or []
    }  # fmt: skip
    return found == {(pod["spec"]["hostname"], pod["status"].get("podIP")) for pod in side.pods}


# -- who is whose ---------------------------------------------------------------------------------------------------------
def marks(side: Side) -> list[str]:
    """Labels and annotations in LeaderWorkerSet's name, of any pod."""
    notes = [{**labels_of(pod), **(pod["metadata"].get("annotations") or {})} for pod in side.pods]
    return sorted({key.removeprefix(MARK) for note in notes for key in note if key.startswith(MARK)})


def places(side: Side) -> Any:
    return each(side, lambda pod, _: labels_of(pod)[side.keys.place])


def owners(side: Side) -> Any:
    return each(side, lambda pod, _: pod["metadata"]["ownerReferences"][0]["kind"])


def leader_first(side: Side) -> bool:
    """Whether each leader was made before those who follow it."""
    return all(side.born.index(name_of(group[0])) == min(side.born.index(name_of(pod)) for pod in group) for group in side.groups)


# -- exclusive topology ---------------------------------------------------------------------------------------------------
def terms(pod: Object, kind: str) -> list[Object]:
    found: list[Object] = ((pod["spec"].get("affinity") or {}).get(kind) or {}).get(REQUIRED) or []
    return found


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """A label selector, as far as the two sides write one."""
    holds: dict[str, Callable[[str | None, list[str]], bool]] = {
        "In": lambda value, values: value in values,
        "NotIn": lambda value, values: value not in values,
        "Exists": lambda value, values: value is not None,
    }
    exact = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    expressions = selector.get("matchExpressions") or []
    return exact and all(holds[e["operator"]](labels.get(e["key"]), e.get("values") or []) for e in expressions)


def selected(side: Side, pod: Object, kind: str) -> set[str]:
    """Pods of this namespace that the pod's terms mean."""
    here = [term for term in terms(pod, kind) if not term.get("namespaceSelector")]
    return {name_of(one) for one in side.everyone if any(matches(term["labelSelector"], labels_of(one)) for term in here)}


def near(side: Side) -> bool:
    """A leader wants exactly its own group near."""
    return all(selected(side, group[0], "podAffinity") == set(map(name_of, group)) for group in side.groups)


def away(side: Side) -> bool:
    """A leader wants all other groups of its own controller elsewhere, and nobody else."""
    every = set(map(name_of, side.pods))
    return all(selected(side, group[0], "podAntiAffinity") == every - set(map(name_of, group)) for group in side.groups)


def topology(side: Side) -> set[str]:
    both = ("podAffinity", "podAntiAffinity")
    return {term["topologyKey"] for pod in side.pods for kind in both for term in terms(pod, kind)}


def bound_by(side: Side) -> Any:
    def read(pod: Object, _: Group) -> str:
        return (
            "node selector"
            if RACK in (pod["spec"].get("nodeSelector") or {})
            else "affinity"
            if terms(pod, "podAffinity")
            else ""
        )

    return each(side, read)


def all_namespaces(side: Side) -> bool:
    return any("namespaceSelector" in term for pod in side.pods for term in terms(pod, "podAntiAffinity"))


def placed(side: Side) -> bool:
    """Every group has a rack of its own."""
    racks = [{side.racks[pod["spec"]["nodeName"]] for pod in group} for group in side.groups]
    return all(len(one) == 1 for one in racks) and len(set[str]().union(*racks)) == len(side.groups)


ROWS: Final = (
    Row("names of the pods", pod_names, ["NAME", "NAME-1", "NAME-2"]),
    Row("host names", host_names, ["HOST", "HOST-1", "HOST-2"]),
    Row("the LWS_ variables, in all containers", variables, list(NAMES)),
    Row("LWS_GROUP_SIZE", variable("LWS_GROUP_SIZE"), ["3", "3", "3"]),
    Row("LWS_WORKER_INDEX", variable("LWS_WORKER_INDEX"), ["0", "1", "2"]),
    Row("LWS_LEADER_ADDRESS", address("LWS_LEADER_ADDRESS"), ["HOST.SUBDOMAIN.NAMESPACE"] * 3),
    Row("a user's variable that refers to it", address("MINE"), ["HOST.SUBDOMAIN.NAMESPACE:6379"] * 3),
    Row("values of the variables stand in the spec", literal, True, False,
        why="they come from annotations: one stored spec per revision makes all of its pods"),
    Row("a pod's host name is its own name", named_like_pods, True, False,
        why="a pod's name may have 253 characters, a host's 63"),
    Row("the pods' subdomain is the Service", in_service, True),
    Row("the Service: headless, and pods that are not ready are found", service_form,
        {"type": "ClusterIP", "clusterIP": "None", "publishNotReadyAddresses": True}),
    Row("the Service's ports", service_ports, [], ["group"],
        why="DNS needs none; ours names the one where agents meet, so that meshes and policies can be written for it"),
    Row("the Service belongs to what the user wrote", service_owner, True),
    Row("EndpointSlices have each pod's address under its host name, and no other pod", resolvable, True),
    Row("a label says the place in the group", places, ["0", "1", "2"]),
    Row("keys in LeaderWorkerSet's name", marks,
        ["exclusive-topology", "group-index", "group-key", "leader-name", "name", "size", "template-revision-hash",
         "worker-index"], [], why="its webhooks and its controller take every pod that has the key `name` for theirs"),
    Row("owners of the pods", owners, ["StatefulSet"] * 3, ["WorkerPool"] * 3,
        why="StatefulSets end a leader at once and wait for no drain; the pool is what users scale"),
    Row("the leader is made first", leader_first, True),
    Row("exclusive: the topology key", topology, {RACK}),
    Row("exclusive: a leader wants its group near", near, True),
    Row("exclusive: and the other groups of its controller elsewhere, nobody else", away, True),
    Row("exclusive: what binds leader and followers", bound_by, ["affinity", "node selector", "node selector"], ["affinity"] * 3,
        why="it makes followers once the leader has a node; ours are made at once, so that a queue sees whole workers"),
    Row("exclusive: holds in all namespaces", all_namespaces, False, True,
        why="what an exclusive domain is for, such as its fabric, knows no namespaces"),
    Row("exclusive: each group lands in a domain of its own", placed, True),
)  # fmt: skip
