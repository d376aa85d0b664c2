"""What a WorkerPool's annotations say of its size counts as the operator wrote it, and not as somebody edited it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fleet_operator.cluster.interface import POD, POOL
from fleet_operator.names import APPLIED, PLANNED, ROLE, SIZE, WISH, WRITTEN
from fleet_operator.pool_sizes import Sizes, sealed, written_on
from fleet_planner.roles import ROLES
from tests.fleet_operator.world import NAMESPACE, World, play

MANUAL: dict[str, Any] = {
    "tiers": [{"name": "t", "accelerator": {"type": "cpu"}, "prefill": {"maxReplicas": 4}, "decode": {"maxReplicas": 8}}],
    "scaling": {"mode": "manual"},
}
COUNTS = (PLANNED, SIZE, WISH, WRITTEN)


def counts(pool: dict[str, Any]) -> dict[str, str]:
    return {key: text for key, text in pool["metadata"]["annotations"].items() if key in COUNTS}


async def workers(world: World) -> set[str]:
    return {pod["metadata"]["uid"] for pod in await world.store.list(POD, NAMESPACE) if pod["metadata"]["labels"][ROLE] in ROLES}


async def edited(world: World, replicas: int | None = None, **notes: str | None) -> None:
    """Somebody edits the decode pool, in one write."""
    name = (await world.pool("decode"))["metadata"]["name"]
    marks = {f"inferencefleet.io/{key}": text for key, text in notes.items()}
    spec = {"spec": {"replicas": replicas}} if replicas is not None else {}
    await world.user.patch(POOL, NAMESPACE, name, {"metadata": {"annotations": marks}, **spec})


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize(
    "notes",
    [
        {"planned": "3"},
        {"planned": "1"},
        {"planned": "0", "size": "0"},
        {"planned": None},
        {"size": "1"},
        {"size": "4"},
        {"size": None, "planned": None},
        {"wish": "8"},
        {"wish": "1", "planned": "9", "size": "9"},
        {"written": None},
        {"written": "3 3 - 0123456789ab"},
        {"written": ""},
    ],
    ids=str,
)
def test_counts_that_somebody_edits_move_nobody_and_come_back(notes: dict[str, str | None], restarted: bool):
    """`planned: 3` on a pool of two drained a worker; no `size`, and the tier went back to its first one."""

    async def scenario(world: World) -> None:
        await edited(world, replicas=4)
        await world.settle(20)
        before, said = await workers(world), counts(await world.pool("decode"))
        await edited(world, **notes)
        if restarted:
            world.operator = world.new_operator()
        for _ in range(20):
            world.now += 4
            await world.step()
        assert await workers(world) == before
        assert (await world.pool("decode"))["spec"]["replicas"] == 4
        assert said.items() <= counts(await world.pool("decode")).items()  # what somebody added stays theirs, and says nothing
        assert await world.touch() == []

    play(scenario, **MANUAL)


@pytest.mark.parametrize("notes", [{}, {"planned": "3"}, {"size": "1", "wish": "1"}], ids=str)
def test_who_scales_is_heard_whatever_else_was_edited(notes: dict[str, str]):
    async def scenario(world: World) -> None:
        await edited(world, replicas=3, **notes)
        for _ in range(20):
            world.now += 4
            await world.step()
        assert (await world.workers())["decode"] == 3

    play(scenario, **MANUAL)


def test_the_pool_of_an_older_operator_is_believed_and_written_once():
    """It has no digest. That an apply of such an operator takes ours away is the API's doing: it no longer names it."""

    async def scenario(world: World) -> None:
        await edited(world, replicas=4)
        await world.settle(20)
        uids, pool = await workers(world), await world.pool("decode")
        old = copy.deepcopy(pool)
        for part in ("uid", "resourceVersion", "generation", "creationTimestamp"):
            old["metadata"].pop(part)
        del old["metadata"]["annotations"][WRITTEN], old["status"]
        old["metadata"]["annotations"][APPLIED] = "0" * 16
        await world.store.apply(old)
        assert WRITTEN not in (await world.pool("decode"))["metadata"]["annotations"]
        world.operator = world.new_operator()
        assert [name for verb, kind, name in await world.step() if kind == POOL.kind and verb != "status"] == [
            pool["metadata"]["name"]
        ]
        await world.settle()
        assert await workers(world) == uids
        assert counts(await world.pool("decode")) == counts(pool)

    play(scenario, **MANUAL)


def test_a_pool_costs_no_write_more():
    async def scenario(world: World) -> None:
        await edited(world, replicas=3)
        written = [await world.step() for _ in range(8)]
        (pool,) = [name for step in written for verb, kind, name in step if kind == POOL.kind and verb != "status"]
        assert "decode" in pool

    play(scenario, **MANUAL)


GOOD = sealed("ml", "p", Sizes(2, 2, None))


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("p", GOOD, Sizes(2, 2, None)),
        ("p", sealed("ml", "p", Sizes(0, 12, 3)), Sizes(0, 12, 3)),
        ("q", GOOD, None),
        ("p", GOOD.replace("2", "3", 1), None),
        ("p", GOOD + " ", None),
        ("p", GOOD[:-1], None),
        ("p", "", None),
        ("p", "- - - ", None),
        ("p", "² 2 - 0123456789ab", None),
        ("p", "9" * 5_000 + " 2 - 0123456789ab", None),
        ("p", "-1 2 - 0123456789ab", None),
    ],
)
def test_counts_are_read_with_the_digest_of_this_pool_alone(name: str, text: str, found: Sizes | None):
    assert written_on({"metadata": {"namespace": "ml", "name": name, "annotations": {WRITTEN: text}}}) == found
