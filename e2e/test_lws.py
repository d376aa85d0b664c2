"""Workers over several nodes beside a real LeaderWorkerSet: of one form where `lws_contract.py` says so, no hands on each other.

Control plane, scheduler, LeaderWorkerSet's controller with its webhooks, and our operator are real; nodes are paper ones
(`e2e/faultproxy/kubelet.py`), so no engine runs here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.faultproxy.kubelet import CAPACITY, NAME
from e2e.fleet import Fleet, manifest
from e2e.kube.controlplane import ROOT, ControlPlane
from e2e.kube.lws import EXCLUSIVE, MARK, leader_worker_set, lws
from e2e.kube.service import Service
from e2e.lws_contract import OURS, RACK, ROWS, SAME, THEIRS, USERS, Group, Keys, Row, Side, groups_of, labels_of, name_of
from fleet_operator.cluster.interface import FIELD_MANAGER

pytestmark = pytest.mark.timeout(590)
SYSTEM = "inferencefleet-system"
RACKS = 6
SIZE = 3
ALONE = {"topologyKey": RACK, "policy": "exclusive"}
NOBODY = "239.1"
"""A multicast network: EndpointSlices take its addresses, and a connect fails at once on every machine."""
HOLD = "example.com/hold"
"""A finalizer: paper pods are gone so fast that no controller would see them go."""


@dataclass(frozen=True)
class World:
    """The control plane with both controllers."""

    plane: ControlPlane
    lws: Service
    operator: Service

    def namespace(self) -> Fleet:
        """A new one."""
        name = f"lws-{uuid.uuid4().hex[:8]}"
        self.plane.kubectl("create", "namespace", name)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        self.plane.wait("its service account", lambda: self.plane.exists(account))
        return Fleet(self.plane, name, self.operator)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Nodes in racks of their own; the operator under the rights of charts/rbac/operator.yaml, none of them LeaderWorkerSet's."""
    with ControlPlane() as plane:
        plane.install_crds()
        plane.kubectl("create", "namespace", SYSTEM)
        plane.kubectl("apply", "-f", str(ROOT / "charts/rbac/operator.yaml"))
        argv = [sys.executable, "-m", "e2e.faultproxy.kubelet", str(plane.kubeconfig), NOBODY]
        plane.services.append(Service("paper-kubelet", argv, plane.dir / "kubelet.log", dict(os.environ)))
        for number in range(RACKS):
            add_node(plane, number)
        kubeconfig = plane.service_account_kubeconfig(SYSTEM, "inferencefleet-operator")
        flags = ["--drain-timeout", "1", "--health-port", "0"]
        argv = [sys.executable, "-m", "fleet_operator", "--kubeconfig", str(kubeconfig), *flags]
        with lws(plane) as controller:
            operator = Service("operator", argv, plane.dir / "operator.log", dict(os.environ))
            plane.services.append(operator)
            plane.wait("nodes without taints", lambda: len(racks(plane)) == RACKS, 60)
            yield World(plane, controller, operator)


def add_node(plane: ControlPlane, number: int) -> None:
    """The paper kubelet runs what is bound to it."""
    name = f"{NAME}-{number}"
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {RACK: f"r{number}"}}}
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(node))
    status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [{"type": "Ready", "status": "True"}]}
    plane.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))


def racks(plane: ControlPlane) -> dict[str, str]:
    """Node → rack, of nodes that take pods."""
    nodes = [node for node in plane.get("/api/v1/nodes")["items"] if not node["spec"].get("taints")]
    return {name_of(node): labels_of(node)[RACK] for node in nodes if RACK in labels_of(node)}


def wide_fleet(namespace: str, nodes: int, **placement: Any) -> dict[str, Any]:
    """A prefill and a decode worker over so many nodes."""
    wish = manifest(namespace, Path("/m"))
    tier = wish["spec"]["tiers"][0]
    tier |= {"accelerator": {"type": "cpu"}, "parallelism": {"nodes": nodes}}
    tier |= {"ratio": {"prefill": 1, "decode": 1, "min": "1:4", "max": "1:1"}, "prefill": {"maxReplicas": 1}}
    tier |= {"decode": {"maxReplicas": 4, "podTemplate": {"env": [USERS]}}}
    tier["prefill"]["podTemplate"] = {"env": [USERS]}
    return wish if not placement else {**wish, "spec": {**wish["spec"], "tiers": [{**tier, "placement": placement}]}}


