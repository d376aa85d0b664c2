"""What the operator does with workers over several nodes: pods in order, one name per group, whole groups in every count."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_api.conditions import rfc3339
from fleet_operator import names
from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    FLEET,
    NETWORK_POLICY,
    PDB,
    POD,
    POOL,
    SERVICE,
    ForbiddenError,
    Kind,
    NotFoundError,
)
from fleet_operator.cluster.kinds import POD_GROUP_KINDS
from fleet_operator.gangs import AGAIN_S, count_workers, waiting_leaders
from fleet_operator.names import ASKED_AGAIN, GROUP_KEY, GROUP_OF, GROUP_UID, LEADER, MEMBER, REVISION, ROLE
from fleet_operator.names import POOL as POOL_LABEL
from fleet_operator.names import TIER as TIER_LABEL
from fleet_operator.observe import observe_pods
from fleet_operator.render.gang import COSCHEDULING_LABEL, pod_group_of
from fleet_operator.telemetry.scrape import is_running_worker
from fleet_planner.wanted import PodWanted
from tests.fleet_operator.world import NAMESPACE, Scenario, World, manifest

DRA = {"via": "dra", "dra": {"nic": "mrdma.google.com"}}
TIER = {"name": "t", "accelerator": {"type": "cpu"}, "parallelism": {"nodes": 2}, "ratio": {"decode": 1, "min": "1:2"}}


def play(scenario: Scenario, **tier: Any) -> None:
    async def whole() -> None:
        world = World()
        await world.user.apply(manifest(tiers=[{**TIER, **tier}]))
        await world.settle()
        await scenario(world)

    asyncio.run(whole())


async def pods(world: World, role: str = "decode") -> list[dict[str, Any]]:
    return [pod for pod in await world.store.list(POD, NAMESPACE) if pod["metadata"]["labels"][ROLE] == role]


async def told(world: World) -> dict[str, str]:
    """Name → state of the workers that the routers know."""
    document = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
    return {worker["name"]: worker["state"] for worker in json.loads(document["data"]["endpoints.json"])["workers"]}


def test_a_worker_is_two_pods_and_one_endpoint():
    async def scenario(world: World) -> None:
        leader, follower = await pods(world)
        assert follower["metadata"]["name"] == f"{leader['metadata']['name']}-1"
        assert follower["metadata"]["annotations"][GROUP_UID] == leader["metadata"]["uid"]
        assert GROUP_UID not in leader["metadata"]["annotations"]
        assert {pod["metadata"]["labels"][GROUP_OF] for pod in (leader, follower)} == {leader["metadata"]["name"]}
        assert [observed.member for observed in observe_pods([leader, follower])] == [0, 1]
        prefill = (await pods(world, "prefill"))[0]["metadata"]["name"]
        assert await told(world) == {leader["metadata"]["name"]: "serving", prefill: "serving"}
        service = await world.store.get(SERVICE, NAMESPACE, "f-workers")
        assert service["spec"]["publishNotReadyAddresses"]
        assert follower["spec"]["subdomain"] == "f-workers"
        assert follower["spec"]["hostname"] == f"{leader['spec']['hostname']}-1"  # LeaderWorkerSet's form (e2e/lws_contract.py)
        assert follower["metadata"]["annotations"][LEADER] == f"{leader['spec']['hostname']}.f-workers.{NAMESPACE}"
        assert [is_running_worker(pod) for pod in (leader, follower)] == [True, False]

    play(scenario)


def test_budgets_pools_and_events_count_workers():
    async def scenario(world: World) -> None:
        pool = await world.pool("decode")
        assert (pool["status"]["replicas"], pool["status"]["readyReplicas"]) == (1, 1)
        assert pool["status"]["selector"].endswith(f",{MEMBER}=0")
        budget = await world.store.get(PDB, NAMESPACE, "f-t-decode")
        assert budget["spec"]["minAvailable"] == 3  # two pods, and of a replacement's two one: each eviction ends a worker
        status = (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["tiers"][0]
        assert (status["decode"]["desired"], status["decode"]["ready"], status["decode"]["serving"]) == (1, 1, 1)
        assert any("1 decode worker: f-t-decode" in event for event in await world.events())

    play(scenario)


def test_a_lost_follower_takes_its_leader_along_after_the_routers_were_told():
    async def scenario(world: World) -> None:
        leader, follower = await pods(world)
        await world.user.delete(POD, NAMESPACE, follower["metadata"]["name"], grace_s=0)
        written = await world.step()
        documents = next(at for at, write in enumerate(written) if write[1:] == ("ConfigMap", "f-router"))
        deletion = next(at for at, write in enumerate(written) if write == ("delete", "Pod", leader["metadata"]["name"]))
        assert documents < deletion
        assert (await told(world))[leader["metadata"]["name"]] == "draining"
        await world.settle()
        after = await pods(world)
        assert {pod["metadata"]["uid"] for pod in after}.isdisjoint({leader["metadata"]["uid"], follower["metadata"]["uid"]})
        assert after[1]["metadata"]["annotations"][GROUP_UID] == after[0]["metadata"]["uid"]
        assert (await world.condition("Ready"))["status"] == "True"

    play(scenario)


def test_a_leader_whose_followers_could_not_be_made_goes_and_both_come_again():
    async def scenario(world: World) -> None:
        for pod in await pods(world):
            await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)
        refused = ForbiddenError("no")
        followers = "f-t-decode-REVISION-ORDINAL-MEMBER".count("-")
        world.api.refuse = lambda verb, kind, name: refused if (verb, name.count("-")) == ("create", followers) else None
        await world.step()
        assert {pod["metadata"]["labels"][MEMBER] for pod in await pods(world)} <= {"0"}
        assert not any(name.startswith("f-t-decode") for name, state in (await told(world)).items() if state == "serving")
        world.api.refuse = lambda verb, kind, name: None
        for _ in range(8):  # the operator waits between tries
            world.now += 10
            await world.step()
        assert [pod["metadata"]["labels"][MEMBER] for pod in await pods(world)] == ["0", "1"]

    play(scenario)


def test_the_names_go_with_the_last_worker_that_needs_them():
    async def scenario(world: World) -> None:
        await world.user.apply(manifest(tiers=[{**TIER, "parallelism": {"nodes": 1}}]))
        await world.settle(30)
        assert not await world.exists(SERVICE, "f-workers")
        assert all(MEMBER not in pod["metadata"]["labels"] for pod in await pods(world))

    play(scenario)


def test_a_pod_group_comes_before_its_pods_and_goes_with_them():
    async def scenario(world: World) -> None:
        kind = POD_GROUP_KINDS["coscheduling"]
        leader, follower = await pods(world)
        assert pod_group_of(leader) == pod_group_of(follower) == ("coscheduling", leader["metadata"]["name"])
        group = await world.store.get(kind, NAMESPACE, leader["metadata"]["name"])
        assert group["spec"] == {"minMember": 2}
        pool = await world.pool("decode")
        assert group["metadata"]["ownerReferences"][0]["uid"] == pool["metadata"]["uid"]
        await world.user.delete(POD, NAMESPACE, follower["metadata"]["name"], grace_s=0)
        written = await world.step()
        new = next(at for at, (verb, what, _) in enumerate(written) if (verb, what) == ("create", "Pod"))
        assert any(write[:2] == ("apply", "PodGroup") for write in written[:new])
        await world.settle()
        left = {group["metadata"]["name"] for group in await world.store.list(kind, NAMESPACE)}
        assert left == {pod["metadata"]["labels"][GROUP_OF] for role in ("prefill", "decode") for pod in await pods(world, role)}

    play(scenario, placement={"podGroup": "coscheduling"})


class NoNodes(World):
    """The scheduler finds none for decode workers."""

    async def kubelet(self) -> None:
        for pod in await self.store.list(POD, NAMESPACE):
            name, waits = pod["metadata"]["name"], not pod["spec"].get("nodeName")
            if waits and pod["metadata"]["labels"][ROLE] == "decode":
                told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
                await self.user.patch_status(POD, NAMESPACE, name, {"phase": "Pending", "conditions": [told]})


def test_a_pod_group_that_somebody_deleted_is_written_again_while_its_worker_waits():
    async def scenario() -> None:
        world, kind = NoNodes(), POD_GROUP_KINDS["coscheduling"]
        await world.user.apply(manifest(tiers=[{**TIER, "placement": {"podGroup": "coscheduling"}}]))
        for _ in range(3):
            await world.step()
        leader, follower = await pods(world)
        name = leader["metadata"]["name"]
        await world.user.delete(kind, NAMESPACE, name)
        assert ("apply", "PodGroup", name) not in await world.touch()  # it was written a moment ago
        world.now += AGAIN_S
        assert ("apply", "PodGroup", name) in await world.touch()
        group = await world.store.get(kind, NAMESPACE, name)
        assert group["spec"] == {"minMember": 2}
        # a change, each time: scheduler-plugins hear of that, and not of a new node
        assert group["metadata"]["annotations"] == {ASKED_AGAIN: rfc3339(world.now)}
        told = await world.condition("CapacityLimited")
        assert told["message"] == f"2 pods cannot be scheduled: {name} has 0 of its 2 nodes; {name}, {name}-1: no node"
        assert ("apply", "PodGroup", name) not in await world.touch()
        for pod in (leader, follower):
            await world.user.bind(NAMESPACE, pod["metadata"]["name"], "node")
        await world.user.delete(kind, NAMESPACE, name)
        world.now += AGAIN_S
        assert ("apply", "PodGroup", name) not in await world.touch()  # it has its nodes

    asyncio.run(scenario())


def test_somebody_elses_pod_group_of_a_workers_name_is_left_alone_and_told():
    """It was written over, and deleted with the worker (O13)."""
    kind, wish = POD_GROUP_KINDS["coscheduling"], manifest(tiers=[{**TIER, "placement": {"podGroup": "coscheduling"}}])

    async def scenario() -> None:
        world = NoNodes()
        await world.user.apply(wish)
        for _ in range(3):
            await world.step()
        leader, _ = await pods(world)
        name = leader["metadata"]["name"]
        await world.user.delete(kind, NAMESPACE, name)
        meta = {"name": name, "namespace": NAMESPACE}
        await world.user.create({"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": {"minMember": 7}})
        theirs = await world.store.get(kind, NAMESPACE, name)
        world.now += AGAIN_S
        await world.touch()
        assert await world.store.get(kind, NAMESPACE, name) == theirs, "the worker waits"
        told = await world.condition("Provisioned")
        assert (told["status"], told["reason"]) == ("False", "NameConflict")
        assert f"PodGroup {name} exists and belongs to somebody else" in told["message"]
        await world.user.apply(manifest(tiers=[{**TIER, "name": "other"}]))
        for _ in range(12):
            await world.step()
        assert not await world.exists(POD, name), "the worker went"
        assert await world.store.get(kind, NAMESPACE, name) == theirs

    asyncio.run(scenario())


def test_only_workers_that_wait_and_stay_need_their_pod_group_again():
    def pod(worker: str, member: int, **spec: Any) -> tuple[tuple[str, str], dict[str, Any]]:
        of = {COSCHEDULING_LABEL: worker, GROUP_OF: worker, POOL_LABEL: "p", TIER_LABEL: "t", ROLE: "decode", REVISION: "r"}
        return ("Pod", f"{worker}-{member}"), {"metadata": {"labels": of, **spec.pop("metadata", {})}, "spec": spec}

    live = dict([
        pod("p-0", 0, nodeName="n"), pod("p-0", 1, nodeName="n"),
        pod("p-1", 0, nodeName="n"), pod("p-1", 1),
        pod("p-2", 0), pod("p-2", 1, metadata={"deletionTimestamp": "now"}),
        pod("p-3", 0, schedulingGates=[{"name": "g"}]), pod("p-3", 1, schedulingGates=[{"name": "g"}]),
        (("Pod", "loose"), {"metadata": {"labels": {}}, "spec": {}}),
    ])  # fmt: skip
    assert waiting_leaders(live) == [PodWanted("p-1", "p", "t", "decode", "r", 1)]


def test_a_pod_group_that_a_pod_template_names_is_not_ours():
    """It would be deleted with the first worker that goes."""

    async def scenario(world: World) -> None:
        kind = POD_GROUP_KINDS["coscheduling"]
        for role in ("prefill", "decode"):
            for pod in await pods(world, role):
                assert pod["metadata"]["labels"][COSCHEDULING_LABEL] == "theirs"
                assert pod_group_of(pod) is None
        await world.user.delete(POD, NAMESPACE, (await pods(world))[1]["metadata"]["name"], grace_s=0)
        touched = [write for _ in range(3) for write in await world.step() if write[1] == kind.kind]
        assert touched == []

    template = {"podTemplate": {"labels": {COSCHEDULING_LABEL: "theirs"}}}
    play(scenario, prefill=template, decode=template)


def test_pods_of_a_queued_worker_are_one_group_that_kueue_lets_go():
    """Without managed and pod-suspending-parent its finalizer would keep deleted pods (v0.19.2, pod_webhook.go)."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(tiers=[{**TIER, "placement": {"queue": "gpus"}}]))
        await world.settle()
        for pod in await pods(world):
            meta, spec = pod["metadata"], pod["spec"]
            found = {**meta["labels"], **meta["annotations"]}
            assert {key.removeprefix("kueue.x-k8s.io/"): value for key, value in found.items() if key.startswith("kueue")} == {
                "queue-name": "gpus",
                "pod-group-name": (await pods(world))[0]["metadata"]["name"],
                "pod-group-total-count": "2",
                "pod-group-serving": "true",
                "managed": "true",
                "pod-suspending-parent": "inferencefleet.io/inferencefleet",
            }
            assert spec["schedulingGates"] == [{"name": "kueue.x-k8s.io/admission"}]

    asyncio.run(scenario())


