"""KV that is given back: in bounded time, in bounded number, and counted. Incident: every release that a worker did not answer
kept one connection for ever."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest

from fleet_router.ending import framed
from fleet_router.metrics import COMPILED, Metrics
from fleet_router.release import PER_WORKER_MOST, RELEASE_S, Release, Releases
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import LONG, Rig, answer_of, ask, http, run, until

UNREAD = b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}\n\n'


async def refuses(_: Any, writer: asyncio.StreamWriter) -> bool:
    answer(writer, 400, {"error": {"message": "no"}})
    return True


def counted(rig: Rig) -> dict[str, int]:
    """After a sweep."""
    rig.context.releases.sweep(rig.context.clock())
    text = rig.router.plain(b"/metrics")[2].decode()
    lines = [line.split("} ") for line in text.splitlines() if line.startswith("fleet_router_kv_releases_total{")]
    return {name.split('"')[1]: int(count) for name, count in lines if count != "0"}


def held_connections(rig: Rig) -> int:
    return sum(len(found) for found in rig.context.releases._by_pool.values())


def test_b8_releases_that_nobody_answers_end_and_leave_no_connection():
    async def go(rig: Rig) -> None:
        over, open_now = asyncio.Event(), 0
        serve = rig.prefill[0]._serve

        async def counting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal open_now
            open_now += 1
            await serve(reader, writer)
            open_now -= 1

        await rig.prefill[0].stop()
        rig.prefill[0].hold_releases = over
        rig.prefill[0]._server = await asyncio.start_server(counting, "127.0.0.1", rig.prefill[0].port)
        rig.decode[0].behave = refuses
        for i in range(5):
            assert (await rig.post(ask(prompt=f"{i}{LONG}")))[0] == 400
        await until(lambda: len(rig.prefill[0].released) == 5)
        assert open_now >= 5
        rig.context.releases.sweep(rig.context.clock() + RELEASE_S - 1)
        assert open_now >= 5
        rig.context.releases.sweep(rig.context.clock() + RELEASE_S + 1)
        over.set()
        await until(lambda: open_now <= 1)
        assert counted(rig) == {"late": 5}
        assert rig.context.releases._by_pool == {}

    run(go)


def test_b8_no_more_than_a_few_wait_for_one_worker():
    async def go(rig: Rig) -> None:
        rig.prefill[0].hold_releases = over = asyncio.Event()
        pool = rig.context.table.by_role["prefill"][0].pool
        more = 7
        head = b"POST /kv/release HTTP/1.1\r\nhost: h\r\ncontent-length: 16\r\n\r\n"
        for _ in range(PER_WORKER_MOST + more):
            rig.context.releases.send(pool, head + b'{"lease_id":"l"}', rig.context.clock())
        assert held_connections(rig) == PER_WORKER_MOST
        assert rig.context.metrics.releases == {"dropped": more}
        await until(lambda: len(rig.prefill[0].released) == PER_WORKER_MOST)
        over.set()
        await until(lambda: counted(rig).get("done") == PER_WORKER_MOST)
        assert held_connections(rig) == 0

    run(go)


@pytest.mark.parametrize(
    ("how", "outcome"), [("answers", "done"), ("refuses", "refused"), ("closes", "lost"), ("gone", "unreachable")]
)
def test_b8_what_became_of_a_release_is_counted(how: str, outcome: str):
    async def go(rig: Rig) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(16)
            if how != "closes":
                answer(writer, 200 if how == "answers" else 404, {})
                await writer.drain()
            writer.close()

        worker = rig.prefill[0]
        await worker.stop()
        if how != "gone":
            worker._server = await asyncio.start_server(serve, "127.0.0.1", worker.port)
        pool = rig.context.table.by_role["prefill"][0].pool
        payload = b'POST /kv/release HTTP/1.1\r\nhost: h\r\ncontent-length: 16\r\n\r\n{"lease_id":"l"}'
        rig.context.releases.send(pool, payload, rig.context.clock())
        await until(lambda: counted(rig) == {outcome: 1})

    run(go)


interpreted = pytest.mark.skipif(COMPILED, reason="compiled code takes a real pool only: `make unit` runs this one")


class LatePool:
    """A connection is there when the test says so."""

    def __init__(self) -> None:
        self.connected: Any = None
        self.fresh: list[bool] = []
        self.given_back: list[Any] = []

    def take(self, connected: Any, *, fresh: bool) -> None:
        self.connected = connected
        self.fresh.append(fresh)

    def put(self, connection: Any) -> None:
        self.given_back.append(connection)


class Connection:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, _: Any, payload: bytes) -> None:
        self.sent.append(payload)


@interpreted
@pytest.mark.parametrize("late", [False, True])
def test_a_connection_that_comes_after_the_time_is_over_is_given_back_unused(late: bool):
    pool, connection = LatePool(), Connection()
    one = Release(pool, b"x", 5.0)  # type: ignore[arg-type]
    one.send()
    if late:
        one.expire()
    pool.connected(connection, "")
    assert (connection.sent, pool.given_back) == (([], [connection]) if late else ([b"x"], []))
    assert one.outcome == ("late" if late else "")


@interpreted
def test_a_release_that_is_lost_is_sent_once_more_on_a_fresh_connection():
    pool = LatePool()
    one = Release(pool, b"x", 5.0)  # type: ignore[arg-type]
    one.send()
    one.on_lost("closed")
    assert (pool.fresh, one.outcome) == ([False, True], "")
    one.on_lost("closed")
    assert (pool.fresh, one.outcome) == ([False, True], "lost")


@interpreted
def test_one_that_is_over_is_counted_once_while_another_is_under_way():
    metrics, pool = Metrics(), LatePool()
    releases = Releases(metrics)
    for _ in range(2):
        releases.send(pool, b"x", 100.0)  # type: ignore[arg-type]
    pool.connected(None, "refused")
    for now in (101.0, 102.0, 103.0):
        releases.sweep(now)
        assert metrics.releases == {"unreachable": 1}
    releases.sweep(100.0 + RELEASE_S + 1)
    assert (metrics.releases, releases._by_pool) == ({"unreachable": 1, "late": 1}, {})


@pytest.mark.parametrize("ends", ["client leaves", "worker dies", "deadline"])
def test_a_head_alone_has_not_read_the_kv(ends: str):
    """Engines that send it at once may wait for a place behind it: the lease of a leg that was cut then ran out by itself."""

    async def go(rig: Rig) -> None:
        begun, dies = asyncio.Event(), asyncio.Event()

        async def waits(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            await writer.drain()
            begun.set()
            await dies.wait()
            writer.close()
            return True

        rig.decode[0].behave = waits
        _, writer, connection = await rig.connect()
        writer.write(http(ask(stream=True)))
        await begun.wait()
        await until(lambda: connection.flow is not None and connection.flow.started)
        if ends == "client leaves":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
        elif ends == "worker dies":
            dies.set()
        else:
            rig.sweep(1_000.0)
        await until(lambda: rig.prefill[0].released[:1] == ["lease-1"])
        dies.set()

    run(go)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ends", ["its time is over", "the router goes"])
def test_a_request_that_is_cut_before_its_first_byte_gives_its_kv_back(ends: str, stream: bool):
    async def go(rig: Rig) -> None:
        dies = asyncio.Event()

        async def waits(_: Any, writer: asyncio.StreamWriter) -> bool:
            await dies.wait()
            writer.close()
            return True

        rig.decode[0].behave = waits
        reader, writer, connection = await rig.connect()
        writer.write(http(ask(stream=stream)))
        await until(lambda: bool(rig.decode[0].seen))
        if ends == "the router goes":
            connection.cut()
        else:
            rig.sweep(1_000.0)
        assert (await answer_of(reader))[0] == (503 if ends == "the router goes" else 504)
        await until(lambda: rig.prefill[0].released == ["lease-1"])
        dies.set()

    run(go)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("together", [False, True])
def test_a_stream_of_nothing_has_not_read_the_kv(path: str, together: bool):
    """Incident: in another dialect its end was taken for a first byte: the KV stayed until its lease ran out, and a first token
    was measured that nobody had."""

    async def go(rig: Rig) -> None:
        async def empty(_: Any, writer: asyncio.StreamWriter) -> bool:
            rig.decode[0].behave = None
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            if not together:
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.write(b"0\r\n\r\n")
            return True

        rig.decode[0].behave = empty
        said: dict[str, Any] = {"/v1/completions": {"prompt": LONG}, "/v1/responses": {"input": LONG}}.get(
            path, {"max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}
        )
        await rig.post({"model": "m", "stream": True, **said}, path)
        await until(lambda: rig.prefill[0].released == ["lease-1"])
        assert rig.context.metrics.of("t", "r").ttft.total_s == 0.0

    run(go)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("comment", [b"", b": ping\n\n"])
def test_an_error_before_anything_else_has_not_read_the_kv(path: str, together: bool, comment: bytes):
    """vLLM tells so of KV that it could not read (kv_load_failure_policy: fail). Incident: it counted as a first token, the
    prefill worker kept the blocks until they ran out, and the pair that cannot meet was counted as one that can."""

    async def go(rig: Rig) -> None:
        asked = list[Any]()

        async def fails(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            asked.append(body)
            if len(asked) > 1:
                return False
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            if not together:
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.write(framed(comment + UNREAD) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return True

        for worker in rig.decode:
            worker.behave = fails
        said: dict[str, Any] = {"/v1/completions": {"prompt": LONG}, "/v1/responses": {"input": LONG}}.get(
            path, {"max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}
        )
        _, got = await rig.post({"model": "m", "stream": True, **said}, path)
        assert UNREAD not in got
        await until(lambda: rig.prefill[0].released[:1] == ["lease-1"])
        metrics = rig.context.metrics.of("t", "r")
        assert (len(rig.context.table.pairs.breakers), metrics.errors, sum(metrics.ttft.fold())) == (1, 1, 1)

    run(go, decode=2)
