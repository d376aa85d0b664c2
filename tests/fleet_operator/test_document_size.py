"""The routers' document is one ConfigMap: how large a worker is in it, what is not made for want of room, what happens beyond."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fleet_api.parse import parse_fleet
from fleet_operator import document_size
from fleet_operator.cluster.interface import CONFIG_MAP, POD, POOL
from fleet_operator.document_size import TOO_LARGE, too_large
from fleet_operator.render.fleet import render_documents
from fleet_planner import document
from fleet_planner.capacity import fit_budget
from fleet_planner.document import MOST_BYTES, worker_bytes, workers_most
from fleet_planner.money import Purse
from fleet_planner.ratio import bounds_of
from fleet_planner.reconcile import reconcile
from fleet_planner.roles import ROLES
from fleet_planner.types import Observed
from fleet_planner.wanted import Target
from tests.fleet_operator.world import NAMESPACE, World, manifest, play
from tests.fleet_planner.test_reconcile import NOW, carry_out, pod, start
from tests.fleet_planner.test_reconcile import fleet as planned

OWNER = {"apiVersion": "v1", "kind": "x", "metadata": {"name": "f", "uid": "u"}}
IPV6 = "2001:0db8:0000:0000:0000:ff00:0042:8329"


def a_fleet(name: str, tier: str, adapters: int, longest: int, engine: str = "torch") -> Any:
    made = [{"name": f"{n:02}" + "a" * (longest - 2), "source": f"file:///m/{n}"} for n in range(adapters)]
    model = {"source": "file:///m", "adapters": made, **({"maxSimultaneousAdapters": 64} if adapters else {})}
    device = {"type": "cpu"} if engine == "torch" else {"type": "h100"}
    raw = manifest(name, model=model, engine={"type": engine}, tiers=[{"name": tier, "accelerator": device}])
    raw["metadata"]["uid"] = "u"
    return parse_fleet(raw)


def size_of(fleet: Any, count: int, state: str) -> int:
    """Bytes of all values of the ConfigMap with so many workers, each with all adapters."""
    plan = reconcile(planned(), start(), NOW)
    names = tuple(sorted((adapter.name, "f" * 64) for adapter in fleet.spec.model.adapters))
    tier = fleet.spec.tiers[0].name
    targets = tuple(
        Target(f"{fleet.metadata.name}-{tier}-prefill-aaaaaaaa-{1000 + n}", "0" * 36, IPV6, "prefill", tier, "aaaaaaaa", "c" * 16,
               state, names)
        for n in range(count)
    )  # fmt: skip
    data = render_documents(fleet, replace(plan, targets=targets), OWNER, {})["data"]
    return sum(len(value.encode()) for value in data.values())


NAMED = [("f", "t"), ("f" * 20, "t" * 20), ("f" * 30, "t" * 10)]


@pytest.mark.parametrize(
    ("names", "adapters", "engine"), list(product(NAMED, [(0, 2), (1, 20), (8, 40), (64, 128)], ["torch", "vllm"]))
)
def test_a_worker_is_no_larger_than_is_counted_and_not_much_smaller(names: Any, adapters: tuple[int, int], engine: str):
    """Whatever its names, with as many adapters as are allowed and with the longest names."""
    fleet = a_fleet(*names, *adapters, engine)
    each = (size_of(fleet, 101, "draining") - size_of(fleet, 1, "draining")) / 100
    assert 0.85 * worker_bytes(fleet) <= each <= worker_bytes(fleet), (each, worker_bytes(fleet))


@pytest.mark.parametrize(
    ("fleet", "grows", "hard"),
    [
        (a_fleet("llama", "h100", 0, 2), 2_364, 3_098),
        (a_fleet("f" * 20, "t" * 20, 0, 2), 2_109, 2_720),
        (a_fleet("llama", "h100", 8, 20), 828, 990),
        (a_fleet("f" * 20, "t" * 20, 64, 128), 70, 79),
    ],
    ids=["plain", "long-names", "eight-adapters", "most-adapters"],
)
def test_how_many_workers_there_is_room_for(fleet: Any, grows: int, hard: int):
    """As operator/README.md has it: grown to, and at the API server's limit."""
    assert workers_most(fleet) == grows
    assert size_of(fleet, grows, "draining") <= MOST_BYTES
    assert size_of(fleet, hard, "serving") <= MOST_BYTES < size_of(fleet, hard + 1, "serving")