def wide_set(fleet: Fleet, name: str, size: int, replicas: int = 1, **annotations: str) -> None:
    """A LeaderWorkerSet of the same shape, whose groups are whole when this returns."""
    wish = leader_worker_set(name, fleet.namespace, size, replicas, **annotations)
    wish["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["env"] = [USERS]
    fleet.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(wish))
    fleet.wait("their groups are whole", lambda: len(whole(fleet, THEIRS, size)) == replicas)


def whole(fleet: Fleet, keys: Keys, size: int) -> dict[str, Group]:
    """Groups with all of their pods ready."""
    found = groups_of(fleet.objects("pods"), keys)
    return {key: group for key, group in found.items() if len(group) == size and all(map(is_ready, group))}


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions") or []}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def uids(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def uids_of(fleet: Fleet, keys: Keys) -> set[str]:
    return uids([pod for group in groups_of(fleet.objects("pods"), keys).values() for pod in group])


def get(fleet: Fleet, kind: str, name: str) -> dict[str, Any]:
    return json.loads(fleet.kubectl("get", kind, name, "-o", "json", "--show-managed-fields"))


# -- the table ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def both(world: World) -> Iterator[Fleet]:
    """Two exclusive groups of three pods of each controller in one namespace, and a witness of what was made when."""
    fleet = world.namespace()
    event = '{.type} {.object.metadata.name}{"\\n"}'
    argv = [*world.plane.kubectl_argv(), "get", "pods", "-n", fleet.namespace, "--watch", "--output-watch-events"]
    witness = Service("witness", [*argv, "-o", f"jsonpath={event}"], world.plane.dir / f"{fleet.namespace}.log")
    try:
        wide_set(fleet, "theirs", SIZE, 2, **{EXCLUSIVE: RACK})
        fleet.apply(wide_fleet(fleet.namespace, SIZE, gang=ALONE))
        fleet.wait("our groups are whole", lambda: len(whole(fleet, OURS, SIZE)) == 2)
        made = {name_of(pod) for pod in fleet.objects("pods")}
        fleet.wait("all of it was witnessed", lambda: made <= set(born(world, fleet)))
        yield fleet
    finally:
        witness.stop()
        world.plane.kubectl("delete", "namespace", fleet.namespace, "--wait=false")


def born(world: World, fleet: Fleet) -> list[str]:
    lines = (world.plane.dir / f"{fleet.namespace}.log").read_text().splitlines()
    return [name for verb, _, name in (line.partition(" ") for line in lines) if verb == "ADDED"]


@pytest.fixture(scope="module")
def sides(world: World, both: Fleet) -> tuple[Side, Side]:
    """(LeaderWorkerSet's, ours) before anything happened to them."""
    everyone, where, order = both.objects("pods"), racks(world.plane), born(world, both)

    def side(keys: Keys) -> Side:
        slices = both.objects("endpointslices", "-l", f"kubernetes.io/service-name={keys.service}")
        return Side(keys, everyone, get(both, "service", keys.service), slices, where, order)

    def complete(keys: Keys) -> bool:
        return sum(len(one.get("endpoints") or []) for one in side(keys).slices) == 2 * SIZE

    both.wait("all names are published", lambda: complete(THEIRS) and complete(OURS), 30)
    return side(THEIRS), side(OURS)


@pytest.mark.parametrize("row", ROWS, ids=[row.what for row in ROWS])
def test_a_row_of_the_contract(sides: tuple[Side, Side], row: Row):
    theirs, ours = sides
    assert bool(row.why) == (row.ours is not SAME), "a difference needs a reason, and nothing else does"
    assert row.read(theirs) == row.lws
    assert row.read(ours) == (row.lws if row.ours is SAME else row.ours)


def test_exclusive_workers_of_one_name_in_two_namespaces_do_not_meet(world: World, both: Fleet, shared: Fleet):
    """The same fleet again, as a second stage has it."""
    shared.apply(wide_fleet(shared.namespace, SIZE, gang=ALONE))
    shared.wait("its groups are whole", lambda: len(whole(shared, OURS, SIZE)) == 2)
    here, there = (whole(fleet, OURS, SIZE) for fleet in (both, shared))
    assert set(here) == set(there)
    where = racks(world.plane)
    used = [{where[pod["spec"]["nodeName"]] for pod in group} for group in (*here.values(), *there.values())]
    assert sorted(map(len, used)) == [1, 1, 1, 1]
    assert len(set[str]().union(*used)) == 4


# -- the end of a group ---------------------------------------------------------------------------------------------------
def delete(fleet: Fleet, pod: dict[str, Any]) -> None:
    fleet.kubectl("delete", "pod", name_of(pod), "--wait=false")


def fail(fleet: Fleet, pod: dict[str, Any]) -> None:
    """As the kubelet tells it of an evicted pod."""
    patch_status(fleet, pod, [{"op": "replace", "path": "/status/phase", "value": "Failed"}])


