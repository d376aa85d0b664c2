"""How the worker set reaches a router: within a second, without a restart, and a bad document never replaces a good one."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_router.config import RouterConfig
from fleet_router.config import encode as encode_config
from fleet_router.follow.directory import POLL_S, follow_directory
from fleet_router.follow.documents import Documents, parse
from fleet_router.follow.kube import Pace, follow_kube
from fleet_router.follow.kube_http import ApiServer, api_server
from fleet_wire.endpoints import ENDPOINTS_KEY, ROUTER_CONFIG_KEY, Endpoint, Endpoints
from fleet_wire.endpoints import encode as encode_endpoints

WITHIN_S = 1.0


def documents(*names: str) -> dict[str, str]:
    workers = tuple(
        Endpoint(
            name=name, uid=name, address="127.0.0.1", http_port=1, agent_port=2, role="decode", tier="t", revision="r", compat="c"
        )
        for name in names
    )
    return {
        ROUTER_CONFIG_KEY: encode_config(RouterConfig(fleet="f", served_name="m")),
        ENDPOINTS_KEY: encode_endpoints(Endpoints(fleet="f", namespace="n", workers=workers)).decode(),
    }


class Seen:
    """What a follower delivered."""

    def __init__(self) -> None:
        self.applied: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.problems: asyncio.Queue[str] = asyncio.Queue()
        self.same = 0
        """How often it found what it had delivered last."""

    def apply(self, found: Documents) -> None:
        self.applied.put_nowait(tuple(worker.name for worker in found.endpoints.workers))

    def again(self) -> None:
        self.same += 1

    async def next(self) -> tuple[str, ...]:
        return await asyncio.wait_for(self.applied.get(), WITHIN_S)

    async def problem(self) -> str:
        return await asyncio.wait_for(self.problems.get(), WITHIN_S)


def following(follow: Callable[[Seen], Awaitable[None]], scenario: Callable[[Seen], Awaitable[None]]) -> None:
    async def go() -> None:
        seen = Seen()
        task = asyncio.ensure_future(follow(seen))
        try:
            await scenario(seen)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({ENDPOINTS_KEY: None}, "endpoints.json is missing"),
        ({ROUTER_CONFIG_KEY: None}, "router.json is missing"),
        ({ENDPOINTS_KEY: "{"}, "endpoints.json: "),
        ({ENDPOINTS_KEY: '{"fleet":"f","namespace":"n","workers":[{"name":3}]}'}, "$.workers[0]"),
        ({ROUTER_CONFIG_KEY: '{"fleet":"f","served_name":"m","load_bound":"x"}'}, "$.load_bound"),
    ],
)
def test_a_bad_document_is_named(change: dict[str, str | None], words: str):
    data = {key: value for key, value in {**documents("a"), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=r"\.json") as caught:
        parse(data)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttft_budget_s", 0), ("load_bound", 0.5), ("slow_start_s", -1), ("queue_per_slot", -1), ("worker_slots", -1),
        ("first_token_deadline_s", 0), ("inter_token_deadline_s", 0), ("whole_answer_most_s", 0), ("silent_s", -1),
        ("upstream_idle_s", 0), ("bounds.connections", 0), ("bounds.idle_s", 0), ("bounds.body_bytes", -5),
        ("bounds.header_deadline_s", 0), ("classes[0].ttft_budget_s", 0),
    ],
)  # fmt: skip
def test_a_bound_that_lets_nothing_through_is_refused_and_the_last_one_kept(field: str, value: float):
    """It was taken: with a budget of 0 s each request of a class ended with 500, with 0 connections all ended with 503."""
    outer, _, name = field.rpartition(".")
    given: dict[str, object] = {name: value}
    if outer == "bounds":
        given = {"bounds": given}
    elif outer:
        given = {"classes": [{"name": "c", **given}]}
    with pytest.raises(ValueError, match=r"router\.json") as caught:
        parse(documents("a") | {ROUTER_CONFIG_KEY: json.dumps({"fleet": "f", "served_name": "m", **given})})
    assert f"$.{field}" in str(caught.value)


def test_a_router_that_is_older_than_its_operator_passes_over_what_it_does_not_know():
    newer = '{"fleet":"f","served_name":"m","colour":1,"bounds":{"future_bytes":1}}'
    known = parse(documents("a") | {ROUTER_CONFIG_KEY: '{"fleet":"f","served_name":"m"}'})
    assert parse(documents("a") | {ROUTER_CONFIG_KEY: newer}) == known


# -- a folder -------------------------------------------------------------------------------------------------------
def write(folder: Path, data: dict[str, str]) -> None:
    """As the kubelet projects a ConfigMap: a new folder, then one link is swapped."""
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    for key, value in data.items():
        (version / key).write_text(value)
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(Path("..data") / key)
    fresh = folder / "..data_tmp"
    fresh.symlink_to(version.name)
    os.replace(fresh, folder / "..data")


def test_a_folder_is_followed(tmp_path: Path):
    async def scenario(seen: Seen) -> None:
        await seen.problem()  # nothing there yet
        write(tmp_path, documents("a"))
        assert await seen.next() == ("a",)
        write(tmp_path, documents("a", "b"))
        assert await seen.next() == ("a", "b")
        before = seen.same
        await asyncio.sleep(3 * POLL_S)
        assert seen.same > before, "nobody changes it: it is as new as can be"
        write(tmp_path, {**documents("c"), ENDPOINTS_KEY: '{"half'})
        assert "endpoints.json" in await seen.problem()
        before = seen.same
        await asyncio.sleep(2 * POLL_S)
        assert seen.applied.empty()
        assert seen.same == before, "what is there is not what is in force"
        write(tmp_path, documents("c"))
        assert await seen.next() == ("c",)

    following(lambda seen: follow_directory(tmp_path, seen.apply, seen.problems.put_nowait, seen.again), scenario)


def test_a_document_that_could_not_be_opened_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With every file of the process in use, a change was lost until the next one came."""
    write(tmp_path, documents("a"))
    read, left = Path.read_bytes, [2]

    def full(path: Path) -> bytes:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path)

    async def scenario(seen: Seen) -> None:
        assert "Too many" in await seen.problem()
        assert await seen.next() == ("a",)

    monkeypatch.setattr(Path, "read_bytes", full)
    following(lambda seen: follow_directory(tmp_path, seen.apply, seen.problems.put_nowait, seen.again), scenario)


