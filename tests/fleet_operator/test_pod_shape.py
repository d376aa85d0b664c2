"""What the pod's fields do once they are in a cluster: restarts, ports, policies, claims."""

from __future__ import annotations

import asyncio
import copy
import json
from itertools import combinations
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_api.v1alpha1.fabric import HOST_PORT_RANKS
from fleet_operator.claims import short_of_claims
from fleet_operator.cluster.interface import CLAIM_TEMPLATE, CONFIG_MAP, DEPLOYMENT, FLEET, NETWORK_POLICY, POD
from fleet_operator.flip.follow import DEFAULT_PORTS
from fleet_operator.names import ROLE
from fleet_operator.reconciler import CHILDREN
from fleet_operator.render.network import PORTS, port_of, render_policy, worker_ports
from fleet_operator.render.revision import template_of
from fleet_operator.render.worker import at_ordinal, pod_spec
from fleet_operator.settings import Platform
from fleet_planner.wanted import PodWanted
from fleet_wire.endpoints import Endpoint
from fleet_worker.config import CONFIG_ENV
from tests.fleet_api.bad_manifests import WHOLE_TEMPLATE
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

CLAIMED = [{"name": name, "resourceClaimTemplateName": f"p-{name}"} for name in ("nic", "gpu")]

HOST = {"via": "hostNetwork", "hostPorts": {"first": 20_000}}


def tiers(**more: Any) -> list[dict[str, Any]]:
    return [{"name": "t", "accelerator": {"type": "h100"}, **more}]


def revision(**spec: Any) -> str:
    fleet = parse_fleet(manifest(**spec))
    return template_of(fleet, fleet.spec.tiers[0], {}, Platform()).revision


BASE: dict[str, Any] = {"engine": {"type": "vllm"}, "tiers": tiers()}


@pytest.mark.parametrize(
    ("change", "restarts"),
    [
        ({"tiers": tiers(decode={"podTemplate": {"labels": {"team": "ml"}, "annotations": {"note": "x"}}})}, False),
        ({"networkPolicy": {"enabled": False}}, False),
        ({"tiers": tiers(decode={"maxReplicas": 9})}, False),
        ({"tiers": tiers(decode={"podTemplate": {"env": [{"name": "A", "value": "1"}]}})}, True),
        ({"tiers": tiers(decode={"args": ["--x"]})}, True),
        ({"tiers": tiers(parallelism={"tensor": 2})}, True),
        ({"tiers": tiers(quantization="fp8")}, True),
        ({"tiers": tiers(sharedMemory="1Gi")}, True),
        ({"tiers": tiers(placement={"topologyKey": "rack"})}, True),
        ({"tiers": tiers(kvTransfer={"via": "multus", "network": "roce"})}, True),
        ({"tiers": tiers(kvTransfer=HOST)}, True),
        ({"tiers": tiers(kvTransfer={"via": "dra", "dra": {"nic": "n"}})}, True),
    ],
)  # fmt: skip
def test_what_a_change_restarts(change: dict[str, Any], restarts: bool):
    assert (revision(**BASE) != revision(**{**BASE, **change})) == restarts


def test_a_class_of_devices_is_part_of_the_revision():
    classes = [revision(**{**BASE, "tiers": tiers(kvTransfer={"via": "dra", "dra": {"nic": nic}})}) for nic in ("a", "b")]
    assert classes[0] != classes[1]


def test_a_label_edit_leaves_every_pod_alone_and_new_pods_carry_it():
    async def scenario(world: World) -> None:
        before = {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE, {ROLE: "decode"})}
        edited = copy.deepcopy(manifest(tiers=tiers(decode={"podTemplate": {"labels": {"team": "ml"}}})))
        await world.user.apply(edited)
        await world.settle()
        pods = await world.store.list(POD, NAMESPACE, {ROLE: "decode"})
        assert {pod["metadata"]["uid"] for pod in pods} == before
        await world.user.delete(POD, NAMESPACE, pods[0]["metadata"]["name"], grace_s=0)
        await world.settle()
        (made,) = [p for p in await world.store.list(POD, NAMESPACE, {ROLE: "decode"}) if p["metadata"]["uid"] not in before]
        assert made["metadata"]["labels"]["team"] == "ml"

    play(scenario, tiers=tiers())