def restart(fleet: Fleet, pod: dict[str, Any]) -> None:
    """As the kubelet tells it of a container that ended and runs again."""
    patch_status(fleet, pod, [{"op": "replace", "path": "/status/containerStatuses/0/restartCount", "value": 1}])


def patch_status(fleet: Fleet, pod: dict[str, Any], patch: list[dict[str, Any]]) -> None:
    fleet.kubectl("patch", "pod", name_of(pod), "--subresource=status", "--type=json", "-p", json.dumps(patch))


@contextmanager
def held(fleet: Fleet, pod: dict[str, Any]) -> Iterator[None]:
    """A pod that stays Terminating for as long as the block takes, as one whose containers need time to end."""
    fleet.kubectl("patch", "pod", name_of(pod), "--type=merge", "-p", json.dumps({"metadata": {"finalizers": [HOLD]}}))
    yield
    fleet.kubectl("patch", "pod", name_of(pod), "--type=merge", "-p", json.dumps({"metadata": {"finalizers": None}}))


def ends_whole(fleet: Fleet, keys: Keys, member: int, how: Callable[[Fleet, dict[str, Any]], None]) -> None:
    """One pod is lost: all pods of its group come anew, those of the other group stay."""
    found = whole(fleet, keys, SIZE)
    key, group = sorted(found.items())[0]
    lost, leader, others = uids(group), group[0], uids([pod for one, pods in found.items() if one != key for pod in pods])
    with held(fleet, group[member]):
        how(fleet, group[member])
        fleet.wait("its leader goes", lambda: not any(p["metadata"]["uid"] in uids([leader]) for p in staying(fleet, keys)))
    fleet.wait("all of its pods are new", lambda: lost.isdisjoint(uids_of(fleet, keys)) and len(whole(fleet, keys, SIZE)) == 2)
    assert others <= uids_of(fleet, keys)


def staying(fleet: Fleet, keys: Keys) -> list[dict[str, Any]]:
    pods = [pod for group in groups_of(fleet.objects("pods"), keys).values() for pod in group]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


@pytest.mark.parametrize(("member", "how"), [(0, delete), (1, delete), (2, fail)], ids=["leader", "follower", "evicted follower"])
def test_a_lost_pod_ends_its_group_and_no_other(both: Fleet, member: int, how: Callable[[Fleet, dict[str, Any]], None]):
    """RecreateGroupOnPodRestart, LeaderWorkerSet's default. Ours drains the leader first (e2e/test_gang.py)."""
    for keys in (THEIRS, OURS):
        ends_whole(both, keys, member, how)


def test_a_container_that_restarts_costs_lws_the_pods_and_us_none(both: Fleet):
    """Our agents end all containers of the group where they are (e2e/test_gang.py): nodes, devices and what is cached there are
    kept, and no scheduler is asked."""
    theirs, ours = (sorted(whole(both, keys, SIZE).items()) for keys in (THEIRS, OURS))
    before = [uids(theirs[0][1]), uids(ours[0][1])]
    restart(both, theirs[0][1][1])
    both.wait("their pods are new", lambda: before[0].isdisjoint(uids_of(both, THEIRS)) and len(whole(both, THEIRS, SIZE)) == 2)
    restart(both, ours[0][1][1])
    # the operator reads in order: when it has acted on what came later, it has seen the restart
    delete(both, ours[1][1][1])
    later = uids(ours[1][1])
    both.wait("ours that came later are new", lambda: later.isdisjoint(uids_of(both, OURS)) and len(whole(both, OURS, SIZE)) == 2)
    assert before[1] <= uids_of(both, OURS)


# -- side by side ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def shared(world: World) -> Iterator[Fleet]:
    """A namespace of both, empty."""
    fleet = world.namespace()
    yield fleet
    world.plane.kubectl("delete", "namespace", fleet.namespace, "--wait=false")


def start(fleet: Fleet) -> None:
    fleet.apply(wide_fleet(fleet.namespace, 2))
    fleet.wait_serving(1, 1, 60)


def managers(found: dict[str, Any]) -> set[str]:
    return {entry["manager"] for entry in found["metadata"].get("managedFields") or []}