def test_the_limit_is_the_api_servers():
    documents = {"metadata": {"name": "f-router"}, "data": {"a": "é" * 262_144, "b": "x" * 524_288}}
    assert too_large(documents, 3) is None
    documents["data"]["b"] += "x"
    found = too_large(documents, 3)
    assert found is not None
    assert f"ConfigMap f-router would have {MOST_BYTES + 1} bytes for 3 workers, more than {MOST_BYTES}" in found.message


TIER = planned(prefill={"maxReplicas": 4}, decode={"maxReplicas": 8}).spec.tiers[0]


def test_tiers_grow_to_what_fits_inside_their_ratio_and_nobody_goes_for_it():
    bounds = bounds_of(TIER)
    for want, room, have in product(product(range(1, 5), range(1, 9)), range(-2, 14), (0, 3, 7)):
        if not bounds.allow(*want):
            continue
        size, words = fit_budget(TIER, want, (0, 0), Purse(workers=room), have)
        assert bounds.allow(*size)
        assert sum(size) <= max(room, have) or size == (1, 1)
        assert bool(words) == (size != want)
        assert sum(want) > max(room, have) or size == want
        assert not words or f"has room for {max(0, room)} workers" in words


def test_two_tiers_share_the_room_in_the_specs_order(monkeypatch: pytest.MonkeyPatch):
    roles = {"prefill": {"replicas": 2}, "decode": {"replicas": 4}}
    tiers = [{"name": name, "accelerator": {"type": "cpu"}, **roles} for name in ("a", "b")]
    fleet = parse_fleet(manifest(tiers=tiers, scaling={"mode": "manual"}))
    monkeypatch.setattr(document, "GROWTH_BYTES", 9 * worker_bytes(fleet))
    observed = replace(start(), templates=dict.fromkeys(("a", "b"), start().templates["t"]))
    plan = reconcile(fleet, observed, NOW)
    assert {(pool.tier, pool.role): pool.replicas for pool in plan.pools} == {
        ("a", "prefill"): 2, ("a", "decode"): 4, ("b", "prefill"): 1, ("b", "decode"): 2,
    }  # fmt: skip
    limited = plan.status.condition("CapacityLimited")
    assert limited is not None
    assert limited.reason == "BackedOut"
    assert "tier b: 2 prefill and 4 decode workers are too many" in limited.message
    there = carry_out(plan, observed)
    made = tuple(pod(w.name, w.role, w.ordinal, tier=w.tier, serving=True, told=True) for w in plan.create)
    there = replace(there, templates=observed.templates, pods=made)
    monkeypatch.setattr(document, "GROWTH_BYTES", 1)
    again = reconcile(fleet, there, NOW + 1)
    assert again.delete == (), "an operator that begins to count takes nobody away"
    assert [pool.replicas for pool in again.pools] == [pool.replicas for pool in plan.pools]


def documents(found: dict[str, Any]) -> set[str]:
    return {worker["name"] for worker in json.loads(found["data"]["endpoints.json"])["workers"]}


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_one_that_is_too_large_is_not_sent_and_the_last_good_one_stays(monkeypatch: pytest.MonkeyPatch, restarted: bool):
    """Routers keep everybody whom they know, the person is told, nothing is written again and again, and taking it back helps."""

    async def scenario(world: World) -> None:
        before = await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")
        size = sum(len(value.encode()) for value in before["data"].values())
        monkeypatch.setattr(document_size, "MOST_BYTES", size + 300)
        known = documents(before)
        pool = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": 4}})
        written = list[tuple[str, str, str]]()
        for _ in range(20):
            world.now += 4
            written += await world.step()
        if restarted:
            world.operator = world.new_operator()
            for _ in range(20):
                world.now += 4
                written += await world.step()
        assert (await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))["data"] == before["data"]
        assert not [at for at in written if at[1] == "ConfigMap"], "nothing is tried that would be refused"
        told = await world.condition("Provisioned")
        assert (told["status"], told["reason"]) == ("False", "ApplyFailed")
        assert "ConfigMap f-router would have" in told["message"]
        assert any(TOO_LARGE in event for event in await world.events())
        assert {name for name in known} <= {pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE)}
        await world.touch()
        assert await world.touch() == [], "it waits, and writes nothing"
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": 2}})
        for _ in range(30):
            world.now += 4
            await world.step()
        assert documents(await world.store.get(CONFIG_MAP, NAMESPACE, "f-router")) == known
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert (await world.condition("Ready"))["status"] == "True"

    play(
        scenario, tiers=[{"name": "t", "accelerator": {"type": "cpu"}, "decode": {"maxReplicas": 4}}], scaling={"mode": "manual"}
    )