# -- the API server -------------------------------------------------------------------------------------------------
class Api:
    """Answers list and watch as an API server does; the test says what happens."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.refuse: list[int] = []
        self.odd: list[bytes] = []
        """Answers that no API server gives, one by one."""
        self.tokens: list[str] = []
        self.lists = self.watches = 0
        self.watched = ""
        """The head of the last watch."""
        self.open = asyncio.Event()
        self.audited: asyncio.Queue[str] = asyncio.Queue()
        """Heads of requests for no more than the metadata."""
        self.tasks: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.current_task())
        try:
            await self.answer(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # connected, and left without a request
        finally:
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.tokens.append(head.split("Bearer ")[1].split("\r\n")[0])
        if self.odd:
            writer.write(self.odd.pop(0))
        elif self.refuse:
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % self.refuse.pop(0))
        elif "watch=true" in head:
            self.watches, self.watched = self.watches + 1, head
            self.open.set()
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while (piece := await self.events.get()) is not None:
                writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
            writer.write(b"0\r\n\r\n")
        elif "PartialObjectMetadata" in head:
            writer.write(self.page([{"metadata": item["metadata"]} for item in self.items]))
            self.audited.put_nowait(head)
        else:
            self.lists += 1
            writer.write(self.page(self.items))
        await writer.drain()

    def page(self, items: list[dict[str, Any]]) -> bytes:
        return page(json.dumps({"metadata": {"resourceVersion": "5"}, "items": items}).encode())

    def send(self, kind: str, item: dict[str, Any], pieces: int = 1) -> None:
        line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
        size = -(-len(line) // pieces)
        for start in range(0, len(line), size):
            self.events.put_nowait(line[start : start + size])


def config_map(*names: str, version: str = "5") -> dict[str, Any]:
    return {"metadata": {"name": "f-router", "resourceVersion": version}, "data": documents(*names)}


AS_IT_IS = Pace()


def with_api(tmp_path: Path, scenario: Callable[[Seen, Api], Awaitable[None]], pace: Pace = AS_IT_IS) -> None:
    (tmp_path / "token").write_text("first\n")

    async def go() -> None:
        api, seen = Api(), Seen()
        server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        task = asyncio.create_task(
            follow_kube(
                "n", "f-router", seen.apply, seen.problems.put_nowait, seen.again, ApiServer(url, tmp_path / "token", None), pace
            )
        )
        try:
            await scenario(seen, api)
        finally:
            ending = [task, *(found for found in api.tasks if found is not None)]
            for found in ending:
                found.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            server.close()

    asyncio.run(go())


def test_list_then_watch(tmp_path: Path):
    async def go(seen: Seen, api: Api) -> None:
        api.items = [config_map("a")]
        assert await seen.next() == ("a",)
        api.send("MODIFIED", config_map("a", "b"), pieces=7)
        assert await seen.next() == ("a", "b")
        api.send("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
        api.send("DELETED", config_map())
        api.send("ADDED", config_map("c"))
        assert await seen.next() == ("c",)

    with_api(tmp_path, go)


def test_a_watch_that_is_too_old_begins_with_a_new_list_and_reads_the_token_again(tmp_path: Path):
    async def go(seen: Seen, api: Api) -> None:
        api.items = [config_map("a")]
        assert await seen.next() == ("a",)
        api.items = [config_map("b")]
        (tmp_path / "token").write_text("second")
        api.send("ERROR", {"kind": "Status", "code": 410})
        api.events.put_nowait(None)
        assert await seen.next() == ("b",)
        assert set(api.tokens) == {"first", "second"}

    with_api(tmp_path, go)


def test_what_the_api_server_refuses_is_told_and_tried_again(tmp_path: Path):
    async def go(seen: Seen, api: Api) -> None:
        api.refuse = [403, 500]
        api.items = [config_map("a")]
        assert await seen.problem() == "OSError: the API server answered 403 to /api/v1/namespaces/n/configmaps"
        assert "500" in await seen.problem()
        assert await seen.next() == ("a",)

    with_api(tmp_path, go)


def page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(b"x\r\n\r\n", id="no status line"),
        pytest.param(page(b"[]"), id="a list"),
        pytest.param(page(b"null"), id="null"),
        pytest.param(page(b'{"items":3,"metadata":{"resourceVersion":"5"}}'), id="items that are a number"),
        pytest.param(page(b'{"items":[null],"metadata":{"resourceVersion":"5"}}'), id="an item that is null"),
        pytest.param(page(b'{"items":[{"data":[1]}],"metadata":{"resourceVersion":"5"}}'), id="data that is a list"),
        pytest.param(page(b'{"items":[{"data":{"router.json":3,"endpoints.json":4}}],"metadata":{}}'), id="documents of numbers"),
        pytest.param(page(b'{"items":[],"metadata":null}'), id="no metadata"),
        pytest.param(page(b"[" * 100_000), id="deep"),
    ],
)
def test_what_is_no_answer_of_an_api_server_is_told_and_tried_again(tmp_path: Path, odd: bytes):
    """A proxy's page in its place ended the router, and every stream with it."""

    async def go(seen: Seen, api: Api) -> None:
        api.odd = [odd]
        api.items = [config_map("a")]
        assert await seen.problem()
        assert await seen.next() == ("a",)

    with_api(tmp_path, go)


