"""Admission in the router: keys, quotas, the queue and runaway streams on real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.config import RouterConfig, SloClass
from fleet_router.flood import MOST_BYTES
from fleet_router.metrics import COMPILED
from fleet_router.process import Router, Settings
from tests.fleet_router.admission.made import key_of, parsed
from tests.fleet_router.fake_worker import stream
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

SLOTS = msgspec.structs.replace(CONFIG, worker_slots=1, ttft_budget_s=5.0)
KEY = f"authorization: Bearer {key_of('acme')}"
SPREAD = msgspec.structs.replace(SLOTS, policy="leastLoad")
WATCHED = msgspec.structs.replace(CONFIG, runaway=True)


def with_tenants(rig: Rig, **tenants: dict[str, Any]) -> None:
    desk = rig.context.desk
    desk.tenants_needed = True
    desk.know(parsed(**tenants))


async def send(rig: Rig, *headers: str, path: str = "/v1/completions", method: str = "POST", **more: Any):
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    rig.writers.append(writer)
    writer.write(http(ask(prompt="short", **more) if method == "POST" else b"", *headers, path=path, method=method))
    return await answer_of(reader)


@pytest.mark.parametrize("header", [KEY, f"Authorization: bearer {key_of('acme')}", f"x-api-key: {key_of('acme')}"])
def test_a_key_opens(header: str):
    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={"requestsPerSecond": 5})
        status, headers, _ = await send(rig, header)
        assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "4")
        assert (await send(rig, header, path="/v1/models", method="GET"))[0] == 200

    run(go)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401), (["authorization: Bearer wrong"], 401), (["authorization: Basic YTpi"], 401), (["x-api-key: "], 401),
        ([KEY, "x-api-key: other"], 400), (["authorization: Bearer a", "authorization: Bearer b"], 400),
        ([KEY, "x-slo-class: gold"], 403), ([KEY, "x-slo-ttft-ms: soon"], 400), ([KEY, "x-slo-ttft-ms: 0"], 400),
    ],
)  # fmt: skip
def test_what_does_not_open(headers: list[str], status: int):
    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={})
        found, answer_headers, body = await send(rig, *headers)
        error = json.loads(body)["error"]
        assert found == status
        assert set(error) >= {"message", "type", "param", "code", "request_id", "retryable"}
        assert error["type"] == "invalid_request_error"
        assert not error["retryable"]
        assert ("www-authenticate" in answer_headers) == (status == 401)
        assert rig.decode[0].seen == []
        assert key_of("acme").encode() not in body

    run(go)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/models", "GET", 401), ("/v1/completions", "POST", 401), ("/v1/chat/completions", "POST", 401),
        ("/v1/embeddings", "POST", 401), ("/v1/messages", "POST", 401), ("/v1/responses", "POST", 401),
        ("/tokenize", "POST", 401), ("/detokenize", "POST", 401),
        ("/health", "GET", 200), ("/ready", "GET", 200), ("/metrics", "GET", 200),
        ("//v1/models", "GET", 404), ("/v1/models/", "GET", 401), ("/v1/models/m", "GET", 401),
        ("/V1/models", "GET", 404), ("/v1/%6dodels", "GET", 404),
    ],
)  # fmt: skip
def test_every_path_that_tells_or_does_something_needs_a_key(path: str, method: str, status: int):
    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={})
        reader, writer, _ = await rig.connect()
        writer.write(http({"nonsense": 1} if method == "POST" else b"", path=path, method=method))
        found, _, body = await answer_of(reader)
        assert found == status, body
        assert rig.decode[0].seen == []

    run(go)


FAR = "x-forwarded-for: 10.1.2.3"
"""It comes from another host."""


@pytest.mark.parametrize("path", ["/metrics", "/held?wait_s=0"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [([], 200), ([FAR], 401), ([FAR, KEY], 403), ([FAR, f"authorization: Bearer {key_of('sees')}"], 200),
     ([FAR, "x-api-key: wrong"], 401), ([f"{FAR}, {'1' * 300}"], 401), ([f"Forwarded: for={'1' * 300}"], 401)],
)  # fmt: skip
def test_who_names_every_tenant_needs_a_right_where_clients_ask(path: str, headers: list[str], status: int):
    """Tenants' names and tokens were told to everybody who reached the port."""

    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={"decisions": "own"}, sees={"decisions": "all"})
        found, _, body = await send(rig, *headers, path=path, method="GET")
        assert (found, b'tenant="acme"' in body) == (status, status == 200 and path == "/metrics")
        for open_to_all in ("/health", "/ready"):
            assert (await send(rig, FAR, path=open_to_all, method="GET"))[0] == 200
        rig.context.desk.tenants_needed = False
        assert (await send(rig, FAR, path=path, method="GET"))[0] == 200

    run(go)