def test_deleting_one_leaves_the_other(shared: Fleet):
    wide_set(shared, "theirs", 2)
    start(shared)
    theirs, ours = uids_of(shared, THEIRS), uids_of(shared, OURS)
    services = {name: get(shared, "service", name)["metadata"]["uid"] for name in ("theirs", "loop-workers")}
    pods = json.loads(shared.kubectl("get", "pods", "-o", "json", "--show-managed-fields"))["items"]
    sets = json.loads(shared.kubectl("get", "statefulsets,lws", "-o", "json", "--show-managed-fields"))["items"]
    in_groups = {keys: [pod for group in groups_of(pods, keys).values() for pod in group] for keys in (THEIRS, OURS)}
    assert len(in_groups[THEIRS]) == 2
    assert len(in_groups[OURS]) == 4
    for one in [*in_groups[OURS], get(shared, "service", "loop-workers"), get(shared, "ifleet", "loop")]:
        assert not [manager for manager in managers(one) if "lws" in manager], name_of(one)
    for one in [*in_groups[THEIRS], get(shared, "service", "theirs"), *sets]:
        assert FIELD_MANAGER not in managers(one), name_of(one)

    shared.delete_and_leave_nothing()
    assert uids_of(shared, THEIRS) == theirs
    assert get(shared, "service", "theirs")["metadata"]["uid"] == services["theirs"]

    start(shared)
    ours, service = uids_of(shared, OURS), get(shared, "service", "loop-workers")["metadata"]["uid"]
    shared.kubectl("delete", "lws", "theirs", "--timeout=60s")
    shared.wait("nothing of theirs is left", lambda: not uids_of(shared, THEIRS) and not shared.objects("statefulsets"), 60)
    assert uids_of(shared, OURS) == ours
    assert get(shared, "service", "loop-workers")["metadata"]["uid"] == service
    assert shared.serving() == (1, 1)


def test_a_fleet_grows_while_lws_is_away(world: World, shared: Fleet):
    """Its webhooks refuse pods when they do not answer; ours are none of theirs."""
    start(shared)
    os.kill(world.lws.pid, signal.SIGSTOP)
    try:
        meta = {"name": "probe", "labels": {f"{MARK}name": "theirs"}}
        probe = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [{"name": "c", "image": "x"}]}}
        refused = world.plane.kubectl("create", "-n", shared.namespace, "-f", "-", stdin=json.dumps(probe), check=False)
        assert "failed calling webhook" in refused.stderr, refused
        pool = next(pool for pool in shared.objects("workerpools") if pool["spec"]["role"] == "decode")
        shared.kubectl("scale", "wpool", name_of(pool), "--replicas=2")
        shared.wait_serving(1, 2, 60)
    finally:
        os.kill(world.lws.pid, signal.SIGCONT)


def test_a_service_of_the_same_name_stays_whose_it_is(shared: Fleet):
    """LeaderWorkerSet calls its Service like itself, we call ours FLEET-workers: one of them comes second."""
    wide_set(shared, "loop-workers", 2)
    theirs, pods = get(shared, "service", "loop-workers"), uids_of(shared, THEIRS)
    shared.apply(wide_fleet(shared.namespace, 2))
    shared.wait("the conflict is told", lambda: shared.condition("Provisioned").get("reason") == "NameConflict", 60)
    assert "Service loop-workers" in shared.condition("Provisioned")["message"]
    assert get(shared, "service", "loop-workers") == theirs
    assert uids_of(shared, THEIRS) == pods

    shared.kubectl("delete", "lws", "loop-workers", "--timeout=60s")
    shared.wait_serving(1, 1, 90)
    ours, pods = get(shared, "service", "loop-workers"), uids_of(shared, OURS)
    assert ours["metadata"]["ownerReferences"][0]["kind"] == "InferenceFleet"

    wide_set(shared, "loop-workers", 2)
    assert get(shared, "service", "loop-workers") == ours
    shared.kubectl("delete", "lws", "loop-workers", "--timeout=60s")
    shared.wait("nothing of theirs is left", lambda: not uids_of(shared, THEIRS), 60)
    assert get(shared, "service", "loop-workers") == ours
    assert uids_of(shared, OURS) == pods


def test_a_pod_template_with_their_label_is_refused_by_them_and_told(shared: Fleet):
    """Copied from a pod of theirs: pods with it are LeaderWorkerSet's, and it takes none that it did not make."""
    wish = wide_fleet(shared.namespace, 2)
    wish["spec"]["tiers"][0]["decode"]["podTemplate"]["labels"] = {f"{MARK}name": "theirs"}
    shared.apply(wish)
    said = "size annotation is unexpectedly missing"
    shared.wait("what their webhook says", lambda: said in shared.condition("Provisioned").get("message", ""), 60)
    assert shared.pods("decode") == []
    del wish["spec"]["tiers"][0]["decode"]["podTemplate"]["labels"]
    shared.apply(wish)
    shared.wait_serving(1, 1, 60)
