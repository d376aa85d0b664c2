"""The process is told to stop: whatever kopf does at that moment, it ends soon and without an error."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import kopf
import pytest
from aiohttp import web

from fleet_operator import shell_kopf
from fleet_operator.cluster.interface import (
    FLEET,
    NODE,
    POD,
    ForbiddenError,
    Kind,
    Object,
    UnauthorizedError,
    UnavailableError,
    WatchEvent,
)
from fleet_operator.reconciler import Reconciler
from fleet_operator.settings import Platform
from fleet_operator.shell_kopf import Wiring, Work, run_in_cluster
from tests.fleet_operator.world import World, manifest

SOON_S = 3.0
"""Less than the five seconds that kopf waits for tasks that it does not know."""
spawn_tasks = kopf.spawn_tasks


@pytest.fixture(autouse=True)
def no_api(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """kopf's own requests are refused and tried again."""
    token = tmp_path / "token"
    token.write_text("t")
    for name, value in {"URL": "http://127.0.0.1:1", "TOKEN_FILE": str(token), "CA_FILE": ""}.items():
        monkeypatch.setenv(f"FLEET_KUBE_{name}", value)


async def run_told(world: World, begin: Callable[[], Awaitable[Any]], namespaces: Sequence[str] = ()) -> list[str]:
    """What our work saw until the end; SIGTERM comes after `begin`, to whoever listens."""
    seen: list[str] = []

    async def lead(work: Work) -> None:
        try:
            await work()
        finally:
            seen.append("led until the end")

    for number in (signal.SIGINT, signal.SIGTERM):  # what kopf of a life before left; without it SIGTERM would end pytest
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    running = asyncio.ensure_future(run_in_cluster(world.store, world.operator, None, namespaces, Wiring(lead)))
    await begin()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, SOON_S)
    return seen


def test_told_to_stop_while_kopf_runs_it_ends_soon(monkeypatch: pytest.MonkeyPatch):
    """It waited five seconds for a task of kopf's own: the one that waits for the flag to stop."""
    begun = asyncio.Event()

    async def spawn(**given: Any) -> Any:
        tasks = await spawn_tasks(**given)
        asyncio.get_running_loop().call_later(0.1, begun.set)
        return tasks

    monkeypatch.setattr(kopf, "spawn_tasks", spawn)
    assert asyncio.run(run_told(World(), begun.wait)) == ["led until the end"]


def test_told_to_stop_between_two_starts_of_kopf(monkeypatch: pytest.MonkeyPatch):
    """Real process of 2026-11-22: kopf of the life before took the signal, and the operator went on until it was killed."""
    begun = asyncio.Event()

    async def fails(**_: Any) -> Any:
        asyncio.get_running_loop().call_soon(begun.set)
        raise ConnectionError("a watch")

    monkeypatch.setattr(kopf, "spawn_tasks", fails)
    assert asyncio.run(run_told(World(), begun.wait)) == ["led until the end"]


@pytest.mark.parametrize("method", ["find", "list"])
def test_told_to_stop_before_anything_is_listed(method: str, monkeypatch: pytest.MonkeyPatch):
    """As the first process of a container it went on: nobody listened to SIGTERM before kopf did."""
    world, asked = World(), asyncio.Event()

    async def silent(*_: Any) -> Object:
        asked.set()
        await asyncio.sleep(3_600)
        raise UnavailableError

    monkeypatch.setattr(world.store, method, silent)
    assert asyncio.run(run_told(world, asked.wait)) == []


def test_kopf_that_failed_is_started_again_soon(monkeypatch: pytest.MonkeyPatch):
    lives, again = list[int](), asyncio.Event()

    async def fails() -> None:
        await asyncio.sleep(0.05)
        raise ConnectionError("a watch")

    async def spawn(**given: Any) -> Any:
        tasks = await spawn_tasks(**given)
        lives.append(1)
        if len(lives) > 1:
            again.set()
            return tasks
        return [*tasks, asyncio.create_task(fails())]

    monkeypatch.setattr(kopf, "spawn_tasks", spawn)
    monkeypatch.setattr(shell_kopf, "RESTART_S", 0.0)
    assert asyncio.run(run_told(World(), lambda: asyncio.wait_for(again.wait(), SOON_S))) == ["led until the end"]


def test_a_kopf_that_failed_does_not_kill_the_process_later(monkeypatch: pytest.MonkeyPatch):
    """It takes its own end for the process's, and ten minutes after a watch had failed sent SIGKILL to make sure: the operator,
    which had begun kopf again long since, was killed without a word, a leader without giving its lease back."""
    lives, killed, again = list[int](), list[int](), asyncio.Event()

    async def fails() -> None:
        await asyncio.sleep(0.05)
        raise ConnectionError("a watch")

    async def spawn(**given: Any) -> Any:
        settings = kopf.OperatorSettings()
        settings.process.ultimate_exiting_timeout = 0.05
        tasks = await spawn_tasks(settings=settings, **given)
        lives.append(1)
        if len(lives) > 1:
            asyncio.get_running_loop().call_later(0.2, again.set)
            return tasks
        return [*tasks, asyncio.create_task(fails())]

    monkeypatch.setattr(kopf, "spawn_tasks", spawn)
    monkeypatch.setattr(signal, "pthread_kill", lambda _, number: killed.append(number))
    monkeypatch.setattr(shell_kopf, "RESTART_S", 0.0)
    asyncio.run(run_told(World(), lambda: asyncio.wait_for(again.wait(), SOON_S)))
    assert (len(lives), killed) == (2, [])