@pytest.mark.parametrize("line", [b"[]", b"3", b"null", b'{"type":"ADDED"}', b'{"type":"ADDED","object":null}', b"[" * 100_000])
def test_what_is_no_event_is_told_and_listed_again(tmp_path: Path, line: bytes):
    async def go(seen: Seen, api: Api) -> None:
        api.items = [config_map("a")]
        assert await seen.next() == ("a",)
        api.items = [config_map("b")]
        api.events.put_nowait(line + b"\n")
        assert await seen.problem()
        assert await seen.next() == ("b",)

    with_api(tmp_path, go)


def test_a_bad_document_keeps_the_last_good_one(tmp_path: Path):
    async def go(seen: Seen, api: Api) -> None:
        api.items = [config_map("a")]
        assert await seen.next() == ("a",)
        api.send("MODIFIED", {"metadata": {"name": "f-router"}, "data": {ROUTER_CONFIG_KEY: "{}"}})
        assert await seen.problem() == "endpoints.json is missing"
        api.send("MODIFIED", config_map("b"))
        assert await seen.next() == ("b",)

    with_api(tmp_path, go)


def test_a_watch_that_always_ends_at_once_does_not_become_a_storm(tmp_path: Path):
    async def go(seen: Seen, api: Api) -> None:
        for _ in range(100):
            api.events.put_nowait(None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), WITHIN_S)
        assert 2 <= api.watches <= 10

    with_api(tmp_path, go)