def test_without_its_pod_group_no_pod_is_made_and_the_reason_is_told():
    async def scenario() -> None:
        world = World()
        missing = NotFoundError('the server could not find the requested resource "podgroups.scheduling.volcano.sh"')

        def refuse(verb: str, kind: Kind, name: str) -> NotFoundError | None:
            return missing if kind == POD_GROUP_KINDS["volcano"] else None

        world.api.refuse = refuse
        await world.user.apply(manifest(tiers=[{**TIER, "placement": {"podGroup": "volcano"}}]))
        for _ in range(4):
            await world.step()
        assert await pods(world) == []
        assert "podgroups.scheduling.volcano.sh" in (await world.condition("Provisioned"))["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("tier", "kind", "words"),
    [
        ({"placement": {"podGroup": "volcano"}}, "PodGroup", "(placement.podGroup volcano)"),
        ({"accelerator": {"type": "h100", "count": 2}, "kvTransfer": DRA}, "ResourceClaimTemplate", "(kvTransfer.via dra)"),
    ],
)
def test_what_a_cluster_does_not_have_is_told_with_the_field_that_asks_for_it(tier: dict[str, Any], kind: str, words: str):
    async def scenario() -> None:
        world = NoNodes()
        world.api.refuse = lambda verb, of, name: NotFoundError("no such kind") if of.kind == kind else None
        await world.user.apply(manifest(tiers=[{**TIER, **tier}]))
        for _ in range(3):
            await world.step()
        said = (await world.condition("Provisioned"))["message"]
        assert f"{kind} " in said
        assert f" {words}: no such kind" in said

    asyncio.run(scenario())