@pytest.mark.parametrize(("calm_s", "pauses"), [(60.0, [2, 4, 8, 15, 15]), (-1.0, [2, 2, 2, 2, 2])], ids=["at once", "later"])
def test_kopf_that_fails_again_and_again_is_let_be_for_longer(
    calm_s: float, pauses: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """One namespace without a RoleBinding ended it at each start, and all fleets of all namespaces were listed each time."""
    lives, last = list[int](), asyncio.Event()

    async def fails(**_: Any) -> Any:
        lives.append(1)
        if len(lives) == len(pauses):
            asyncio.get_running_loop().call_soon(last.set)
        raise ConnectionError("a watch")

    monkeypatch.setattr(kopf, "spawn_tasks", fails)
    monkeypatch.setattr(shell_kopf, "RESTART_S", 0.002)
    monkeypatch.setattr(shell_kopf, "RESTART_MOST_S", 0.015)
    monkeypatch.setattr(shell_kopf, "CALM_S", calm_s)
    asyncio.run(run_told(World(), last.wait))
    found = [record.args[2] for record in caplog.records if isinstance(record.args, tuple) and "kopf ended" in record.msg]
    assert found == [pause / 1000 for pause in pauses]


@pytest.mark.parametrize("gone", [["b"], ["a", "b"]], ids=["one", "all"])
def test_a_namespace_that_was_taken_from_us_does_not_end_the_watches_of_the_others(
    gone: list[str], monkeypatch: pytest.MonkeyPatch
):
    """A RoleBinding that went, with its namespace or without it: kopf ended at its 403 each time that it was started."""
    world, lives, last, taken, told = World(), list[tuple[str, ...]](), asyncio.Event(), list[str](), list[str]()
    find = world.store.find

    async def asked(kind: Kind, namespace: str | None, name: str) -> Object | None:
        if kind == FLEET and namespace in taken:
            told.append(namespace)
            if len(told) == 3 * len(gone):  # once before kopf begins again, twice since
                taken.clear()
            raise ForbiddenError("403")
        return await find(kind, namespace, name)

    async def fails() -> None:
        raise PermissionError("403")

    async def spawn(*, namespaces: tuple[str, ...], **given: Any) -> Any:
        if not lives:
            taken.extend(gone)
        lives.append(namespaces)
        tasks = await spawn_tasks(namespaces=namespaces, **given)
        if set(taken) & set(namespaces):
            return [*tasks, asyncio.create_task(fails())]
        if not taken:
            last.set()
        return tasks

    monkeypatch.setattr(world.store, "find", asked)
    monkeypatch.setattr(kopf, "spawn_tasks", spawn)
    monkeypatch.setattr(shell_kopf, "RESTART_S", 0.0)
    monkeypatch.setattr(shell_kopf, "REFUSED_S", 0.01)
    assert asyncio.run(run_told(world, lambda: asyncio.wait_for(last.wait(), SOON_S), ("a", "b"))) == ["led until the end"]
    assert lives == [("a", "b"), *([("a",)] if gone == ["b"] else []), ("a", "b")]


class Closed:
    """Fleets in two namespaces, in one of which a kind may not be read at first."""

    def __init__(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.closed, self.kind = World(), {"b"}, kind
        self.operator = self.world.operator = Reconciler(self.world.api, Platform(), self.world)  # of every namespace
        self.spawned = list[tuple[str, ...]]()
        self._find, self._list = self.world.store.find, self.world.store.list
        monkeypatch.setattr(self.world.store, "find", self.find)
        monkeypatch.setattr(self.world.store, "list", self.list)
        monkeypatch.setattr(kopf, "spawn_tasks", self.spawn)

    def check(self, kind: Kind, namespace: str | None) -> None:
        if namespace in self.closed and kind == self.kind:
            raise ForbiddenError(f"{kind.plural} is forbidden")

    async def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self.check(kind, namespace)
        return await self._find(kind, namespace, name)

    async def list(self, kind: Kind, namespace: str | None = None, labels: Any = None) -> list[Object]:
        self.check(kind, namespace)
        return await self._list(kind, namespace, labels)

    async def spawn(self, **given: Any) -> Any:
        self.spawned.append(given["namespaces"])
        return await spawn_tasks(**given)

    async def pods(self, namespace: str) -> int:
        return len(await self._list(POD, namespace))

    async def until_served(self, namespace: str) -> None:
        async with asyncio.timeout(SOON_S):
            while await self.pods(namespace) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def play(self) -> None:
        for namespace in ("a", "b"):
            wish = manifest()
            await self.world.user.apply({**wish, "metadata": {**wish["metadata"], "namespace": namespace}})
        await self.until_served("a")
        (theirs,) = await self._list(FLEET, "b")
        self.operator.feed(FLEET, WatchEvent("ADDED", theirs))  # kopf may tell of fleets before their children are known
        await asyncio.sleep(0.05)
        assert (await self.pods("b"), self.operator.closed) == (0, {"b"})
        self.closed.clear()
        await self.until_served("b")
        assert self.operator.closed == set()


@pytest.mark.parametrize("kind", [FLEET, POD], ids=lambda kind: kind.kind)
def test_a_namespace_that_may_not_be_read_at_the_start_is_left_alone_until_it_may(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Incident: one RoleBinding was not there yet, and the operator ended (exit 2) and served no other namespace."""
    monkeypatch.setattr(shell_kopf, "RESTART_S", 0.0)
    monkeypatch.setattr(shell_kopf, "REFUSED_S", 0.2)
    there = Closed(kind, monkeypatch)
    assert asyncio.run(run_told(there.world, there.play, ("a", "b"))) == ["led until the end"]
    assert there.spawned[0] == ("a",)
    assert f"namespace b may not be read: {kind.plural} is forbidden" in caplog.text
    assert "bind the operator's Role there" in caplog.text


def test_no_namespace_that_may_be_read_ends_the_operator_with_its_own_error(monkeypatch: pytest.MonkeyPatch):
    async def forbidden(*_: Any) -> Object:
        raise ForbiddenError("pods is forbidden")

    world = World()
    monkeypatch.setattr(world.store, "find", forbidden)
    with pytest.raises(ForbiddenError, match="pods is forbidden"):
        asyncio.run(run_in_cluster(world.store, world.operator, None, ("a", "b")))


@pytest.mark.parametrize("error", [UnavailableError, UnauthorizedError])
def test_an_api_that_knows_nobody_for_a_moment_is_waited_for(
    error: type[UnavailableError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A namespaced operator, which may not read nodes, ended (exit 2): at a 401 at once, and where the question for nodes was
    not answered at the refusal of their watch."""
    world, refused = World(), list[Kind]()
    find = world.store.find

    async def asked(kind: Kind, namespace: str | None, name: str) -> Object | None:
        if kind in (FLEET, NODE) and kind not in refused:
            refused.append(kind)
            raise error("not yet")
        if kind == NODE:
            raise ForbiddenError("nodes is forbidden")
        return await find(kind, namespace, name)

    monkeypatch.setattr(world.store, "find", asked)
    monkeypatch.setattr("fleet_operator.follow_children.AGAIN_S", 0.0)
    assert asyncio.run(run_told(world, lambda: asyncio.sleep(0.3), ("a",))) == ["led until the end"]
    assert refused == [FLEET, NODE]
    assert f"{error.reason}: not yet; again in 0 s" in caplog.text


class Discovery:
    """An API server that learns of InferenceFleets after it was asked once."""

    def __init__(self) -> None:
        self.asked = 0
        self.watched = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/api":
                return web.json_response({"versions": ["v1"]})
            case "/apis":
                groups = [("inferencefleet.io", "v1alpha1"), ("apiextensions.k8s.io", "v1")]
                named = [{"name": name, "versions": [{"version": v}], "preferredVersion": {"version": v}} for name, v in groups]
                return web.json_response({"groups": named})
            case "/api/v1":
                return self.resources(("namespaces", "Namespace"), ("events", "Event"))
            case "/apis/apiextensions.k8s.io/v1":
                return self.resources(("customresourcedefinitions", "CustomResourceDefinition"))
            case "/apis/inferencefleet.io/v1alpha1":
                self.asked += 1
                return self.resources(*([("inferencefleets", "InferenceFleet")] if self.asked > 1 else []))
        if request.query.get("watch"):
            self.watched.set()
            await asyncio.sleep(3_600)
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []})

    def resources(self, *named: tuple[str, str]) -> web.Response:
        verbs = ["list", "watch", "patch", "get", "create"]
        found = [{"name": n, "singularName": k.lower(), "kind": k, "namespaced": True, "verbs": verbs} for n, k in named]
        return web.json_response({"kind": "APIResourceList", "resources": found})


def test_an_api_server_that_knows_no_fleets_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int):
    """kopf asks once. A change of a fleet was seen by the audit only, 40 seconds late, until the operator was restarted."""
    monkeypatch.setattr(shell_kopf, "RESTART_S", 0.0)
    monkeypatch.setenv("FLEET_KUBE_URL", f"http://127.0.0.1:{unused_tcp_port}")

    async def scenario() -> list[str]:
        discovery, app = Discovery(), web.Application()
        app.router.add_route("*", "/{path:.*}", discovery.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
        try:
            return await run_told(World(), lambda: asyncio.wait_for(discovery.watched.wait(), SOON_S))
        finally:
            await runner.cleanup()

    assert asyncio.run(scenario()) == ["led until the end"]


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