def test_a_watch_that_freezes_is_made_anew(tmp_path: Path):
    """It asked for no bookmarks and waited 330 s: routers sent requests to workers that were long gone."""

    async def go(seen: Seen, api: Api) -> None:
        api.items = [config_map("a")]
        assert await seen.next() == ("a",)
        api.items = [config_map("b", version="6")]
        assert await seen.problem() == "TimeoutError: the watch said nothing for 0.1 s"
        assert await seen.next() == ("b",)
        assert "allowWatchBookmarks=true" in api.watched

    with_api(tmp_path, go, Pace(silence_s=0.1))


OFTEN = Pace(audit_s=0.02, late_s=0.05)


def test_an_event_that_never_came_is_made_up_for_by_an_audit_of_metadata(tmp_path: Path):
    async def go(seen: Seen, api: Api) -> None:
        api.items = [config_map("a")]
        assert await seen.next() == ("a",)
        assert "fieldSelector=metadata.name%3Df-router" in await api.audited.get()
        assert (api.lists, api.watches, seen.problems.qsize()) == (1, 1, 0)
        api.items = [config_map("b", version="6")]
        assert await seen.problem() == "the watch had not told of the last change: listed again"
        assert await seen.next() == ("b",)

    with_api(tmp_path, go, OFTEN)


def test_an_audit_that_knows_of_a_change_before_its_watch_waits_for_it(tmp_path: Path):
    async def go(seen: Seen, api: Api) -> None:
        api.items = [config_map("a")]
        assert await seen.next() == ("a",)
        api.items = [config_map("b", version="6")]
        for _ in range(api.audited.qsize() + 1):
            await api.audited.get()
        api.send("MODIFIED", config_map("b", version="6"))
        assert await seen.next() == ("b",)
        for _ in range(3):
            await api.audited.get()
        assert (api.lists, api.watches, seen.problems.qsize()) == (1, 1, 0)

    with_api(tmp_path, go, Pace(audit_s=0.02, late_s=0.5))


def test_an_audit_says_that_nothing_changed_and_never_of_what_could_not_be_read(tmp_path: Path):
    """The age of the endpoints grew to five minutes, a watch's length, where nobody changed them: the alert for documents that
    cannot be read (RUNBOOK.md, 120 s) fired at every fleet at rest."""

    async def go(seen: Seen, api: Api) -> None:
        api.items = [config_map("a")]
        assert await seen.next() == ("a",)
        for _ in range(api.audited.qsize() + 3):
            await api.audited.get()
        assert seen.same >= 2
        bad = {"metadata": {"name": "f-router", "resourceVersion": "6"}, "data": {ROUTER_CONFIG_KEY: "{}"}}
        api.items = [bad]
        api.send("MODIFIED", bad)
        assert await seen.problem() == "endpoints.json is missing"
        before = seen.same
        for _ in range(api.audited.qsize() + 3):
            await api.audited.get()
        assert seen.same == before

    with_api(tmp_path, go, Pace(audit_s=0.02, late_s=0.5))


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        pytest.param(b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n", "audit: OSError: the API server answered 503", id="503"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", "audit: ValidationError: ", id="no page"),
        pytest.param(None, "", id="the ConfigMap is gone"),
    ],
)
def test_an_audit_that_finds_nothing_leaves_the_watch_alone(tmp_path: Path, odd: bytes | None, problem: str):
    async def go(seen: Seen, api: Api) -> None:
        api.items = [config_map("a")]
        assert await seen.next() == ("a",)
        await api.open.wait()
        api.items, api.odd = [], [] if odd is None else [odd]
        for _ in range(api.audited.qsize() + 2):
            await api.audited.get()
        assert (await seen.problem() if problem else "").startswith(problem)
        api.send("MODIFIED", config_map("b", version="6"))
        assert await seen.next() == ("b",)
        assert (api.lists, api.watches) == (1, 1)

    with_api(tmp_path, go, OFTEN)


@pytest.mark.parametrize(
    ("env", "url"),
    [
        ({"FLEET_KUBE_URL": "https://k:6443"}, "https://k:6443"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "https://10.0.0.1:443"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, "https://[fd00::1]:6443"),
    ],
)
def test_where_the_api_server_is(env: dict[str, str], url: str):
    assert api_server(env).url == url


def test_outside_a_cluster_is_told():
    with pytest.raises(ValueError, match="neither FLEET_KUBE_URL nor KUBERNETES_SERVICE_HOST is set"):
        api_server({})