def test_neighbours_on_one_host_have_other_ports():
    taken: set[int] = set()
    for role in ("prefill", "decode"):
        for ordinal in range(8):
            ports = worker_ports(20_000, role, ordinal)  # type: ignore[arg-type]
            mine = {
                ports.http,
                ports.agent,
                ports.kv_events,
                ports.kv_replay,
                ports.dp_rpc,
                *range(ports.side_channel, ports.side_channel + 16),
            }
            assert not mine & taken
            taken |= mine
    assert min(taken) == 20_000
    assert max(taken) < 20_512


def test_as_many_ranks_fit_into_a_workers_ports_as_admission_says():
    assert worker_ports(20_000, "prefill", 0).side_channel + HOST_PORT_RANKS == worker_ports(20_000, "decode", 0).http


@pytest.mark.parametrize("shapes", [(1, 1), (24, 24), (25, 25), (64, 64), (64, 1), (1, 32)])
def test_what_shares_a_node_shares_no_port(shapes: tuple[int, int]):
    """Incident: side channels of data parallel ranks from 24 on took the ports of a neighbour. The scheduler knew nothing of it,
    and one of the two could not start. `shapes`: ranks of prefill and of decode workers."""
    workers = []
    for role, ranks in zip(("prefill", "decode"), shapes, strict=True):
        shape = {"parallelism": {"data": ranks, "nodes": max(1, ranks // 8) if ranks % 8 == 0 else 1}}
        of = tiers(kvTransfer=HOST, **{role: shape})
        fleet = parse_fleet(manifest(engine={"type": "vllm"}, tiers=of))
        template = template_of(fleet, fleet.spec.tiers[0], {}, Platform())
        for ordinal in range(20):
            spec = pod_spec(fleet, fleet.spec.tiers[0], role, template, Platform())
            (container,) = at_ordinal(spec, role, ordinal, 20_000)["containers"]
            told = next(variable for variable in container["env"] if variable["name"] == CONFIG_ENV)
            ports = json.loads(told["value"])["ports"]
            begin = ports.pop("side_channel")
            declared = [port["hostPort"] for port in container["ports"]]
            assert len(declared) == len(set(declared))
            used = {*ports.values(), *range(begin, begin + ranks)}
            assert 20_000 <= min(used) <= max(used) < 20_512
            workers.append((set(declared), used))
    for (declared, used), (others, also) in combinations(workers, 2):
        assert declared & others or not used & also, "the scheduler would put both on one node"


def test_a_configuration_of_another_version_keeps_its_fields_on_the_hosts_network():
    """After a downgrade no worker of such a fleet could be replaced (InternalError in each pass); after an upgrade new workers
    got fields that their older image refuses."""
    fleet = parse_fleet(manifest(engine={"type": "vllm"}, tiers=tiers(kvTransfer=HOST)))
    template = template_of(fleet, fleet.spec.tiers[0], {}, Platform())
    stored = pod_spec(fleet, fleet.spec.tiers[0], "decode", template, Platform())
    told = next(variable for variable in stored["containers"][0]["env"] if variable["name"] == CONFIG_ENV)
    before = json.loads(told["value"])
    before["futureField"], before["ports"]["future"] = {"a": 1}, 4242
    del before["adapters"], before["ports"]["master"]
    told["value"] = json.dumps(before)
    (container,) = at_ordinal(stored, "decode", 3, 20_000)["containers"]
    after = json.loads(next(variable["value"] for variable in container["env"] if variable["name"] == CONFIG_ENV))
    ports = worker_ports(20_000, "decode", 3)
    known = {"http": ports.http, "agent": ports.agent, "side_channel": ports.side_channel}
    assert {name: after["ports"][name] for name in known} == known
    assert after == {**before, "ports": {**after["ports"], "future": 4242}}
    assert after["ports"].keys() == before["ports"].keys()


def test_the_routers_document_carries_the_ports_that_pods_have():
    async def scenario(world: World) -> None:
        document = json.loads((await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"]["endpoints.json"])
        ports = {worker["name"]: (worker["http_port"], worker["agent_port"]) for worker in document["workers"]}
        for pod in await world.store.list(POD, NAMESPACE):
            if pod["metadata"]["labels"][ROLE] in ("prefill", "decode"):
                (container,) = pod["spec"]["containers"]
                named = {port["name"]: port["containerPort"] for port in container["ports"]}
                assert ports[pod["metadata"]["name"]] == (named["http"], named["agent"])
                assert container["livenessProbe"]["httpGet"]["port"] == named["agent"]
                assert all(port["hostPort"] == port["containerPort"] for port in container["ports"])
        assert len(set(ports.values())) == len(ports) >= 3

    play(scenario, tiers=tiers(kvTransfer=HOST))


def test_the_policy_goes_when_it_is_switched_off():
    async def scenario(world: World) -> None:
        assert await world.exists(NETWORK_POLICY, "f-workers")
        await world.user.apply(manifest(tiers=tiers(), networkPolicy={"enabled": False}))
        await world.settle()
        assert not await world.exists(NETWORK_POLICY, "f-workers")
        assert await world.touch() == []

    play(scenario, tiers=tiers())


def test_who_reaches_a_worker():
    fleet = parse_fleet(
        manifest(networkPolicy={"metricsFrom": ["monitoring"]}, engine={"type": "vllm"}, tiers=tiers(parallelism={"data": 4}))
    )
    owner = {"apiVersion": "v1", "kind": "x", "metadata": {"name": "f", "uid": "u"}}
    spec = render_policy(fleet, owner, Platform(operator_namespace="ops"))["spec"]
    kv, router, agents, engines = spec["ingress"]
    assert kv["from"] == [{"podSelector": spec["podSelector"]}]  # no namespaceSelector: pods of this namespace only
    assert spec["podSelector"]["matchLabels"] == {"inferencefleet.io/fleet": "f"}
    assert kv["ports"][0] == {"protocol": "TCP", "port": 5600, "endPort": 5603}
    assert [port["port"] for port in router["ports"]] == [PORTS.http, PORTS.agent, PORTS.kv_events, PORTS.kv_replay]
    assert [entry["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for entry in agents["from"]] == [
        "monitoring",
        "ops",
    ]
    assert [port["port"] for port in agents["ports"]] == [PORTS.agent]
    assert [entry["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for entry in engines["from"]] == ["ops"]
    assert [port["port"] for port in engines["ports"]] == [PORTS.http]


def test_whoever_must_reach_a_port_of_a_worker_may():
    """Routers ask agents on each new connection whose address it is, and waited a second for them where the network enforces
    policies; there the operator could prove no flip either, because it asks engines for tokens."""
    owner = {"apiVersion": "v1", "kind": "x", "metadata": {"name": "f", "uid": "u"}}
    spec = render_policy(parse_fleet(manifest(tiers=tiers())), owner, Platform(operator_namespace="ops"))["spec"]

    def reached(by: dict[str, Any]) -> set[int]:
        return {port["port"] for rule in spec["ingress"] if by in rule["from"] for port in rule["ports"]}

    told = {"http_port": PORTS.http, "agent_port": PORTS.agent, "events_port": PORTS.kv_events, "replay_port": PORTS.kv_replay}
    assert {field for field in Endpoint.__struct_fields__ if field.endswith("_port")} == told.keys()
    labels = {"inferencefleet.io/fleet": "f", "inferencefleet.io/role": "router"}
    assert reached({"podSelector": {"matchLabels": labels}}) == set(told.values())
    assert reached({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ops"}}}) == set(DEFAULT_PORTS.values())


def test_a_workers_port_on_the_hosts_network_is_its_own_whoever_else_calls_one_so():
    """Routers sent requests to the port of a container that somebody's webhook had put before the worker's."""
    others = {"name": "agent-of-others", "ports": [{"name": "http", "containerPort": 8126}]}
    own = {"name": "worker", "ports": [{"name": "http", "containerPort": 20_008}]}
    for containers in ([others, own], [own, others]):
        assert port_of({"spec": {"hostNetwork": True, "containers": containers}}, "http", PORTS.http) == 20_008
    assert port_of({"spec": {"containers": [others]}}, "http", PORTS.http) == PORTS.http


def test_claims_belong_to_their_pool_and_go_with_it():
    dra = {"via": "dra", "dra": {"gpu": "gpu.nvidia.com", "nic": "mrdma.google.com"}}

    async def scenario(world: World) -> None:
        templates = await world.store.list(CLAIM_TEMPLATE, NAMESPACE)
        pods = [p for p in await world.store.list(POD, NAMESPACE) if p["metadata"]["labels"][ROLE] != "router"]
        named = {claim["resourceClaimTemplateName"] for pod in pods for claim in pod["spec"]["resourceClaims"]}
        assert {template["metadata"]["name"] for template in templates} == named
        assert {template["metadata"]["ownerReferences"][0]["kind"] for template in templates} == {"WorkerPool"}
        assert not any("/" in name for pod in pods for name in pod["spec"]["containers"][0]["resources"]["requests"])
        await world.user.apply(manifest(tiers=tiers(kvTransfer={**dra, "count": 2})))
        await world.settle(40)
        after = {template["metadata"]["name"] for template in await world.store.list(CLAIM_TEMPLATE, NAMESPACE)}
        assert len(after) == 2
        assert not after & named

    play(scenario, tiers=tiers(kvTransfer=dra))


def test_somebody_elses_claim_template_of_our_name_is_left_alone_and_told():
    """The operator wrote over it, owned it, and took it along when the pool went (O13)."""
    wish = manifest(tiers=tiers(kvTransfer={"via": "dra", "dra": {"gpu": "gpu.nvidia.com", "nic": "mrdma.google.com"}}))

    async def roles(world: World) -> set[str]:
        return {pod["metadata"]["labels"][ROLE] for pod in await world.store.list(POD, NAMESPACE)}

    async def scenario(world: World) -> None:
        await world.user.apply(wish)
        await world.settle(40)
        (ours,) = [t for t in await world.store.list(CLAIM_TEMPLATE, NAMESPACE) if "-decode-" in t["metadata"]["name"]]
        await world.user.delete(FLEET, NAMESPACE, "f")
        await world.settle(40)
        meta = {"name": ours["metadata"]["name"], "namespace": NAMESPACE, "labels": {"whose": "theirs"}}
        theirs = await world.user.create({"apiVersion": ours["apiVersion"], "kind": ours["kind"], "metadata": meta, "spec": {}})
        await world.user.apply(wish)
        await world.settle(40)
        assert await world.store.find(CLAIM_TEMPLATE, NAMESPACE, meta["name"]) == theirs
        assert "decode" not in await roles(world), "it would get devices that somebody else wishes"
        fleet = await world.store.get(FLEET, NAMESPACE, "f")
        (told,) = [one for one in fleet["status"]["conditions"] if one["type"] == "Provisioned"]
        assert (told["status"], told["reason"]) == ("False", "NameConflict")
        assert f"ResourceClaimTemplate {meta['name']} exists and belongs to somebody else" in told["message"]
        await world.user.delete(CLAIM_TEMPLATE, NAMESPACE, meta["name"])
        world.operator.touch((NAMESPACE, "f"))
        await world.settle(40)
        assert await roles(world) >= {"prefill", "decode"}

    play(scenario)


def test_what_no_watch_tells_is_not_kept():
    """Claims of every revision, and PodGroups of every worker, that there ever were stayed in the cache, also when their fleet
    was gone."""
    dra = {"via": "dra", "dra": {"gpu": "gpu.nvidia.com", "nic": "mrdma.google.com"}}
    groups = {"parallelism": {"nodes": 2, "tensor": 2}, "placement": {"podGroup": "volcano"}}

    async def scenario(world: World) -> None:
        kept = {kind for kind, _ in world.operator._objects.children((NAMESPACE, "f"))}
        assert kept <= {kind.kind for kind in CHILDREN}
        assert "Pod" in kept

    play(scenario, engine={"type": "vllm"}, tiers=tiers(kvTransfer=dra, **groups))


def test_deleted_claims_are_put_back_while_a_pod_waits_for_them_and_only_then():
    dra = {"via": "dra", "dra": {"gpu": "gpu.nvidia.com", "nic": "mrdma.google.com"}}

    async def scenario() -> None:
        world = World()

        async def again() -> tuple[int, int]:
            """Templates before and after a pass, all of them deleted before."""
            for template in await world.store.list(CLAIM_TEMPLATE, NAMESPACE):
                await world.user.delete(CLAIM_TEMPLATE, NAMESPACE, template["metadata"]["name"])
            before = len(await world.store.list(CLAIM_TEMPLATE, NAMESPACE))
            world.operator.touch((NAMESPACE, "f"))
            await world.look()
            await world.operator.drain()
            return before, len(await world.store.list(CLAIM_TEMPLATE, NAMESPACE))

        await world.user.apply(manifest(tiers=tiers(kvTransfer=dra)))
        for _ in range(4):
            await world.look()
            await world.operator.drain()  # no kubelet: every pod waits
        assert await again() == (0, 2)
        for pod in await world.store.list(POD, NAMESPACE):
            made = [{"name": claim["name"], "resourceClaimName": "c"} for claim in pod["spec"].get("resourceClaims") or []]
            await world.user.patch_status(POD, NAMESPACE, pod["metadata"]["name"], {"resourceClaimStatuses": made})
        assert await again() == (0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "short"),
    [
        ({}, True),
        ({"status": {"resourceClaimStatuses": [{"name": "nic"}]}}, True),  # one of two
        ({"status": {"resourceClaimStatuses": [{"name": "nic"}, {"name": "gpu"}]}}, False),
        ({"spec": {"nodeName": "n", "resourceClaims": CLAIMED}}, False),
        ({"spec": {"resourceClaims": [{"name": "own", "resourceClaimName": "c"}]}}, False),  # not of a template
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, False),
        ({"metadata": {"labels": {"inferencefleet.io/pool": "p"}}}, False),  # somebody took labels away
    ],
    ids=["waits", "waits-for-one", "has-them", "has-a-node", "claim-of-its-own", "goes", "unmarked"],
)
def test_whose_claims_are_put_again(change: dict[str, Any], short: bool):
    marks = {"pool": "p", "tier": "t", "role": "decode", "revision": "r"}
    meta = {"name": "p-0", "labels": {f"inferencefleet.io/{name}": value for name, value in marks.items()}}
    pod = {"metadata": meta | change.get("metadata", {}), "spec": change.get("spec", {"resourceClaims": CLAIMED})}
    found = short_of_claims({("Pod", "p-0"): pod | {"status": change.get("status", {})}, ("Service", "p-0"): {}})
    assert found == ([PodWanted("p-0", "p", "t", "decode", "r", 0)] if short else [])


@pytest.mark.parametrize(("drain", "pod", "hung"), [("9m", 555, 60), ("1m", 75, 60), ("20s", 35, 35)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_hangs_is_not_waited_for_as_one_that_drains(role: Any, drain: str, pod: int, hung: int):
    """Its kubelet waited for the whole drain time before it restarted an agent that answers nothing."""
    fleet = parse_fleet(
        manifest(rollout={"drainTimeout": drain}, tiers=tiers(parallelism={"tensor": 2, "nodes": 2}), engine={"type": "vllm"})
    )
    (tier,) = fleet.spec.tiers
    spec = pod_spec(fleet, tier, role, template_of(fleet, tier, {}, Platform()), Platform())
    (container,) = spec["containers"]
    assert spec["terminationGracePeriodSeconds"] == pod
    graces = [
        container[probe].get("terminationGracePeriodSeconds") for probe in ("livenessProbe", "startupProbe", "readinessProbe")
    ]
    assert graces == [hung, hung, None]


@pytest.mark.parametrize(("processes", "drain", "pod", "hung"), [(1, "9m", 550, 15), (4, "9m", 550, 60), (1, "2s", 12, 12)])
def test_a_router_that_hangs_is_not_waited_for_as_one_that_drains(processes: int, drain: str, pod: int, hung: int):
    """Behind one that answers no probe stands the whole fleet. Of several processes the others may serve."""

    async def scenario(world: World) -> None:
        spec = (await world.store.get(DEPLOYMENT, NAMESPACE, "f-router"))["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert spec["terminationGracePeriodSeconds"] == pod
        graces = [container[probe].get("terminationGracePeriodSeconds") for probe in ("livenessProbe", "startupProbe")]
        assert graces == [hung, hung]

    play(scenario, rollout={"drainTimeout": drain}, routing={"processes": processes})


def test_no_secret_is_anywhere_but_by_reference():
    secret = {"name": "hf-token", "key": "HF"}
    fleet = manifest(
        model={"source": "hf://o/n", "tokenSecretRef": secret},
        tiers=tiers(decode={"podTemplate": WHOLE_TEMPLATE}),
        engine={"type": "vllm"},
    )

    async def scenario(world: World) -> None:
        await world.user.apply(fleet)
        await world.settle(40)
        for pod in await world.store.list(POD, NAMESPACE, {ROLE: "decode"}):
            env = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
            assert env["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}
            assert "hf-token" not in env["FLEET_WORKER_CONFIG"]["value"]
        assert (await world.store.get(FLEET, NAMESPACE, "f"))["status"]["conditions"]

    play(scenario)


def test_the_template_follows_and_never_replaces():
    async def scenario(world: World) -> None:
        (pod, *_) = await world.store.list(POD, NAMESPACE, {ROLE: "decode"})
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        assert [volume["name"] for volume in spec["volumes"]][:3] == ["model", "shm", "tmp"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "memory": "64Gi", "hugepages-2Mi": "5Gi"}
        assert container["resources"]["requests"]["cpu"] == "500m"
        assert container["resources"]["requests"]["nvidia.com/gpu"] == "1"
        assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
        assert spec["nodeSelector"] == {"zone": "a", "nvidia.com/gpu.product": "H100"}
        near = spec["affinity"]["podAffinity"]
        assert len(near["preferredDuringSchedulingIgnoredDuringExecution"]) == 1
        assert near["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"] == "kubernetes.io/hostname"
        assert (spec["schedulerName"], spec["serviceAccountName"]) == ("volcano", "puller")
        assert spec["automountServiceAccountToken"] is False

    play(
        scenario,
        tiers=[
            {"name": "t", "accelerator": {"type": "h100", "nodeSelector": {"zone": "a"}}, "placement": {"topologyKey": "rack"},
             "decode": {"podTemplate": WHOLE_TEMPLATE}},
        ],
    )  # fmt: skip


def test_another_number_of_routers_restarts_none_of_them():
    async def scenario(world: World) -> None:
        async def pod_of_a_router() -> Any:
            return (await world.store.get(DEPLOYMENT, NAMESPACE, "f-router"))["spec"]["template"]

        one = await pod_of_a_router()
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"routing": {"replicas": 3}}})
        await world.settle()
        assert (await world.store.get(DEPLOYMENT, NAMESPACE, "f-router"))["spec"]["replicas"] == 3
        assert await pod_of_a_router() == one

    play(scenario)