@pytest.mark.parametrize("path", ["/metrics", "/held?wait_s=0"])
def test_who_was_forwarded_is_not_the_routers_own_host_before_there_is_any_document(path: str):
    """Headers were not kept until the endpoints were known: whoever came through a proxy of the pod was told of every tenant."""

    async def go(rig: Rig) -> None:
        fresh = Router(Settings("dir:/none", "127.0.0.1", 0))
        fresh._context.desk.tenants_needed = True
        fresh.know(parsed(acme={}))
        async with await asyncio.get_running_loop().create_server(fresh.connection, "127.0.0.1", 0) as server:
            rig.port = server.sockets[0].getsockname()[1]
            found, _, body = await send(rig, FAR, "connection: close", path=path, method="GET")
            assert (found, b"acme" in body) == (401, False)

    run(go)


def test_the_port_for_scrapes_tells_them():
    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={})
        loop = asyncio.get_running_loop()
        admin = await loop.create_server(rig.router.admin_connection, "127.0.0.1", 0)
        async with admin:
            rig.port = admin.sockets[0].getsockname()[1]
            assert [(await send(rig, FAR, path=path, method="GET"))[0] for path in ("/metrics", "/held?wait_s=0")] == [200, 200]
            assert (await send(rig, FAR, KEY))[0] == 404

    run(go)


def test_models_are_listed_as_far_as_they_may_be_used():
    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={"models": ["m"]}, other={"models": ["x"]})
        for name, models in (("acme", ["m"]), ("other", [])):
            key = f"authorization: Bearer {key_of(name)}"
            one, other = await rig.connect(), http(b"", key, path="/v1/models/m", method="GET")
            one[1].write(other)
            assert (await answer_of(one[0]))[0] == (200 if models else 404)
            _, _, body = await send(rig, key, path="/v1/models", method="GET")
            assert [one["id"] for one in json.loads(body)["data"]] == models
        status, _, body = await send(rig, f"authorization: Bearer {key_of('other')}")
        assert (status, json.loads(body)["error"]["code"]) == (403, "model_not_allowed")

    run(go)


def test_s5_a_key_is_nowhere_but_in_the_request(capfd: pytest.CaptureFixture[str]):
    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={"requestsPerSecond": 1})
        heads: list[bytes] = []
        first = rig.decode[0]._serve

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head)
            reader._buffer[:0] = head  # type: ignore[attr-defined]
            await first(reader, writer)

        rig.decode[0]._server.close()  # type: ignore[union-attr]
        rig.decode[0]._server = await asyncio.start_server(listen, "127.0.0.1", rig.decode[0].port)
        bodies = [(await send(rig, KEY))[2], (await send(rig, KEY))[2], (await send(rig, f"x-api-key: {key_of('no')}"))[2]]
        bodies.append((await send(rig, path="/metrics", method="GET"))[2])
        said = b"".join([*heads, *bodies, capfd.readouterr().err.encode(), repr(rig.context.desk._keys).encode()])
        assert heads
        assert b"tenant=" in said
        assert not any(name in b"".join(heads).lower() for name in (b"authorization", b"x-api-key", b"x-slo"))
        assert key_of("acme").encode() not in said
        assert key_of("no").encode() not in said

    run(go)


