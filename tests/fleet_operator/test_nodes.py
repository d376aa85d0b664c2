"""Nodes that go away: which are believed, which fail, and what happens to the workers on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from fleet_operator.audit import audit_kind
from fleet_operator.cluster.interface import CONFIG_MAP, FLEET, NODE, PDB, POD, POOL, Listed, WatchEvent
from fleet_operator.health.fleets import readiness
from fleet_operator.health.passes import Unmeasured
from fleet_operator.known_nodes import KnownNodes
from fleet_operator.names import FETCH, FETCH_NODE, ROLE
from fleet_operator.nodes import NodeView, accused_nodes, going_away, observe_node, sick_nodes
from fleet_operator.observe import Surroundings, observe_fetching, observe_pods
from fleet_operator.render.prefetch import fetches_ahead
from fleet_operator.settings import Platform
from fleet_planner.node_conditions import believed
from fleet_wire import endpoints
from tests.fleet_operator.world import NAMESPACE, World, manifest

NVSENTINEL, AKS_REPAIR = "nvidia.com/gpu-xid-error", "remediator.kubernetes.azure.com/unschedulable"
GKE_ENDS = "cloud.google.com/impending-node-termination"


def node(name: str = "n", *, taints: tuple[str, ...] = (), cordoned: bool = False, **conditions: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"unschedulable": cordoned, "taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"conditions": [{"type": kind, "status": value} for kind, value in {"Ready": "True", **conditions}.items()]},
    }


@pytest.mark.parametrize(
    ("found", "leaving", "sick"),
    [
        pytest.param(node(), "", "", id="well"),
        pytest.param(node(taints=("nvidia.com/gpu",)), "", "", id="an-ordinary-taint"),
        pytest.param(node(cordoned=True), "node n is cordoned", "", id="cordoned"),
        pytest.param(node(Ready="Unknown"), "node n is not ready", "", id="lost"),
        pytest.param(node(taints=("karpenter.sh/disrupted",)), "node n has taint karpenter.sh/disrupted", "", id="autoscaler"),
        pytest.param(node(GPUXIDError="True"), *["node n has condition GPUXIDError=True"] * 2, id="xid"),
        pytest.param(node(GPUXIDError="False"), "", "", id="no-xid"),
        pytest.param(
            node(AcceleratedHardwareReady="False"), *["node n has condition AcceleratedHardwareReady=False"] * 2, id="negative"
        ),
        pytest.param({"metadata": {"name": "n"}}, "", "", id="nothing-known"),
        pytest.param(
            node(cordoned=True, SysLogsXIDError="True"), *["node n has condition SysLogsXIDError=True"] * 2, id="nvsentinel"
        ),
        pytest.param(node(SysLogsXIDError="False", GpuMemWatch="False"), "", "", id="nvsentinel-well"),
        pytest.param(node(taints=(NVSENTINEL,)), *[f"node n has taint {NVSENTINEL}"] * 2, id="nvsentinel-taint"),
        pytest.param(node(XIDErrors="True"), *["node n has condition XIDErrors=True"] * 2, id="aks"),
        pytest.param(node(NebiusGPUError="True"), *["node n has condition NebiusGPUError=True"] * 2, id="nebius"),
        pytest.param(node(taints=(AKS_REPAIR,)), f"node n has taint {AKS_REPAIR}", "", id="aks-repair"),
        pytest.param(node(taints=(GKE_ENDS,)), f"node n has taint {GKE_ENDS}", "", id="gke-maintenance"),
        pytest.param(node(taints=("DeletionCandidateOfClusterAutoscaler",)), "", "", id="may-be-deleted-some-day"),
    ],
)
def test_what_a_node_says(found: dict[str, Any], leaving: str, sick: str):
    views = {"n": observe_node(found, Platform())}
    around = Surroundings(leaving=going_away(views), sick=sick_nodes(views, views), accused=accused_nodes(views))
    meta = {"name": "p", "uid": "u", "labels": {ROLE: "decode"}}
    (pod,) = believed(observe_pods([{"metadata": meta, "spec": {"nodeName": "n"}}], around), ())
    assert (pod.leaving, pod.sick) == (leaving, sick)


@pytest.mark.parametrize(("effect", "counts"), [("NoSchedule", True), ("NoExecute", True), ("PreferNoSchedule", False)])
@pytest.mark.parametrize("key", [NVSENTINEL, "karpenter.sh/disrupted"])
def test_a_taint_that_only_asks_to_avoid_a_node_is_a_warning(key: str, effect: str, counts: bool):
    """NVSentinel's documents have it for devices that are degraded; workers were replaced for it, and came back to that node."""
    found = node(taints=(key,))
    found["spec"]["taints"][0]["effect"] = effect
    assert bool(going_away({"n": observe_node(found, Platform())})) is counts
    found["spec"]["taints"][0] |= {"key": "example.com/bad", "effect": effect}
    assert observe_node(found, Platform(sick_taints=("example.com/bad",))).sick, "who names one means it whatever its effect"


