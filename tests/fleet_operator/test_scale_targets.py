"""A scale target whose name lasts: of a role, whatever revisions its workers have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_operator.cluster.interface import FLEET, POD, POOL, ForbiddenError
from fleet_operator.names import FLEET as FLEET_LABEL
from fleet_operator.names import PLANNED, REVISION, ROLE, SIZE
from fleet_operator.scale_targets import is_target
from fleet_planner.scale_targets import ASK_AGAIN_S, EVERY_REVISION, STANDS_S
from tests.fleet_operator.world import NAMESPACE, World, manifest, play

TIER = {
    "name": "t", "accelerator": {"type": "cpu"}, "ratio": {"prefill": 1, "decode": 2, "min": "1:3", "max": "1:1"},
    "prefill": {"maxReplicas": 4}, "decode": {"maxReplicas": 8},
}  # fmt: skip
EXTERNAL = {"tiers": [TIER], "scaling": {"mode": "external"}}
TARGETS = ("f-t-prefill", "f-t-decode")


async def target(world: World, role: str = "decode") -> dict[str, Any]:
    return await world.store.get(POOL, NAMESPACE, f"f-t-{role}")


async def scale(world: World, replicas: int, role: str = "decode") -> None:
    await world.user.patch(POOL, NAMESPACE, f"f-t-{role}", {"spec": {"replicas": replicas}})


async def sizes(world: World) -> tuple[int, int]:
    """What the targets ask for."""
    prefill, decode = [(await target(world, role))["spec"]["replicas"] for role in ("prefill", "decode")]
    return prefill, decode


async def revisions(world: World) -> set[str]:
    pods = await world.store.list(POD, NAMESPACE)
    return {pod["metadata"]["labels"][REVISION] for pod in pods if pod["metadata"]["labels"].get(ROLE) in ("prefill", "decode")}


def test_a_role_has_one_that_says_what_there_is():
    async def scenario(world: World) -> None:
        found = await target(world)
        assert (found["spec"]["replicas"], found["spec"]["revision"]) == (2, EVERY_REVISION)
        assert found["metadata"]["ownerReferences"][0]["kind"] == "InferenceFleet"
        assert found["status"] == {
            "replicas": 2, "readyReplicas": 2, "servingReplicas": 2, "terminatingReplicas": 0,
            "selector": "inferencefleet.io/fleet=f,inferencefleet.io/tier=t,inferencefleet.io/role=decode",
        }  # fmt: skip
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


@pytest.mark.parametrize("mode", ["auto", "manual"])
def test_who_does_not_ask_for_them_has_none(mode: str):
    async def scenario(world: World) -> None:
        assert not [pool for pool in await world.store.list(POOL, NAMESPACE) if is_target(pool)]

    play(scenario, tiers=[TIER], scaling={"mode": mode})


def test_it_moves_its_role_and_the_other_follows():
    async def scenario(world: World) -> None:
        await scale(world, 6)
        await world.settle()
        assert (await world.workers(), await sizes(world)) == ({"prefill": 2, "decode": 6}, (2, 6))
        await scale(world, 4, "prefill")
        await world.settle()
        assert (await world.workers(), await sizes(world)) == ({"prefill": 4, "decode": 6}, (4, 6))
        assert (await target(world))["metadata"]["annotations"][PLANNED] == "6"
        await scale(world, 50)
        await world.settle()
        assert (await world.workers(), await sizes(world)) == ({"prefill": 4, "decode": 8}, (4, 8)), "inside the bounds"
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


def test_it_lasts_over_rollouts_and_sizes_both_revisions_together():
    async def scenario(world: World) -> None:
        uid = (await target(world))["metadata"]["uid"]
        for round_, wish in enumerate((4, 6, 3)):
            await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"maxModelLen": 3072 + 1024 * round_}}})
            await world.step()
            await world.step()
            await world.step()
            await scale(world, wish)
            await world.step()
            assert len(await revisions(world)) == 2, "in the middle of it"
            await world.settle(60)
            assert (await world.workers())["decode"] == wish
            assert len(await revisions(world)) == 1
            found = await target(world)
            assert (found["metadata"]["uid"], found["spec"]["replicas"]) == (uid, wish)
            assert found["status"]["readyReplicas"] == wish

    play(scenario, **EXTERNAL)


def test_what_a_budget_refuses_stays_asked_for():
    async def scenario(world: World) -> None:
        await scale(world, 8)
        await world.settle()
        assert await world.workers() == {"prefill": 2, "decode": 4}
        assert ((await target(world))["spec"]["replicas"], (await target(world))["status"]["replicas"]) == (8, 4)
        world.operator = world.new_operator()
        await world.settle()
        assert (await target(world))["spec"]["replicas"] == 8
        assert [await world.touch() for _ in range(2)] == [[], []]
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"scaling": {"budget": {"gpus": 16}}}})
        await world.settle()
        assert (await world.workers())["decode"] == 8

    play(scenario, tiers=[{**TIER, "accelerator": {"type": "h100"}}], scaling={"mode": "external", "budget": {"gpus": 6}})


def test_a_wish_is_not_lost_when_the_pools_cannot_be_written():
    async def scenario(world: World) -> None:
        await scale(world, 6)
        world.api.refuse = lambda verb, kind, name: (
            ForbiddenError("no") if kind == POOL and verb != "status" and name.count("-") > 2 else None
        )
        for _ in range(3):
            world.now += 60
            await world.step()
        assert (await target(world))["metadata"]["annotations"][PLANNED] == "2", "nobody says that it was heard"
        world.operator = world.new_operator()
        world.api.refuse = lambda verb, kind, name: None
        await world.settle()
        assert (await world.workers())["decode"] == 6

    play(scenario, **EXTERNAL)


def test_what_somebody_edits_or_deletes_comes_back():
    async def scenario(world: World) -> None:
        edit = {"metadata": {"annotations": {PLANNED: "7"}}, "spec": {"revision": "aaaaaaaa"}}
        await world.user.patch(POOL, NAMESPACE, "f-t-decode", edit)
        await world.settle()
        found = await target(world)
        assert (found["metadata"]["annotations"][PLANNED], found["spec"]["revision"]) == ("2", EVERY_REVISION)
        await world.user.delete(POOL, NAMESPACE, "f-t-decode", grace_s=0)
        await world.settle()
        assert (await target(world))["spec"]["replicas"] == 2
        assert await world.workers() == {"prefill": 1, "decode": 2}

    play(scenario, **EXTERNAL)


@pytest.mark.parametrize("mode", ["auto", "manual"])
def test_what_another_fleet_of_the_name_left_moves_nobody_who_is_not_scaled_from_outside(mode: str):
    async def scenario(world: World) -> None:
        left = {
            "apiVersion": POOL.api_version, "kind": POOL.kind,
            "metadata": {
                "name": "f-t-decode", "namespace": NAMESPACE, "labels": {FLEET_LABEL: "f"}, "annotations": {PLANNED: "1"},
            },
            "spec": {"fleet": "f", "tier": "t", "role": "decode", "revision": EVERY_REVISION, "replicas": 5},
        }  # fmt: skip
        await world.user.apply(left)
        world.measure(1, 1)
        await world.settle()
        assert (await world.workers())["decode"] == 2
        pool = next(p["metadata"]["name"] for p in await world.store.list(POOL, NAMESPACE) if "-decode-" in p["metadata"]["name"])
        await world.user.patch(POOL, NAMESPACE, pool, {"spec": {"replicas": 3}})
        await world.settle()
        assert (await world.workers())["decode"] == 3, "whoever scales its pool is heard"
        assert (await target(world))["spec"]["replicas"] == 5, "nor is it touched"

    play(scenario, tiers=[TIER], scaling={"mode": mode})


def test_they_go_with_the_mode_and_with_their_tier_and_the_size_stays():
    async def scenario(world: World) -> None:
        await scale(world, 4)
        await world.settle()
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"scaling": {"mode": "manual"}}})
        await world.settle()
        assert not [pool for pool in await world.store.list(POOL, NAMESPACE) if is_target(pool)]
        assert (await world.workers())["decode"] == 4
        other = {**TIER, "name": "u"}
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"scaling": {"mode": "external"}, "tiers": [other]}})
        await world.settle(60)
        targets = {pool["metadata"]["name"] for pool in await world.store.list(POOL, NAMESPACE) if is_target(pool)}
        assert targets == {"f-u-prefill", "f-u-decode"}

    play(scenario, **EXTERNAL)


@pytest.mark.parametrize(("prefill", "decode", "end", "wins"), [(2, 8, (3, 8), "decode"), (4, 1, (4, 4), "prefill"),
                                                               (1, 50, (3, 8), "decode")])  # fmt: skip
@pytest.mark.parametrize("restart", [False, True], ids=["", "restart"])
@pytest.mark.parametrize("together", [False, True], ids=["in-turn", "at-once"])
def test_two_autoscalers_that_the_ratio_sets_against_each_other_cost_no_workers_and_no_writes(
    prefill: int, decode: int, end: tuple[int, int], wins: str, restart: bool, together: bool
):
    """Each writes its own wish every 15 s where it finds another. It cost one write of theirs and one of ours, for ever."""

    async def scenario(world: World) -> None:
        wishes = {"prefill": prefill, "decode": min(decode, 8)}
        made, written = list[frozenset[str]](), list[int]()
        for round_ in range(24):
            if restart and round_ == 10:
                world.operator = world.new_operator()
            writes = 0
            for role, wish in wishes.items():
                if (await target(world, role))["spec"]["replicas"] != wish:
                    await scale(world, wish, role)
                    writes += 1
                world.now += 7
                for _ in range(0 if together and role == "prefill" else 4):
                    writes += len(await world.step())
            writes += len(await world.touch())
            made.append(frozenset({pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}))
            written.append(writes)
        assert await world.workers() == dict(zip(("prefill", "decode"), end, strict=True))
        assert await sizes(world) == tuple(wishes.values()), "each finds what it asked for"
        assert set(written[3:]) == {0}, written
        assert len({*made[2:]}) == 1, "the same workers"
        told = await world.condition("WithinRatio")
        assert (told["status"], told["reason"]) == ("True", "WishesDisagree")
        assert f"tier t: {wishes['prefill']} prefill and {wishes['decode']} decode workers were asked for" in told["message"]
        assert f"the wish for {wins} wins, with {end[0]} prefill and {end[1]} decode; ask for these" in told["message"]
        assert len([line for line in await world.events() if line.startswith("Warning WishesDisagree ")]) == 1

    play(scenario, **EXTERNAL)


def test_who_comes_round_ends_a_dispute_and_a_change_of_one_side_costs_no_worker_of_the_other():
    async def scenario(world: World) -> None:
        await scale(world, 8)
        await scale(world, 2, "prefill")
        await world.settle()
        world.now += 10 * STANDS_S
        before = {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}
        await scale(world, 1, "prefill")
        await world.settle()
        assert (await world.workers(), await sizes(world)) == ({"prefill": 3, "decode": 8}, (1, 8))
        assert {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)} == before
        await scale(world, 3)
        await world.settle()
        assert (await world.workers(), await sizes(world)) == ({"prefill": 1, "decode": 3}, (1, 3))
        assert (await world.condition("WithinRatio"))["reason"] == "InRatio"
        assert SIZE not in (await target(world, "prefill"))["metadata"]["annotations"]
        world.now += 10 * STANDS_S
        await scale(world, 6)
        await world.settle()
        assert await sizes(world) == (2, 6), "the other one follows again, and its target says so"

    play(scenario, **EXTERNAL)


async def uids(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE)}


async def wished_at(world: World, after_s: float, wish: dict[str, int], every_s: float = 15.0) -> set[str]:
    """Reasons of the condition, while those of `wish` look every 15 s whether their target says it."""
    found, end = set[str](), world.now + after_s
    while world.now < end:
        for role, replicas in wish.items():
            if (await target(world, role))["spec"]["replicas"] != replicas:
                await scale(world, replicas, role)
        world.now += every_s
        await world.step()
        await world.touch()  # every fleet is looked at again and again
        found.add((await world.condition("WithinRatio"))["reason"])
    return found


@pytest.mark.parametrize("restart", [False, True], ids=["", "restart"])
def test_a_dispute_whose_unmet_side_has_gone_is_over_within_half_an_hour(restart: bool):
    """It stood for ever: who finds what it asked for writes nothing, and nor does who has gone."""

    async def scenario(world: World) -> None:
        both = {"prefill": 2, "decode": 8}
        assert "WishesDisagree" in await wished_at(world, 300, both)
        there = await uids(world)
        if restart:
            world.operator = world.new_operator()
        await wished_at(world, ASK_AGAIN_S + 60, {"decode": 8})
        assert (await world.condition("WithinRatio"))["reason"] == "InRatio"
        assert (await world.workers(), await sizes(world)) == ({"prefill": 3, "decode": 8}, (3, 8))
        assert await uids(world) == there
        assert SIZE not in (await target(world, "prefill"))["metadata"]["annotations"]
        assert [await world.touch() for _ in range(2)] == [[], []]
        assert await wished_at(world, 300, {"decode": 4}) <= {"InRatio", "OutOfRatio"}
        assert (await sizes(world))[1] == 4

    play(scenario, **EXTERNAL)


def test_two_that_go_on_to_disagree_are_asked_every_half_hour_and_that_costs_no_worker():
    async def scenario(world: World) -> None:
        both = {"prefill": 2, "decode": 8}
        await wished_at(world, 300, both)
        there = await uids(world)
        for _ in range(3):
            assert "WishesDisagree" in await wished_at(world, ASK_AGAIN_S, both)
            assert await uids(world) == there
        assert (await world.condition("WithinRatio"))["reason"] == "WishesDisagree"
        assert (await world.workers(), await sizes(world)) == ({"prefill": 3, "decode": 8}, (2, 8))
        warned = [line for line in await world.events() if line.startswith("Warning WishesDisagree ")]
        assert len(warned) <= 4

    play(scenario, **EXTERNAL)


@pytest.mark.parametrize("every_s", [60.0, STANDS_S + 15.0, 600.0])
def test_who_asks_seldom_takes_away_nothing_of_what_was_met_when_it_is_asked_again(every_s: float):
    """A job that scales every ten minutes, against an autoscaler: at each half hour two workers went, and were made anew."""

    async def scenario(world: World) -> None:
        await wished_at(world, 300, {"prefill": 2, "decode": 8})
        there, reasons = await uids(world), set[str]()
        for _ in range(int(2.5 * ASK_AGAIN_S / every_s)):
            reasons |= await wished_at(world, every_s, {"decode": 8})
            await scale(world, 2, "prefill")
            reasons |= await wished_at(world, 15.0, {"decode": 8})
            assert await uids(world) == there, world.now
        assert reasons == {"WishesDisagree", "InRatio"}, "it was asked"
        assert (await world.workers(), await sizes(world)) == ({"prefill": 3, "decode": 8}, (2, 8))

    play(scenario, **EXTERNAL)


def test_a_dispute_is_over_with_the_ratio_that_it_was_about():
    async def scenario(world: World) -> None:
        await scale(world, 8)
        await scale(world, 2, "prefill")
        await world.settle()
        wide = {**TIER, "ratio": {"prefill": 1, "decode": 2, "min": "1:4", "max": "1:1"}}
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"tiers": [wide]}})
        await world.settle()
        assert (await world.workers(), await sizes(world)) == ({"prefill": 2, "decode": 8}, (2, 8))
        assert (await world.condition("WithinRatio"))["reason"] == "InRatio"
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


@pytest.mark.parametrize("refused", TARGETS)
def test_a_dispute_that_could_not_be_written_is_written_later(refused: str):
    """Whatever of the two targets is there, also for an operator that starts anew."""

    async def scenario(world: World) -> None:
        await scale(world, 8)
        await scale(world, 2, "prefill")
        world.api.refuse = lambda verb, kind, name: ForbiddenError("no") if kind == POOL and name == refused else None
        for _ in range(3):
            world.now += 20
            await world.step()
        world.operator = world.new_operator()
        world.api.refuse = lambda verb, kind, name: None
        await world.settle(20)
        assert (await world.workers(), await sizes(world)) == ({"prefill": 3, "decode": 8}, (2, 8))
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


def test_a_wish_of_a_while_ago_stands_in_nobodys_way():
    async def scenario(world: World) -> None:
        await scale(world, 8)
        await world.settle()
        world.now += STANDS_S + 1
        await scale(world, 1, "prefill")
        await world.settle()
        assert (await world.workers(), await sizes(world)) == ({"prefill": 1, "decode": 3}, (1, 3))
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


def test_a_wish_of_just_before_stands():
    async def scenario(world: World) -> None:
        await scale(world, 8)
        await world.settle()
        world.now += STANDS_S - 30
        await scale(world, 1, "prefill")
        await world.settle(10)
        assert (await world.workers(), await sizes(world)) == ({"prefill": 3, "decode": 8}, (1, 8))
        assert [await world.touch() for _ in range(2)] == [[], []]

    play(scenario, **EXTERNAL)


STEP = st.tuples(
    st.sampled_from(["decode", "prefill", "roll", "restart", "lose", "pause", "resume"]), st.integers(1, 12), st.integers(0, 3)
)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEP, max_size=8))
def test_after_any_events_what_is_there_is_what_was_asked_for(steps: list[tuple[str, int, int]]):
    """Inside bounds and ratio, and whoever asks finds the same name."""

    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest(**EXTERNAL))
        await world.settle()
        last, wishes = "", dict[str, int]()
        for what, number, wait in steps:
            if what in ("prefill", "decode"):
                await scale(world, number, what)
                last = what
                wishes[what] = number
            elif what == "roll":
                await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"engine": {"maxModelLen": 3072 + 1024 * number}}})
            elif what == "restart":
                world.operator = world.new_operator()
            elif what == "lose":
                await world.look()  # a watch that shows it, and then that it is gone
                name = (await world.store.list(POD, NAMESPACE))[0]["metadata"]["name"]
                await world.user.delete(POD, NAMESPACE, name, grace_s=0)
            else:
                await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"rollout": {"paused": what == "pause"}}})
            for _ in range(wait):
                await world.step()
            if what in ("prefill", "decode"):
                await world.step()  # two wishes between two looks are one wish
        await world.user.patch(FLEET, NAMESPACE, "f", {"spec": {"rollout": {"paused": False}}})
        await world.settle(80)
        said, workers = await sizes(world), await world.workers()
        prefill, decode = workers["prefill"], workers["decode"]
        disagree = (await world.condition("WithinRatio"))["reason"] == "WishesDisagree"
        assert disagree is (said != (prefill, decode))
        assert all(there >= least for there, least in zip((prefill, decode), said, strict=True)), "both wishes are met"
        assert 1 <= prefill <= 4
        assert 1 <= decode <= 8
        assert prefill <= decode <= 3 * prefill
        if last:
            role = last
            asked = {name: min(count, TIER[name]["maxReplicas"]) for name, count in wishes.items()}  # type: ignore[index]
            got, other = {"prefill": prefill, "decode": decode}, "decode" if role == "prefill" else "prefill"
            least = 0 if other not in asked else -(-asked["decode"] // 3) if role == "prefill" else asked["prefill"]
            assert got[role] in (asked[role], max(asked[role], least)), "more only where the other one's wish needs it"

    asyncio.run(scenario())