def test_a_quota_answers_429_with_when_and_why_and_a_refused_request_costs_nothing():
    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={"requestsPerSecond": 0.5})
        assert (await send(rig, KEY))[0] == 200
        status, headers, body = await send(rig, KEY)
        error = json.loads(body)["error"]
        assert (status, headers["retry-after"], error["code"], error["reason"]) == (
            429,
            "2",
            "rate_limit_exceeded",
            "requests_per_second",
        )
        assert error["retryable"]
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert len(rig.decode[0].seen) == 1

    run(go)


def test_usage_settles_the_estimate_and_a_failure_refunds_it():
    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={"tokensPerMinute": 1000, "requestsPerSecond": 10})
        account = rig.context.desk.accounts["acme"]

        def left() -> int:
            assert account.tokens is not None
            return account.tokens.size - round(
                (account.tokens.full_at_ns - int(rig.context.clock() * 1e9)) / account.tokens.each_ns
            )

        async def counted(_: Any, writer: asyncio.StreamWriter) -> bool:
            body = json.dumps({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}})
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            return True

        async def fails(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n")
            return True

        rig.decode[0].behave = counted
        await send(rig, KEY)
        assert 848 <= left() <= 853
        rig.decode[0].behave = fails
        assert (await send(rig, KEY))[0] == 503  # nobody else is there to try
        assert 848 <= left() <= 860
        rig.decode[0].behave = None
        await rig.raw(http(ask(prompt="short", stream=True), KEY, "connection: close"))
        assert 840 <= left() <= 860  # an estimate of two tokens and three events
        assert (account.inflight, account.output_tokens) == (0, 53)
        assert account.counts["failed"] == 1

    run(go)


@pytest.mark.parametrize("config", [CONFIG, WATCHED], ids=["unwatched", "watched"])
@pytest.mark.parametrize("events", [1, 40, 300])
@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"], ids=["lf", "crlf"])
def test_a_stream_that_tells_no_usage_is_charged_by_its_events(config: RouterConfig, events: int, separator: str):
    """The detector of loops counts them where it runs, and finds none in a stream with other line breaks."""

    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={"tokensPerMinute": 100_000})

        async def says(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(events):
                event = f'event: x\ndata: {{"choices":[{{"text":"w{number}"}}]}}{separator}'.encode()
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            event = f"event: x\ndata: [DONE]{separator}".encode()
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
            return True

        rig.decode[0].behave = says
        await rig.raw(http(ask(prompt="short", stream=True), KEY, "connection: close"))
        assert rig.context.desk.accounts["acme"].output_tokens == events

    run(go, prefill=0, config=config)


def test_requests_wait_for_a_slot_and_begin_in_order():
    async def go(rig: Rig) -> None:
        gate = asyncio.Event()

        async def slow(_: Any, __: asyncio.StreamWriter) -> bool:
            await gate.wait()
            return False

        rig.decode[0].behave = slow
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(send(rig, max_tokens=number + 1)))
            await until(lambda number=number: rig.context.desk.gate.waiting == number)  # type: ignore[misc]
        assert len(rig.decode[0].seen) == 1
        text = (await send(rig, path="/metrics", method="GET"))[2].decode()
        assert 'fleet_router_queue_length{class="default"} 3' in text
        assert 'fleet_router_slots{tier="t"} 1' in text
        assert "fleet_router_running 1" in text
        gate.set()
        assert [(await task)[0] for task in tasks] == [200] * 4
        assert [body["max_tokens"] for body in rig.decode[0].seen] == [1, 2, 3, 4]
        assert (rig.context.desk.gate.running, rig.context.desk.gate.waiting) == (0, 0)

    run(go, prefill=0, config=SLOTS)