@pytest.mark.parametrize(("reason", "sick"), [("NvidiaXID79Error", True), ("DCGMError", False), (None, True)])
def test_a_monitor_that_does_not_reach_its_own_daemon_says_nothing_of_devices(reason: str | None, sick: bool):
    """EKS's says so of every node at once, for good where its DCGM is not installed, and repairs nothing for it."""
    found = node(AcceleratedHardwareReady="False")
    found["status"]["conditions"][-1] |= {"reason": reason} if reason is not None else {}
    assert bool(observe_node(found, Platform()).accused) is sick


@pytest.mark.parametrize(
    ("made_at", "outlived"), [("2026-01-01T00:00:10Z", False), ("2026-01-01T00:00:11Z", True), (None, False)]
)
def test_a_fetching_pod_that_is_older_than_its_node_is_seen(made_at: str | None, outlived: bool):
    """Whatever our own clock says, or was set to."""

    async def scenario() -> None:
        world, machine = World(), node("n1")
        machine["metadata"] |= {"creationTimestamp": made_at} if made_at is not None else {}
        world.operator.feed(NODE, WatchEvent("ADDED", machine))
        meta = {"name": "p", "uid": "u", "labels": {FETCH: "k"}, "annotations": {FETCH_NODE: "n1"}}
        pod = {"metadata": {**meta, "creationTimestamp": "2026-01-01T00:00:10Z"}, "spec": {}}
        (found,) = observe_fetching([pod], world.operator._places.made_at)
        assert found.outlived is outlived

    asyncio.run(scenario())


@pytest.mark.parametrize(("lost", "believed"), [(1, True), (2, True), (3, False), (4, False)])
def test_when_most_nodes_seem_lost_nothing_is_replaced(lost: int, believed: bool):
    views = {f"n{i}": NodeView(not_ready="not ready" if i < lost else "") for i in range(4)}
    assert bool(going_away(views)) is believed


def test_a_single_lost_node_is_believed():
    assert going_away({"n": NodeView(not_ready="gone")}) == {"n": "gone"}


