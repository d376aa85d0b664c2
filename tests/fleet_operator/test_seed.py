"""Whom a new worker may take hot prefixes from: its pod says so when it is made, and no later."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from fleet_api.parse import parse_fleet
from fleet_operator.cluster.interface import POD, POOL
from fleet_operator.names import MEMBER, REVISION, ROLE, SEED_PEERS, TIER
from fleet_operator.render.seed import seed_peers, seed_settings
from fleet_planner.wanted import PodWanted
from fleet_worker.agent.seed import parse_peers
from fleet_worker.config import CONFIG_ENV, SEED_PEERS_ENV, SeedSettings
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

WANTED = PodWanted("new", "pool", "t", "prefill", "r1", 0)


def pod(name: str, ip: str | None = "10.0.0.1", ready: str = "True", **change: Any) -> dict[str, Any]:
    labels = {TIER: "t", ROLE: "prefill", REVISION: "r1", **change.pop("labels", {})}
    meta = {"name": name, "labels": labels, "annotations": change.pop("annotations", {}), **change.pop("meta", {})}
    ports = [{"name": "kv", "containerPort": change.pop("port", 5600)}]
    status = {"conditions": [{"type": "Ready", "status": ready}]} | ({"podIP": ip} if ip else {})
    return {"metadata": meta, "spec": {"containers": [{"ports": ports}]}, "status": status}


def peers(*pods: dict[str, Any], wanted: PodWanted = WANTED) -> str:
    return seed_peers(wanted, {("Pod", one["metadata"]["name"]): one for one in pods})


@pytest.mark.parametrize(
    ("pods", "told"),
    [
        ([], ""),
        ([pod("a")], "10.0.0.1:5600"),
        ([pod("b", "10.0.0.2", port=5608), pod("a")], "10.0.0.1:5600,10.0.0.2:5608"),
        ([pod("a", "fd00::1")], "[fd00::1]:5600"),
        ([pod("a", ready="False")], ""),
        ([pod("a", ip=None)], ""),
        ([pod("a", meta={"deletionTimestamp": "now"})], ""),
        ([pod("new")], ""),
        ([pod("a", labels={REVISION: "r2"})], ""),
        ([pod("a", labels={ROLE: "decode"})], ""),
        ([pod("a", labels={TIER: "u"})], ""),
        ([pod("a", annotations={MEMBER: "1"})], ""),
        ([pod("a", annotations={MEMBER: "0"})], "10.0.0.1:5600"),
        ([{"metadata": {"name": "a"}}], ""),
    ],
)
def test_ready_workers_of_its_tier_role_and_revision_are_named(pods: list[dict[str, Any]], told: str):
    assert peers(*pods) == told
    assert len(parse_peers(told, "10.0.0.9")) == told.count(",") + bool(told), "the agent reads what is written"


def test_each_new_worker_begins_at_another_one_and_few_are_named():
    many = [pod(f"p{n}", f"10.0.0.{n}") for n in range(6)]
    second = PodWanted("new", "pool", "t", "prefill", "r1", 5)
    assert peers(*many).split(",") == [f"10.0.0.{n}:5600" for n in (0, 1, 2, 3)]
    assert peers(*many, wanted=second).split(",") == [f"10.0.0.{n}:5600" for n in (5, 0, 1, 2)]


def test_a_follower_has_no_cache_of_its_own():
    assert peers(pod("a"), wanted=PodWanted("new", "pool", "t", "prefill", "r1", 0, member=1)) == ""


@pytest.mark.parametrize(
    ("engine", "guarded", "seed", "settings"),
    [
        ("torch", True, {}, SeedSettings(share=0.25, timeout_s=5.0)),
        ("torch", True, {"seed": {"maxPercent": 10, "timeout": "1500ms"}}, SeedSettings(share=0.1, timeout_s=1.5)),
        ("torch", True, {"seed": {"enabled": False}}, UNSET),
        # whoever reaches the side channel may ask, and is told the tokens of prompts
        ("torch", False, {}, UNSET),
        ("torch", True, {"via": "hostNetwork"}, UNSET),
        ("torch", False, {"seed": {"enabled": True}}, SeedSettings(share=0.25, timeout_s=5.0)),
        ("torch", True, {"via": "hostNetwork", "seed": {}}, SeedSettings(share=0.25, timeout_s=5.0)),
        ("vllm", True, {}, UNSET),
    ],
)
def test_what_the_worker_is_told(engine: str, guarded: bool, seed: dict[str, Any], settings: SeedSettings | UnsetType):
    fleet = parse_fleet(
        manifest(
            engine={"type": engine},
            tiers=[{"name": "t", "accelerator": {"type": "cpu"}, "kvTransfer": seed}],
            networkPolicy={"enabled": guarded},
        )
    )
    assert seed_settings(fleet, fleet.spec.tiers[0]) == settings
    if engine == "torch":
        assert fleet.resolved()["tiers"][0]["kvTransfer"]["seed"]["enabled"] is (settings is not UNSET)


def workers(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in found if one["metadata"]["labels"].get(ROLE) in ("prefill", "decode")}


async def grow(world: World) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Workers from before, and those that came when both pools grew by one."""
    before = workers(await world.store.list(POD, NAMESPACE))
    for role in ("prefill", "decode"):
        pool = await world.pool(role)
        replicas = pool["spec"]["replicas"] + 1
        await world.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], {"spec": {"replicas": replicas}})
    await world.settle()
    after = workers(await world.store.list(POD, NAMESPACE))
    return before, {name: one for name, one in after.items() if name not in before}


def test_a_worker_that_joins_is_told_who_was_there():
    async def scenario(world: World) -> None:
        before, new = await grow(world)
        assert all(SEED_PEERS not in one["metadata"]["annotations"] for one in before.values()), "they came together"
        assert len(new) == 2
        for one in new.values():
            role = one["metadata"]["labels"][ROLE]
            there = [pod["status"]["podIP"] for pod in before.values() if pod["metadata"]["labels"][ROLE] == role]
            assert one["metadata"]["annotations"][SEED_PEERS] == ",".join(f"{ip}:5600" for ip in there)
            env = {item["name"]: item for item in one["spec"]["containers"][0]["env"]}
            assert env[SEED_PEERS_ENV]["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.annotations['{SEED_PEERS}']"
            assert msgspec.json.decode(env[CONFIG_ENV]["value"])["kv"]["seed"] == {"share": 0.25, "timeout_s": 5.0}

    play(scenario)


def test_without_seeding_nobody_is_told_anything():
    async def scenario(world: World) -> None:
        _, new = await grow(world)
        assert len(new) == 2
        for one in new.values():
            assert SEED_PEERS not in one["metadata"]["annotations"]
            env = {item["name"]: item for item in one["spec"]["containers"][0]["env"]}
            assert SEED_PEERS_ENV not in env
            assert "seed" not in msgspec.json.decode(env[CONFIG_ENV]["value"])["kv"]

    off = {"seed": {"enabled": False}}
    play(scenario, tiers=[{"name": "t", "accelerator": {"type": "cpu"}, "kvTransfer": off}])
