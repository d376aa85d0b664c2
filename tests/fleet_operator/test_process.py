"""How the parts end: the first end ends all, and a lease is given back only when nothing of ours writes any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet_operator.cluster.guarded import GuardedCluster, Write
from fleet_operator.cluster.interface import CONFIG_MAP, POD, ClusterError
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.flip.follow import DEFAULT_PORTS
from fleet_operator.health.meters import Meters
from fleet_operator.health.pulse import Pulse
from fleet_operator.health.server import Readiness
from fleet_operator.leader.elector import Candidate, Elector, LeadershipLostError
from fleet_operator.leader.fence import Fence
from fleet_operator.leader.lease import Terms
from fleet_operator.options import Options
from fleet_operator.process import _followers, _lead, _Parts, where
from fleet_operator.territory import Selection
from fleet_operator.together import until_first_ends
from tests.fleet_operator.world import manifest
from tests.fleet_planner.test_adapters import TWO, pod


def test_the_first_error_is_the_error_and_all_have_ended():
    async def scenario() -> None:
        ended: list[str] = []

        async def long(name: str) -> None:
            try:
                await asyncio.sleep(3_600)
            finally:
                await asyncio.sleep(0)
                ended.append(name)

        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            await until_first_ends(long("a"), fails(), long("b"))
        assert sorted(ended) == ["a", "b"]

        task = asyncio.create_task(until_first_ends(long("c")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "c" in ended

    asyncio.run(scenario())


def test_what_is_cancelled_from_outside_ends_all_without_an_error():
    """As kopf does it on SIGTERM: the process must end with 0, not with a traceback."""

    async def scenario() -> list[str]:
        ended: list[str] = []

        async def long(name: str) -> None:
            try:
                await asyncio.sleep(3_600)
            finally:
                ended.append(name)

        together = asyncio.create_task(until_first_ends(long("a"), long("b")))
        await asyncio.sleep(0)
        parts = asyncio.all_tasks() - {asyncio.current_task(), together}
        await asyncio.sleep(0)
        for part in parts:
            part.cancel()
        await together
        return ended

    assert sorted(asyncio.run(scenario())) == ["a", "b"]


def elector(store: MemoryCluster, name: str, fence: Fence) -> Elector:
    return Elector(store, store.writer("births"), Candidate("ns", "lease", name), fence)


def test_the_lease_is_given_back_after_the_last_write():
    async def scenario() -> None:
        store, fence, seen = MemoryCluster(), Fence(), []
        leader = elector(store, "a", fence)
        release = leader.release

        async def noted() -> None:
            seen.append("release")
            await release()

        leader.release = noted  # type: ignore[method-assign]

        async def work() -> None:
            try:
                await asyncio.sleep(3_600)
            finally:
                await asyncio.sleep(0.01)
                seen.append("the last write")

        leading = asyncio.create_task(_lead(leader, None)(work))
        await asyncio.sleep(0.05)
        assert leader.leading
        leading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leading
        assert seen == ["the last write", "release"]
        after = elector(store, "b", Fence())
        await after.attempt()
        assert after.leading

    asyncio.run(scenario())


def test_work_stops_when_the_lease_is_lost():
    async def scenario() -> None:
        store, fence = MemoryCluster(), Fence()
        leader, stopped = elector(store, "a", fence), asyncio.Event()

        async def lose() -> None:
            raise LeadershipLostError("thief holds it")

        leader.keep = lose  # type: ignore[method-assign]

        async def work() -> None:
            try:
                await asyncio.sleep(3_600)
            finally:
                stopped.set()

        with pytest.raises(LeadershipLostError):
            await _lead(leader, None)(work)
        assert stopped.is_set()

    asyncio.run(scenario())


def test_guards_are_asked_in_order_and_see_every_write():
    async def scenario() -> None:
        store, asked = MemoryCluster(), []

        class Noting:
            def __init__(self, name: str, refuses: bool = False) -> None:
                self.name, self.refuses = name, refuses

            async def guard(self, write: Write, send):
                asked.append((self.name, write.verb, write.kind.kind, write.namespace, write.name))
                if self.refuses:
                    raise ClusterError("no")
                return await send()

        cluster = GuardedCluster(store, Noting("outer"), Noting("inner"))
        made = await cluster.apply(manifest())
        await cluster.patch_status(_fleet_kind(), "ml", "f", {"observedGeneration": 1})
        await cluster.delete(_fleet_kind(), "ml", "f", uid=made["metadata"]["uid"])
        verbs = ["apply", "patch_status", "delete"]
        assert asked == [(name, verb, "InferenceFleet", "ml", "f") for verb in verbs for name in ("outer", "inner")]
        asked.clear()
        with pytest.raises(ClusterError):
            await GuardedCluster(store, Noting("outer", refuses=True), Noting("inner")).apply(manifest())
        assert [name for name, *_ in asked] == ["outer"]
        assert await cluster.list(CONFIG_MAP) == []
        assert await cluster.list(POD, "ml") == []

    asyncio.run(scenario())


def _fleet_kind():
    from fleet_operator.cluster.interface import FLEET

    return FLEET


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (Selection(), "all namespaces"),
        (Selection(("ml", "lab")), "namespaces ml, lab only"),
        (Selection((), {"team": "a"}), "namespaces with team=a only"),
    ],
)
def test_the_log_says_whose_fleets_are_run(selection: Selection, words: str):
    """A fleet in another namespace has no status and no event: the operator's log is where to look, and said nothing."""
    assert where(selection) == words


def test_a_leader_that_was_stopped_in_the_middle_of_a_look_tells_no_worker_anything(monkeypatch: pytest.MonkeyPatch):
    """Stopped between an agent's answer and what it was to be told, for longer than the lease: it told the worker the adapters of
    a fleet that somebody had changed since, and only then heard that another one leads."""
    told: list[tuple[str, str]] = []

    async def scenario(election: Terms | None) -> None:
        now = [100.0]
        fence = Fence(lambda: now[0])
        fence.extend(110.0, 115.0)

        async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).split(b" ")
            told.append((head[0].decode(), head[1].decode()))
            now[0] = 200.0  # stopped
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\nconnection: close\r\n\r\n{"adapters":[]}')
            writer.close()

        async with await asyncio.start_server(agent, "127.0.0.1", 0) as server:
            monkeypatch.setitem(DEFAULT_PORTS, "agent", server.sockets[0].getsockname()[1])
            meters, pulse = Meters(Pulse()), Pulse()
            kube: Any = None
            parts = _Parts(Options(election=election), kube, fence, pulse, meters, Readiness())
            _, adapters = _followers(parts)
            await adapters.follow(TWO, [pod("p", ip="127.0.0.1")], {}, {})

    asyncio.run(scenario(Terms()))
    assert told == [("GET", "/state")]
    asyncio.run(scenario(None))
    assert told[1:] == [("GET", "/state"), ("POST", "/adapters")], "without an election nobody else may lead"