def test_a_cordoned_nodes_workers_are_replaced_before_they_go_and_evictions_wait_for_that():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.settle()
        before = {pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)}
        budgets = {pdb["metadata"]["name"]: pdb["spec"] for pdb in await world.store.list(PDB, NAMESPACE)}
        assert (budgets["f-t-prefill"]["minAvailable"], budgets["f-t-decode"]["minAvailable"]) == (1, 2)
        world.operator.feed(NODE, WatchEvent("MODIFIED", node("node", cordoned=True)))
        await world.look()
        await world.operator.drain()
        during = {pod["metadata"]["name"]: pod["metadata"] for pod in await world.store.list(POD, NAMESPACE)}
        assert before < during.keys()
        assert len(during) == len(before) + 3
        assert not any("deletionTimestamp" in meta for meta in during.values())
        world.node = "other"
        await world.settle()
        after = {pod["metadata"]["name"]: pod for pod in await world.store.list(POD, NAMESPACE)}
        assert before.isdisjoint(after)
        assert {pod["spec"]["nodeName"] for pod in after.values()} == {"other"}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "sick",
    [node("bad", GPUXIDError="True"), node("bad", AcceleratedHardwareReady="False"), node("bad", taints=("nvidia.com/gpu-xid",))],
    ids=["condition", "negative-condition", "taint"],
)
def test_a_worker_on_failing_devices_gets_no_new_request_from_the_next_pass_on(sick: dict[str, Any]):
    """Requests are paired with others before any pod goes: its replacement takes minutes."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(scaling={"mode": "manual"}))
        await world.settle()
        world.node = "bad"
        pool = await world.pool("decode")
        await world.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], {"spec": {"replicas": 3}})
        await world.settle()
        pods = await world.store.list(POD, NAMESPACE)
        (on_it,) = [pod["metadata"]["name"] for pod in pods if pod["spec"]["nodeName"] == "bad"]
        assert set((await told(world)).values()) == {"serving"}
        world.operator.feed(NODE, WatchEvent("MODIFIED", sick))
        await world.look()
        await world.operator.drain()
        states = await told(world)
        assert states.pop(on_it) == "held"
        assert set(states.values()) == {"serving"}
        there = {pod["metadata"]["name"]: pod["metadata"] for pod in await world.store.list(POD, NAMESPACE)}
        assert "deletionTimestamp" not in there[on_it]
        said = await world.condition("WithinRatio")
        assert (said["status"], said["reason"]) == ("True", "DevicesFailing")
        assert said["message"].startswith("tier t: 1 decode workers are ready and get no new requests because their devices fail")
        assert on_it in said["message"]
        assert "node bad has " in said["message"]
        assert any(event.startswith(f"Warning DevicesFailing {said['message']}") for event in await world.events())
        world.node = "node"
        await world.settle()
        assert (await world.condition("WithinRatio"))["reason"] == "InRatio"
        assert on_it not in await told(world)
        assert set((await told(world)).values()) == {"serving"}

    asyncio.run(scenario())


def test_many_nodes_called_bad_at_once_leave_no_fleet_that_says_all_is_well():
    """One pair of 8:12 served on, the others were held for the minutes that their replacements took, `Ready` said AllGood,
    `WithinRatio` InRatio, and no event anything but that workers were created."""

    async def scenario() -> None:
        world = World()
        sizes = {role: {"minReplicas": count, "maxReplicas": count} for role, count in (("prefill", 8), ("decode", 12))}
        world.node = "bad"
        await world.user.apply(manifest(tiers=[{"name": "t", "accelerator": {"type": "cpu"}, **sizes}]))
        await world.look()
        await world.operator.drain()
        names = [pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)]
        world.late = {name for name in names if name.endswith("-0")}  # the pair that is elsewhere
        await world.kubelet()
        world.late, world.node = set(), "well"
        await world.settle()
        before = {pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)}
        world.operator.feed(NODE, WatchEvent("MODIFIED", node("bad", GPUXIDError="True")))
        await world.look()
        await world.operator.drain()
        states = list((await told(world)).values())
        assert (states.count("serving"), states.count("held")) == (2, 18)
        assert before < {pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)}
        said = await world.condition("WithinRatio")
        assert (said["reason"], "7 prefill and 11 decode workers" in said["message"]) == ("DevicesFailing", True)
        world.operator.feed(NODE, WatchEvent("MODIFIED", node("bad")))
        await world.look()
        await world.operator.drain()
        assert list((await told(world)).values()).count("serving") == 20, "it was said by mistake"
        assert (await world.condition("WithinRatio"))["reason"] == "InRatio"

    asyncio.run(scenario())


async def told(world: World) -> dict[str, str]:
    """What routers read: pod name → state."""
    documents = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
    return {worker.name: worker.state for worker in endpoints.decode(documents["data"][endpoints.ENDPOINTS_KEY]).workers}


def test_an_audit_tells_what_no_watch_told_of_nodes():
    async def scenario() -> None:
        world = World()
        await world.user.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node"}})
        await world.user.apply(manifest())
        await world.settle()
        assert await audit_kind(world.store, world.operator, NODE, None) == 1  # a node that nobody told of
        await world.user.patch(NODE, None, "node", {"spec": {"unschedulable": True}})
        assert await audit_kind(world.store, world.operator, NODE, None) == 1
        assert await audit_kind(world.store, world.operator, NODE, None) == 0
        await world.operator.drain()
        assert len(await world.store.list(POD, NAMESPACE)) == 6  # three workers on the cordoned node, three in their place
        await world.user.delete(NODE, None, "node")
        assert await audit_kind(world.store, world.operator, NODE, None) == 1
        assert await audit_kind(world.store, world.operator, NODE, None) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "found",
    [
        *({"status": status} for status in (None, "text", {"conditions": "x"}, {"conditions": ["y", {"type": "Ready"}]})),
        *({"spec": spec} for spec in (None, 7, {"model": 3}, {"model": {"cache": 5}}, {"model": {"cache": []}})),
    ],
)
def test_a_fleet_of_any_shape_does_not_end_the_operator_when_nodes_change(found: dict[str, Any]):
    """One that was stored before its CRD was what it is: `cache: 5` ended the operator, and each one that started after it."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.settle()
        strange = {**manifest("strange"), **found}
        strange["metadata"] |= {"uid": "strange", "resourceVersion": "1"}
        for event in (FLEET, strange), (NODE, node()), (NODE, node(cordoned=True)):
            world.operator.feed(event[0], WatchEvent("MODIFIED", event[1]))
        assert readiness(world.operator.ours()) == {"True": 1, "False": 0, "Unknown": 1}
        assert not fetches_ahead(strange)

    asyncio.run(scenario())


