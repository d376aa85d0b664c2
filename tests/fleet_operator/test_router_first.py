"""Routers are told first: no worker that a document lets them use is deleted before one without it was accepted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    POD,
    POOL,
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Kind,
    NotFoundError,
)
from fleet_operator.names import GROUP_UID, ROLE
from fleet_operator.router_first import kept_words, may_go
from fleet_planner.wanted import PodGone
from fleet_wire import endpoints as wire
from fleet_wire.endpoints import ENDPOINTS_KEY
from tests.fleet_operator.world import NAMESPACE, World, manifest

REFUSALS = [ForbiddenError, ConflictError, InvalidError]
MANUAL = {"mode": "manual"}


class Watched(World):
    """Looks at every deletion of a worker: what do routers read at that moment?"""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []
        self.untold: list[str] = []
        delete = self.api.delete

        async def looked_at(kind: Kind, namespace: str, name: str, **options: Any) -> None:
            if kind == POD:
                uid = (await self.store.get(POD, namespace, name))["metadata"]["uid"]
                self.deleted.append(name)
                self.untold += [name] if uid in await self.in_use() else []
            await delete(kind, namespace, name, **options)

        self.api.delete = looked_at  # type: ignore[method-assign]

    async def in_use(self) -> set[str]:
        """Uids that the stored document lets routers use."""
        try:
            documents = await self.store.get(CONFIG_MAP, NAMESPACE, "f-router")
        except NotFoundError:
            return set()
        return {worker.uid for worker in wire.decode(documents["data"][ENDPOINTS_KEY]).workers if worker.state != "draining"}

    def keep_documents(self, error: type[ClusterError] | None) -> None:
        """The API takes no more changes of the ConfigMap, or does again."""
        self.api.refuse = lambda verb, kind, name: error("no") if error is not None and kind == CONFIG_MAP else None


async def fewer(world: World) -> None:
    pool = await world.pool("decode")
    await world.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], {"spec": {"replicas": 1}})


async def another_image(world: World) -> None:
    await world.user.apply(manifest(scaling=MANUAL, engine={"type": "torch", "maxBatch": 7}))


async def another_tier(world: World) -> None:
    found = manifest(scaling=MANUAL)
    found["spec"]["tiers"][0]["name"] = "u"
    await world.user.apply(found)


@pytest.mark.parametrize("change", [fewer, another_image, another_tier])
@pytest.mark.parametrize("error", REFUSALS)
def test_no_worker_is_deleted_while_the_routers_cannot_be_told(error: type[ClusterError], change: Any):
    async def scenario() -> None:
        world = Watched()
        await world.user.apply(manifest(scaling=MANUAL))
        await world.settle()
        world.keep_documents(error)
        await change(world)
        for _ in range(20):
            await world.step()
        assert (world.deleted, world.untold) == ([], [])
        assert sum((await world.workers()).values()) >= 3
        words = (await world.condition("Provisioned"))["message"]
        assert "until ConfigMap f-router can be written" in words
        world.keep_documents(None)
        for _ in range(60):
            world.now += 5
            await world.step()
        assert world.deleted
        assert world.untold == []
        assert (await world.condition("Ready"))["status"] == "True"

    asyncio.run(scenario())


def test_a_worker_that_never_served_may_go_though_the_routers_cannot_be_told():
    async def scenario() -> None:
        world = Watched()
        await world.user.apply(manifest(scaling=MANUAL))
        await world.settle()
        pool = await world.pool("decode")
        await world.user.patch(POOL, NAMESPACE, pool["metadata"]["name"], {"spec": {"replicas": 3}})
        await world.step()
        new = next(pod for pod in await world.store.list(POD, NAMESPACE) if pod["metadata"]["name"].endswith("-2"))
        await world.user.patch_status(POD, NAMESPACE, new["metadata"]["name"], {"phase": "Failed", "conditions": []})
        world.keep_documents(ForbiddenError)
        for _ in range(3):
            await world.step()
        assert world.deleted == [new["metadata"]["name"]]

    asyncio.run(scenario())


# -- the rule, one row each ----------------------------------------------------------------------------------------------
def pod(uid: str, *, ready: bool = True, role: str = "decode", leader: str = "") -> dict[str, Any]:
    status = {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    notes = {"annotations": {GROUP_UID: leader}} if leader else {}
    return {"metadata": {"name": uid, "uid": uid, "labels": {ROLE: role}, **notes}, "status": status}


def documents(**states: Any) -> dict[str, Any]:
    workers = tuple(
        wire.Endpoint(
            name=uid, uid=uid, address="a", http_port=1, agent_port=1, role="decode", tier="t", revision="r", compat="c", state=s
        )
        for uid, s in states.items()
    )
    return {"data": {ENDPOINTS_KEY: wire.encode(wire.Endpoints(fleet="f", namespace="n", workers=workers)).decode()}}


BROKEN = {"data": {ENDPOINTS_KEY: "no json"}}


@pytest.mark.parametrize(
    ("found", "accepted", "seen", "goes"),
    [
        pytest.param(pod("a"), documents(a="draining"), None, True, id="told-as-draining"),
        pytest.param(pod("a"), documents(), documents(a="serving"), True, id="no-longer-named"),
        pytest.param(pod("a"), documents(a="serving"), None, False, id="told-to-use-it"),
        pytest.param(pod("a"), documents(a="held"), None, False, id="named-as-held"),
        pytest.param(pod("a", ready=False), None, documents(a="serving"), False, id="refused-and-named"),
        pytest.param(pod("a"), None, documents(), False, id="refused-and-a-document-nobody-saw-may-name-it"),
        pytest.param(pod("a", ready=False), None, documents(), True, id="refused-and-not-named"),
        pytest.param(pod("a", ready=False), None, None, True, id="no-document-yet"),
        pytest.param(pod("a"), BROKEN, documents(a="draining"), False, id="accepted-but-changed-to-no-document"),
        pytest.param(pod("b", leader="a"), None, documents(a="serving"), False, id="one-pod-of-a-worker-in-use"),
        pytest.param(pod("b", leader="a"), documents(a="draining"), None, True, id="one-pod-of-a-worker-that-drains"),
        pytest.param(pod("a", role="fetch"), None, None, True, id="a-pod-that-fetches-is-no-worker"),
        pytest.param(None, None, documents(a="serving"), True, id="not-in-the-cache-and-its-uid-guards-it"),
    ],
)
def test_which_pods_may_go(
    found: dict[str, Any] | None, accepted: dict[str, Any] | None, seen: dict[str, Any] | None, *, goes: bool
):
    name = found["metadata"]["name"] if found is not None else "a"
    live = {("Pod", name): found} if found is not None else {}
    gone = [PodGone(name, name, "why")]
    assert may_go(gone, live, accepted, seen) == (gone if goes else [])


def test_the_words_name_three_and_count_the_rest():
    gone = [PodGone(name, name, "") for name in "edcba"]
    assert kept_words(gone, gone, "f-router") == []
    (told,) = kept_words(gone, [], "f-router")
    assert str(told) == (
        "5 pods are to be deleted and stay until ConfigMap f-router can be written, which tells the routers: a, b, c and 2 more"
    )