def test_two_workers_are_two_slots_and_one_that_leaves_takes_its_own_along():
    async def go(rig: Rig) -> None:
        gate = asyncio.Event()

        async def slow(_: Any, __: asyncio.StreamWriter) -> bool:
            await gate.wait()
            return False

        for worker in rig.decode:
            worker.behave = slow
        desk, tasks = rig.context.desk, [asyncio.create_task(send(rig)) for _ in range(2)]
        await until(lambda: desk.gate.running == 2)
        tasks.append(asyncio.create_task(send(rig)))
        await until(lambda: desk.gate.waiting == 1)
        rig.apply([], rig.decode[:1], SPREAD)  # the other one drains: it holds its request and no slot
        assert (desk.slots, desk.gate.waiting) == ({"t": 1}, 1)
        rig.apply([], rig.decode, SPREAD)
        await until(lambda: desk.gate.waiting == 0)
        gate.set()
        assert [(await task)[0] for task in tasks] == [200] * 3

    run(go, prefill=0, decode=2, config=SPREAD)


def test_k8_a_client_that_leaves_the_queue_makes_room_at_once():
    async def go(rig: Rig) -> None:
        gate = asyncio.Event()

        async def slow(_: Any, __: asyncio.StreamWriter) -> bool:
            await gate.wait()
            return False

        rig.decode[0].behave = slow
        first = asyncio.create_task(send(rig))
        await until(lambda: rig.context.desk.gate.running == 1)
        _, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="gone")))
        await until(lambda: rig.context.desk.gate.waiting == 1)
        second = asyncio.create_task(send(rig))
        await until(lambda: rig.context.desk.gate.waiting == 2)
        writer.close()

        def left() -> bool:
            rig.sweep()  # a client that only closed its half may still read: the sweep finds out which
            return rig.context.desk.gate.waiting == 1

        await until(left, 1.0)
        gate.set()
        assert [(await first)[0], (await second)[0]] == [200, 200]
        assert [body["prompt"] for body in rig.decode[0].seen] == ["short", "short"]

    run(go, prefill=0, config=SLOTS)


def test_a_full_queue_says_529_and_a_wait_that_is_too_long_503():
    async def go(rig: Rig) -> None:
        gate, desk = asyncio.Event(), rig.context.desk

        async def slow(_: Any, __: asyncio.StreamWriter) -> bool:
            await gate.wait()
            return False

        rig.decode[0].behave = slow
        tasks = [asyncio.create_task(send(rig)) for _ in range(5)]
        await until(lambda: desk.gate.waiting == 4)
        status, headers, body = await send(rig)
        assert (status, json.loads(body)["error"]["reason"]) == (529, "overloaded")
        assert int(headers["retry-after"]) >= 1
        real, desk._clock = desk._clock, lambda: real() + 4.3
        desk.tick()
        desk._clock = real
        gate.set()
        told = [await task for task in tasks]
        assert sorted(status for status, _, _ in told) == [200, 503, 503, 503, 503]
        late = next(answer for answer in told if answer[0] == 503)
        assert json.loads(late[2])["error"]["reason"] == "queue_timeout"
        assert int(late[1]["retry-after"]) >= 1

    run(go, prefill=0, config=SLOTS)