class Counted(Unmeasured):
    """Passes that failed, with their reasons."""

    def __init__(self) -> None:
        self.failed: list[list[str]] = []

    def ended(self, begun: int, reasons: Iterable[str], *, failed: bool = False) -> None:
        if failed:
            self.failed.append(list(reasons))


def test_what_cannot_be_taken_in_is_told_and_counted_and_ends_nothing(caplog: pytest.LogCaptureFixture):
    counted = Counted()

    async def scenario() -> None:
        world = World()
        world.operator._passes = counted
        broken = {"kind": POOL.kind, "metadata": {"name": "p", "namespace": NAMESPACE, "labels": 7}}
        world.operator.feed(POOL, WatchEvent("ADDED", broken))
        assert counted.failed == [["InternalError"]]
        await world.user.apply(manifest())
        await world.settle()
        assert (await world.condition("Ready"))["status"] == "True"

    asyncio.run(scenario())
    (line,) = [record for record in caplog.records if record.exc_info]
    assert line.getMessage() == f"WorkerPool {NAMESPACE}/p could not be taken in"


def test_old_news_of_a_node_and_of_its_namesake_changes_nothing():
    def told(version: str, uid: str = "u", *, cordoned: bool = False) -> dict[str, Any]:
        found = node(cordoned=cordoned)
        found["metadata"] |= {"uid": uid, "resourceVersion": version}
        return found

    nodes = KnownNodes(Platform())
    assert nodes.take(WatchEvent("ADDED", told("9", cordoned=True)))
    assert not nodes.take(WatchEvent("MODIFIED", told("8")))  # a replayed event
    assert nodes.views["n"].leaving
    assert not nodes.take(WatchEvent("DELETED", told("7", "another")))
    assert nodes.missed(Listed({}, "8")) == ([], [])  # a list from before
    assert nodes.missed(Listed({("", "n"): "11"}, "12")) == ([("", "n")], [])
    assert nodes.take(WatchEvent("MODIFIED", told("2", "another")))
    assert not nodes.views["n"].leaving
    assert nodes.take(WatchEvent("DELETED", told("2", "another")))
    assert nodes.views == {}


