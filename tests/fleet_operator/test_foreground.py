"""A WorkerPool that is deleted with `--cascade=foreground` (Argo CD's way): its pods go first, and then it does."""

from __future__ import annotations

from typing import Any

from fleet_operator.cluster.interface import POD, POOL
from fleet_operator.ownership import owned
from tests.fleet_operator.world import NAMESPACE, World, play

FOREGROUND = {"metadata": {"finalizers": ["foregroundDeletion"]}}


async def collect_garbage(world: World, name: str) -> bool:
    """What the garbage collector does: every pod of the pool is deleted; without pods the pool goes. Whether it went."""
    pool = next((p for p in await world.store.list(POOL, NAMESPACE) if p["metadata"]["name"] == name), None)
    if pool is None or "deletionTimestamp" not in pool["metadata"]:
        return False
    left = [pod["metadata"] for pod in await world.store.list(POD, NAMESPACE) if owned(pod, pool)]
    for meta in (meta for meta in left if "deletionTimestamp" not in meta):
        await world.user.delete(POD, NAMESPACE, meta["name"])
    if not left:
        await world.user.patch(POOL, NAMESPACE, name, {"metadata": {"finalizers": None}})
    return not left


async def begin(world: World) -> dict[str, Any]:
    pool = await world.pool("decode")
    await world.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], FOREGROUND)
    await world.user.delete(POOL, NAMESPACE, pool["metadata"]["name"])
    return pool


def test_it_comes_back_with_its_workers_and_nobody_is_made_to_be_deleted():
    """A worker was made for each that the garbage collector took, which took that one, too, for ever: the role was away, and the
    pool never went."""

    async def scenario(world: World) -> None:
        before = await begin(world)
        made, went = list[str](), False
        for _ in range(10):
            went |= await collect_garbage(world, before["metadata"]["name"])
            made += [name for verb, kind, name in await world.step() if (verb, kind) == ("create", POD.kind)]
        assert went
        assert len(made) == 2
        assert (await world.pool("decode"))["metadata"]["uid"] != before["metadata"]["uid"]
        assert await world.workers() == {"prefill": 1, "decode": 2}
        await world.settle(20)
        assert (await world.condition("Ready"))["status"] == "True"

    play(scenario, scaling={"mode": "manual"})


def test_while_its_workers_drain_the_status_says_what_is_waited_for():
    async def scenario(world: World) -> None:
        name = (await begin(world))["metadata"]["name"]
        (pod, *_) = [pod for pod in await world.store.list(POD, NAMESPACE) if pod["metadata"]["name"].startswith(name)]
        await world.user.patch(POD, NAMESPACE, pod["metadata"]["name"], {"metadata": {"finalizers": ["x/drains"]}})
        for _ in range(30):
            await collect_garbage(world, name)
            await world.step()
        told = await world.condition("Provisioned")
        assert told["status"] == "False"
        assert f"WorkerPool {name} is being deleted, its pods first (--cascade=foreground)" in told["message"]
        assert (await world.condition("Ready"))["status"] == "False"

    play(scenario, scaling={"mode": "manual"})