def test_s2_tenants_prefixes_are_their_own_in_index_and_engine():
    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={}, other={})
        long = "y" * 2000
        for name in ("acme", "other", "acme"):
            await rig.raw(http(ask(prompt=long), f"authorization: Bearer {key_of(name)}", "connection: close"))
        bodies = [body for worker in rig.prefill + rig.decode for body in worker.seen]
        salts = {body["cache_salt"] for body in bodies}
        assert len(salts) == 2
        assert len(rig.prefill[0].seen) == 2  # the third found its own prefix, the second did not find the first's
        assert len(rig.context.table.routing.index) == 2 * (2002 // 256)

    run(go)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_loops_is_ended_with_a_reason_and_its_worker_freed(path: str):
    async def go(rig: Rig) -> None:
        async def loops(_: Any, writer: asyncio.StreamWriter) -> bool:
            await stream(writer, ["again"] * 100_000)
            return True

        rig.decode[0].behave = loops
        asked = ask(prompt="short", stream=True)
        if "chat" in path:
            asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        reader, writer, connection = await rig.connect()
        writer.write(http(asked, path=path))
        body = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        events = [line[6:] for line in body.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]
        last = json.loads(events[-1])["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("repetition", "repetition_detected")
        held = MOST_BYTES // len(events[0])  # the worker floods: so many may come together, before the next look and behind it
        assert 256 <= len(events) <= 256 + 2 * held
        await until(lambda: rig.decode[0].closed_early == 1)  # the worker sees that nobody listens
        assert rig.context.desk.runaways["repetition"] == 1
        rig.decode[0].behave = None
        writer.write(http(ask(prompt="short")))  # the connection is as good as before
        assert (await answer_of(reader))[0] == 200
        assert connection.flow is None

    run(go, prefill=0, config=WATCHED)


def test_a_loop_of_lines_that_end_with_crlf_is_ended():
    async def go(rig: Rig) -> None:
        async def loops(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            event = b'data: {"choices": [{"index": 0, "text": "again"}]}\r\n\r\n'
            while not writer.is_closing():
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
            return True

        rig.decode[0].behave = loops
        body = await rig.raw(http(ask(prompt="short", stream=True), "connection: close"))
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert (b'"stop_reason":"repetition_detected"' in body, rig.context.desk.runaways["repetition"]) == (True, 1)

    run(go, prefill=0, config=WATCHED)


def test_behind_the_end_of_a_runaway_stream_nothing_follows():
    """The worker's next event had begun in the same read: half of it came after the body's end, into the next answer."""

    async def go(rig: Rig) -> None:
        event = b'data: {"choices":[{"text":"again"}]}\n\n'
        chunk = b"%x\r\n%b\r\n" % (len(event), event)

        async def loops(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + chunk)
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(chunk * 600 + chunk[:20])
            return True

        rig.decode[0].behave = loops
        got = await rig.raw(http(ask(prompt="short", stream=True), "connection: close"))
        assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    run(go, prefill=0, config=WATCHED)


def test_a_class_limit_is_given_to_the_engine_where_the_client_gives_none():
    config = msgspec.structs.replace(CONFIG, classes=(SloClass(name="small", max_output_tokens=9),), max_model_len=100_000)

    async def go(rig: Rig) -> None:
        await send(rig, "x-slo-class: small")
        await send(rig)
        status, _, body = await send(rig, "x-slo-class: small", max_tokens=10)
        assert (status, json.loads(body)["error"]["param"]) == (400, "max_tokens")
        assert [body.get("max_tokens") for body in rig.decode[0].seen] == [9, 16]

    run(go, prefill=0, config=config)


def test_a_request_that_cannot_be_read_after_all_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch):
    """A number without end in `stream_options` was read behind the gate: each such request held a slot for ever, and a few of
    them were all of the router's."""

    async def go(rig: Rig) -> None:
        with_tenants(rig, acme={"concurrency": 1, "requestsPerSecond": 100})
        bad = b'{"model":"m","prompt":"a","stream":true,"stream_options":{"a":1e999}}'
        for _ in range(3):
            assert b" 400 " in (await rig.raw(http(bad, KEY, "connection: close"))).partition(b"\r\n")[0]
        if not COMPILED:  # there a class of another module is no name that could stand for something else
            monkeypatch.setattr("fleet_router.cascade.climb.Flow", _breaks)
            for _ in range(3):
                assert b" 500 " in (await rig.raw(http(ask(prompt="a"), KEY, "connection: close"))).partition(b"\r\n")[0]
            monkeypatch.undo()
        assert (rig.context.desk.gate.running, rig.context.desk.accounts["acme"].inflight) == (0, 0)
        assert (await send(rig, KEY))[0] == 200

    run(go)


def _breaks(*_: object) -> None:
    raise ValueError("whatever it is")