def test_whom_routers_know_goes_only_when_they_can_be_told(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        known = documents(await world.store.get(CONFIG_MAP, NAMESPACE, "f-router"))
        monkeypatch.setattr(document_size, "MOST_BYTES", 10)
        pool = (await world.pool("decode"))["metadata"]["name"]
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": 1}})
        for _ in range(20):
            world.now += 4
            await world.step()
        assert {
            pod["metadata"]["name"] for pod in await world.store.list(POD, NAMESPACE, {"inferencefleet.io/fleet": "f"})
        } >= known
        monkeypatch.setattr(document_size, "MOST_BYTES", MOST_BYTES)
        for _ in range(20):
            world.now += 4
            await world.step()
        assert await world.workers() == {"prefill": 1, "decode": 1}

    play(scenario, scaling={"mode": "manual"})


def two_tiers(*sizes: tuple[str, int, int]) -> Any:
    tiers = [
        {"name": name, "accelerator": {"type": "cpu"}, "prefill": {"replicas": prefill}, "decode": {"replicas": decode}}
        for name, prefill, decode in sizes
    ]
    return parse_fleet(manifest(tiers=tiers, scaling={"mode": "manual"}))


def passes(fleet: Any, observed: Observed, count: int, now: float = NOW) -> tuple[Observed, int]:
    """The cluster after so many of them, all carried out; and how many workers of the fleet there were at most."""
    template, most = start().templates["t"], 0
    for _ in range(count):
        observed = replace(observed, templates={tier.name: template for tier in fleet.spec.tiers})
        plan = reconcile(fleet, observed, now)
        after, known = carry_out(plan, observed), {one.name for one in observed.pods}
        made = {w.name: pod(w.name, w.role, w.ordinal, tier=w.tier) for w in plan.create}
        pods = tuple(one if one.name in known else made[one.name] for one in after.pods)
        observed, most, now = replace(after, pods=pods), max(most, len(pods)), now + 60
    return observed, most


def scaled(observed: Observed, tier: str, *size: int) -> Observed:
    """Somebody scaled its pools."""
    to = dict(zip(ROLES, size, strict=True))
    pools = (replace(pool, replicas=to[pool.role]) if pool.tier == tier else pool for pool in observed.pools)
    return replace(observed, pools=tuple(pools))


def workers(observed: Observed) -> dict[str, int]:
    return dict(Counter(one.tier for one in observed.pods))


def test_a_tier_grows_no_further_than_the_room_beside_what_the_tiers_behind_it_have(monkeypatch: pytest.MonkeyPatch):
    """They keep what is there, so that both together had no room: nobody new was told to routers."""
    fleet = two_tiers(("a", 2, 4), ("b", 4, 8))
    monkeypatch.setattr(document, "GROWTH_BYTES", 18 * worker_bytes(fleet))
    there, most = passes(fleet, start(), 3)
    assert (workers(there), most) == ({"a": 6, "b": 12}, 18)
    there, most = passes(fleet, scaled(there, "a", 4, 8), 6)
    assert (workers(there), most) == ({"a": 6, "b": 12}, 18)
    there, most = passes(fleet, scaled(there, "b", 2, 4), 6)
    assert (workers(there), most) == ({"a": 12, "b": 6}, 18)


def test_a_tier_that_was_renamed_is_replaced_step_by_step_in_the_room_that_there_is(monkeypatch: pytest.MonkeyPatch):
    """It was made anew as a whole beside the old one, and routers could be told of nobody: neither served on, nor went."""
    old, new = two_tiers(("a", 4, 8)), two_tiers(("b", 4, 8))
    monkeypatch.setattr(document, "GROWTH_BYTES", 16 * worker_bytes(old))
    there, _ = passes(old, start(), 3)
    assert workers(there) == {"a": 12}
    for n in range(1, 40):
        there, most = passes(new, there, 1, NOW + 600 * n)
        assert 12 <= sum(workers(there).values()) <= most <= 16
    assert workers(there) == {"b": 12}