def test_workers_are_counted_by_their_group():
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    found: list[dict[str, Any]] = [
        {"metadata": {"name": "a"}, "status": ready},
        {"metadata": {"name": "a-1"}, "status": ready},
        {"metadata": {"name": "b"}, "status": ready},
        {"metadata": {"name": "b-1"}},
        {"metadata": {"name": "c"}, "status": ready},
        {"metadata": {"name": "c-1", "deletionTimestamp": "now"}, "status": ready},
    ]
    of = {f"{name}{more}": name for name in "abc" for more in ("", "-1")}
    assert count_workers(found, of) == (2, 1, 1)


def test_a_scaled_pool_gets_whole_workers():
    async def scenario(world: World) -> None:
        pool = await world.pool("decode")
        await world.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], {"spec": {"replicas": 2}})
        await world.settle()
        assert [pod["metadata"]["labels"][MEMBER] for pod in await pods(world)] == ["0", "1", "0", "1"]
        pool = await world.pool("decode")
        await world.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], {"spec": {"replicas": 1}})
        await world.settle()
        assert [pod["metadata"]["labels"][MEMBER] for pod in await pods(world)] == ["0", "1"]

    play(scenario)


def test_an_exclusive_tier_keeps_away_from_a_fleet_of_its_name_in_another_namespace():
    """They have every other label in common."""

    async def scenario(world: World) -> None:
        pod = (await pods(world, "prefill"))[0]
        mine = pod["metadata"]["labels"]
        terms = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        older = {key: value for key, value in mine.items() if key != names.NAMESPACE}
        assert [any(meets(term, who) for term in terms) for who in (mine, older, {**mine, names.NAMESPACE: "another"})] == [
            False, False, True,
        ]  # fmt: skip

    play(scenario, placement={"topologyKey": "rack", "exclusive": True})