def test_the_budgets_of_a_renamed_tier_guard_its_workers_until_their_successors_serve():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.settle()
        await world.user.apply(manifest(tiers=[{"name": "u", "accelerator": {"type": "cpu"}}]))
        seen: list[tuple[bool, bool]] = []
        for _ in range(8):
            await world.step()
            pods = [pod["metadata"] for pod in await world.store.list(POD, NAMESPACE)]
            old = any(meta["name"].startswith("f-t-") and "deletionTimestamp" not in meta for meta in pods)
            seen.append((old, "f-t-decode" in {pdb["metadata"]["name"] for pdb in await world.store.list(PDB, NAMESPACE)}))
        assert (True, True) in seen
        assert (True, False) not in seen
        assert seen[-1] == (False, False)
        names = {pdb["metadata"]["name"] for pdb in await world.store.list(PDB, NAMESPACE)}
        assert names == {"f-u-prefill", "f-u-decode"}

    asyncio.run(scenario())


def test_the_budgets_of_a_tier_that_is_gone_go_with_it():
    async def scenario() -> None:
        world, two = World(), [{"name": name, "accelerator": {"type": "cpu"}} for name in ("t", "u")]
        await world.user.apply(manifest(tiers=two))
        await world.settle()
        assert "f-u-decode" in {pdb["metadata"]["name"] for pdb in await world.store.list(PDB, NAMESPACE)}
        await world.user.apply(manifest(tiers=two[:1]))
        await world.settle()
        names = {pdb["metadata"]["name"] for pdb in await world.store.list(PDB, NAMESPACE)}
        assert names == {"f-t-prefill", "f-t-decode"}

    asyncio.run(scenario())


@pytest.mark.parametrize(("spec", "placed"), [({}, False), ({"nodeName": "n1"}, True)])
def test_whether_a_fetching_pod_has_its_node_is_seen(spec: dict[str, Any], placed: bool):
    meta = {"name": "p", "uid": "u", "labels": {FETCH: "k"}}
    (found,) = observe_fetching([{"metadata": meta, "spec": spec, "status": {"phase": "Pending"}}])
    assert (found.phase, found.placed) == ("Pending", placed)


@pytest.mark.parametrize(
    ("code", "phase", "seen"),
    [(0, "Running", "Succeeded"), (1, "Running", "Failed"), (None, "Running", "Running"), (0, "Failed", "Succeeded")],
    ids=["came", "failed", "runs", "came-and-its-pod-was-too-long"],
)
def test_a_fetch_is_over_when_it_ended_though_somebodys_sidecar_runs_on(code: int | None, phase: str, seen: str):
    """A mesh adds one to every pod. The pod that fetched ran for ever, its node never had the model, and no node behind
    prefetch.parallel such ones fetched anything; one that failed was not tried again for six hours."""
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
    containers = [{"name": "mesh", "ready": True, "state": {"running": {}}}, {"name": "fetch", "state": state}]
    meta = {"name": "p", "uid": "u", "labels": {FETCH: "k"}}
    (found,) = observe_fetching([{"metadata": meta, "status": {"phase": phase, "containerStatuses": containers}}])
    assert found.phase == seen


def test_a_machine_that_was_replaced_under_its_name_fetches_again():
    async def scenario() -> None:
        world = World()
        machine = node("node")
        machine["metadata"]["creationTimestamp"] = "1970-01-01T00:00:00Z"
        world.operator.feed(NODE, WatchEvent("ADDED", machine))
        cache = {"type": "nodeLocal", "path": "/cache"}
        await world.user.apply(manifest(model={"source": "hf://org/name", "revision": "1", "cache": cache}))
        await world.settle()
        (pod,) = await world.store.list(POD, NAMESPACE, {ROLE: "fetch"})
        await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"phase": "Succeeded"})
        await world.step()
        assert (await world.condition("ModelCached"))["reason"] == "Cached"
        for replica in await world.store.list(POD, NAMESPACE):  # what runs there is lost
            if replica["metadata"]["labels"][ROLE] != "fetch":
                await world.user.delete(POD, NAMESPACE, replica["metadata"]["name"], grace_s=0)
        machine["metadata"] |= {"uid": "another", "creationTimestamp": "1970-02-01T00:00:00Z"}
        world.operator.feed(NODE, WatchEvent("MODIFIED", machine))
        await world.step()
        assert (await world.condition("ModelCached"))["reason"] == "Prefetching"
        await world.step()
        assert await world.store.list(POD, NAMESPACE, {ROLE: "fetch"}) != [pod]

    asyncio.run(scenario())