def meets(term: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether an affinity term without a bound to namespaces is about a pod with these labels."""
    selector = term["labelSelector"]
    wanted = {"Exists": lambda key, _: key in labels, "NotIn": lambda key, values: labels.get(key) not in values}
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        wanted[one["operator"]](one["key"], one.get("values")) for one in selector.get("matchExpressions", ())
    )


def test_an_exclusive_worker_is_told_from_all_others_by_one_label():
    """A namespaceSelector with NotIn would mean every namespace in kube-scheduler 1.34 to 1.36: followers stayed Pending."""

    async def scenario(world: World) -> None:
        keys = set()
        for role in ("prefill", "decode"):
            (key,) = {pod["metadata"]["labels"][GROUP_KEY] for pod in await pods(world, role)}
            keys.add(key)
            for pod in await pods(world, role):
                (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
                assert term["namespaceSelector"] == {}
                assert term["labelSelector"]["matchExpressions"][1] == {"key": GROUP_KEY, "operator": "NotIn", "values": [key]}
        assert len(keys) == 2

    play(scenario, placement={"gang": {"topologyKey": "rack", "policy": "exclusive"}})


def test_a_quota_that_cuts_a_worker_short_is_tried_now_and_then():
    """Incident: the leader had a place in the quota and its follower none: it was made and deleted again, pass after pass."""

    async def scenario(world: World) -> None:
        cut = ForbiddenError('pods "x" is forbidden: exceeded quota: gpus, requested: 1, used: 2, limited: 2')
        world.api.refuse = lambda verb, kind, name: cut if (verb, kind) == ("create", POD) and name.count("-") == 5 else None
        follower = (await pods(world))[1]["metadata"]["name"]
        await world.user.delete(POD, NAMESPACE, follower, grace_s=0)
        made = 0
        for _ in range(61):
            made += sum(write[:2] == ("create", "Pod") for write in await world.step())
        assert 2 <= made <= 4
        limited = await world.condition("CapacityLimited")
        assert (limited["status"], limited["reason"]) == ("True", "BackedOut")
        assert "exceeded quota: gpus" in limited["message"]
        assert "tried again at" in limited["message"]
        world.api.refuse = lambda verb, kind, name: None
        for _ in range(22):
            world.operator.touch((NAMESPACE, "f"))
            await world.step()
        assert sorted((await told(world)).values()) == ["serving", "serving"]

    async def whole() -> None:
        world = World()
        await world.user.apply(manifest(tiers=[TIER], scaling={"capacityWait": "20s"}))
        await world.settle()
        await scenario(world)

    asyncio.run(whole())


SINGLE = {"parallelism": {"nodes": 1}}


async def between_workers(world: World) -> dict[str, Any]:
    """Of the NetworkPolicy: what workers may reach of each other."""
    found = await world.store.list(NETWORK_POLICY, NAMESPACE)
    return next(rule for rule in found[0]["spec"]["ingress"] if "podSelector" in rule["from"][0])


def test_what_workers_share_fits_those_of_the_shape_before_as_long_as_they_are_there():
    """Nodes 2 → 1: at the first pass engines of the old workers lost each other's ports (NCCL takes any), and a rollout that was
    paused or rolled back left it so for ever; evictions were counted in pods of one shape or the other, by chance."""

    async def scenario(world: World) -> None:
        assert "ports" not in await between_workers(world)
        await world.user.apply(manifest(tiers=[{**TIER, **SINGLE}], rollout={"paused": True}))
        await world.settle(20)
        assert "ports" not in await between_workers(world)
        assert await world.exists(SERVICE, "f-workers")
        await world.user.apply(manifest(tiers=[{**TIER, **SINGLE}]))
        least = set()
        for _ in range(30):
            await world.step()
            both = len({pod["metadata"]["labels"][REVISION] for pod in await pods(world)}) > 1
            if both:
                least.add((await world.store.get(PDB, NAMESPACE, "f-t-decode"))["spec"]["minAvailable"])
        assert least == {3}
        assert "ports" in await between_workers(world)
        assert (await world.store.get(PDB, NAMESPACE, "f-t-decode"))["spec"]["minAvailable"] == 1
        assert not await world.exists(SERVICE, "f-workers")

    play(scenario)


async def nothing() -> None:
    """Kubelets are away."""


def test_workers_of_a_tier_that_left_the_spec_keep_their_names_and_ports():
    async def scenario(world: World) -> None:
        kubelet, world.kubelet = world.kubelet, nothing  # nobody who comes is ready
        await world.user.apply(manifest(tiers=[{**TIER, **SINGLE, "name": "u"}]))
        for _ in range(5):
            await world.step()
        assert await pods(world)
        assert "ports" not in await between_workers(world)
        assert await world.exists(SERVICE, "f-workers")
        world.kubelet = kubelet
        await world.settle(40)
        assert "ports" in await between_workers(world)
        assert not await world.exists(SERVICE, "f-workers")

    play(scenario)


def test_side_channels_of_more_ranks_stay_open_until_their_workers_are_gone():
    """Data 4 → 1: decode workers asked prefill ranks 1 to 3 for KV on ports that the policy had just closed."""
    ranks = {"name": "t", "accelerator": {"type": "h100-sxm"}, "parallelism": {"data": 4}}

    async def whole() -> None:
        world, engine = World(), {"type": "vllm", "image": "v"}
        await world.user.apply(manifest(tiers=[ranks], engine=engine))
        await world.settle(20)
        before = await between_workers(world)
        await world.user.apply(manifest(tiers=[{**ranks, "parallelism": {}}], engine=engine, rollout={"paused": True}))
        await world.settle(20)
        assert await between_workers(world) == before
        await world.user.apply(manifest(tiers=[{**ranks, "parallelism": {}}], engine=engine))
        await world.settle(40)
        assert "endPort" not in (await between_workers(world))["ports"][0]

    asyncio.run(whole())
