"""Answers that come as a whole: an engine says nothing before their end, and that is no silence. One that is gone is found all
the same. Incident: a 20 s answer was asked of two workers, and both were put out; one of 62 s was 504."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fleet_router.ending import framed
from fleet_router.follow.liveness import alive
from fleet_router.health.patience import budget_s, patient, whole_answer_s
from fleet_router.health.silence import Waits, silent
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.estimate import Line
from fleet_router.request import parse_alone, parse_body
from fleet_router.watching import Probes, watch
from fleet_wire.endpoints import Endpoint
from tests.fleet_router.fake_worker import FakeWorker, answer
from tests.fleet_router.rig import CONFIG, LONG, Rig, ask, run, until

SILENT_S = CONFIG.silent_s + 1
BODIES = [
    pytest.param("/v1/completions", {"prompt": "short", "max_tokens": 4000}, id="completion"),
    pytest.param("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000}, id="messages"),
    pytest.param("/v1/responses", {"input": "hi", "max_output_tokens": 4000}, id="responses"),
    pytest.param("/v1/embeddings", {"input": "hi"}, id="embeddings"),
]


class Slow:
    """Says nothing until it is let go, then all."""

    def __init__(self) -> None:
        self.asked, self.go = 0, asyncio.Event()

    async def __call__(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        self.asked += 1
        await self.go.wait()
        answer(writer, 200, {"id": "c", "choices": [{"text": "late", "message": {"role": "assistant", "content": "late"}}]})
        return True


def slow(rig: Rig) -> Slow:
    found = Slow()
    for worker in rig.decode:
        worker.behave = found
    return found


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, 60.0 + 4000 * 0.05),
        ({"tokens": 0}, 60.0),
        ({"gap_s": 0.1}, 600.0),
        ({"gap_s": 0.02}, 60.0 + 4000 * 0.06),
        ({"queue_s": 20.0, "prefill_s": 2.0, "tokens": 0}, 60.0 + 20.0 + 6.0),
        ({"tokens": 10**6}, 600.0),
    ],
)
def test_what_an_answer_may_take(more: dict[str, Any], found: float):
    usual = {"first_s": 60.0, "queue_s": 0.0, "prefill_s": 0.0, "tokens": 4000, "gap_s": 0.001, "most_s": 600.0}
    assert whole_answer_s(**(usual | more)) == pytest.approx(found)


BUDGET = msgspec.structs.replace(CONFIG, first_token_deadline_s=60.0, whole_answer_most_s=600.0, max_output_tokens=1_000)


@pytest.mark.parametrize(
    ("more", "learnt", "found"),
    [
        pytest.param({"max_tokens": 100}, {}, 60 + 3 * 0.01 + 100 * 0.06, id="its own limit"),
        pytest.param({"max_completion_tokens": 10, "max_tokens": 100}, {}, 60 + 3 * 0.01 + 100 * 0.06, id="the larger of two"),
        pytest.param({}, {}, 60 + 3 * 0.01 + 1_000 * 0.06, id="the fleet's limit where it gives none"),
        pytest.param({"max_tokens": 1}, {"free_at": 130.0}, 60 + 30 + 3 * 0.01 + 0.06, id="behind others"),
        pytest.param({"max_tokens": 1}, {"free_at": 40.0}, 60 + 3 * 0.01 + 0.06, id="nobody is before it"),
        pytest.param({"max_tokens": 1}, {"token_s": 0.001}, 60 + 3 * (0.01 + 0.001 * 9_000 / 3) + 0.06, id="a long prompt"),
        pytest.param(
            {"max_tokens": 1, "prompt": [9_999] * 600}, {"token_s": 0.001}, 60 + 3 * (0.01 + 0.6) + 0.06, id="token ids"
        ),
        pytest.param({"max_tokens": 100}, {"inflight": 4}, 60 + 3 * 0.01 + 100 * 3 * (0.02 + 5 * 0.01), id="a crowd, and itself"),
        pytest.param({"max_tokens": 1_000}, {"inflight": 99}, 600, id="the bound"),
    ],
)
def test_what_this_answer_may_take_at_this_worker(more: dict[str, Any], learnt: dict[str, Any], found: float):
    """It was seen by no test: each part of it could be left out, and a prompt counted twice, token ids by their digits."""
    long = "token_s" in learnt
    body = msgspec.json.encode({"model": "m", "prompt": "x" * 9_000 if long else "", **more})
    ask = parse_body(body, False, BUDGET)
    fields = {
        "inflight": 0,
        "token_s": 0.0,
        "base_s": 0.01,
        "gap": Line(0.02, 0.01 if "inflight" in learnt else 0.0, 1.0),
        **learnt,
    }
    worker = Candidate("u", "decode", ("t", "c"), **fields)
    assert budget_s(ask, BUDGET, worker, 100.0) == pytest.approx(found, rel=2e-3)


def test_what_generates_nothing_may_take_what_a_first_token_may():
    ask = parse_alone(b'{"model": "m", "input": "x"}', BUDGET)
    assert budget_s(ask, BUDGET, Candidate("u", "decode", ("t", "c"), 0, base_s=1.0, token_s=0.0), 0.0) == pytest.approx(63.0)


@pytest.mark.parametrize(
    ("legs", "found", "asked"),
    [
        pytest.param([("a", 0, 0, True)], set(), {"a"}, id="it may be at work"),
        pytest.param([("a", 0, 0, True), ("a", 0, 0, False)], {"a"}, {"a"}, id="a stream of it stands still, too"),
        pytest.param([("a", 0, 0, True), ("a", 50, 99, False)], set(), set(), id="a stream of it goes on"),
    ],
)
def test_silence_of_whole_answers(legs: list[tuple[str, float, float, bool]], found: set[str], asked: set[str]):
    waits = [Waits(*leg) for leg in legs]
    assert silent(waits, {"a": 0.0}, 100.0, 10.0) == found
    assert silent(waits, {"a": 0.0}, 100.0, 10.0, whole=True) == asked


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_b1_a_long_answer_is_waited_for(path: str, body: dict[str, Any]):
    async def go(rig: Rig) -> None:
        busy, table, clock = slow(rig), rig.context.table, rig.context.clock
        posted = asyncio.create_task(rig.post({"model": "m", **body}, path))
        await until(lambda: busy.asked == 1)
        probes = Probes(rig.context, lambda: rig.connections)
        (unheard,) = watch(rig.context, rig.connections, clock() + SILENT_S)
        probes.ask([unheard])
        await until(lambda: unheard.alive_at > 0)  # its server answers GET /health
        assert watch(rig.context, rig.connections, unheard.alive_at + CONFIG.silent_s - 1) == []
        rig.sweep(58)
        assert not posted.done()
        busy.go.set()
        status, got = await posted
        assert (status, b"late" in got) == (200, True)
        assert (table.trouble.ejections, rig.context.metrics.retries, busy.asked) == (0, 0, 1)

    run(go, prefill=0, decode=2)


@pytest.mark.parametrize(("path", "body"), BODIES[:3])
def test_b1_an_answer_may_take_what_its_tokens_take_and_no_more(path: str, body: dict[str, Any]):
    async def go(rig: Rig) -> None:
        busy = slow(rig)
        posted = asyncio.create_task(rig.post({"model": "m", **body}, path))
        await until(lambda: busy.asked == 1)
        rig.sweep(200)
        await asyncio.sleep(0)
        assert rig.connections
        assert not posted.done()
        rig.sweep(CONFIG.whole_answer_most_s + 1)
        status, got = await posted
        assert (status, b"max_tokens" in got) == (504, True)
        busy.go.set()

    run(go, prefill=0)


def test_what_a_whole_answer_may_take_is_settled_once():
    async def go(rig: Rig) -> None:
        busy = slow(rig)
        posted = asyncio.create_task(rig.post(ask(prompt="short", max_tokens=4000)))
        await until(lambda: busy.asked == 1)
        rig.sweep(200)
        (worker,) = rig.context.table.by_role["decode"]
        worker.free_at = rig.context.clock() + 500  # others came after it
        rig.sweep(CONFIG.whole_answer_most_s - 10)
        assert (await posted)[0] == 504
        busy.go.set()

    run(go, prefill=0)


def test_b1_one_that_said_nothing_in_all_that_time_is_put_out():
    async def go(rig: Rig) -> None:
        busy = slow(rig)
        posted = asyncio.create_task(rig.post(ask(prompt="short", max_tokens=4)))
        await until(lambda: busy.asked == 1)
        rig.sweep(61.5)
        assert (await posted)[0] == 504
        assert rig.context.table.trouble.ejections == 1
        busy.go.set()

    run(go, prefill=0)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_b1_a_black_hole_is_found_by_asking_it(path: str, body: dict[str, Any]):
    async def go(rig: Rig) -> None:
        async def hole(_: Any, __: Any) -> bool:
            await over.wait()
            return True

        over = asyncio.Event()
        first, second = rig.decode
        first.behave = second.behave = hole
        posted = asyncio.create_task(rig.post({"model": "m", **body}, path))
        await until(lambda: len(first.seen) + len(second.seen) == 1)
        done = Slow()
        done.go.set()
        (second if first.seen else first).behave = done
        now = rig.context.clock() + SILENT_S
        (unheard,) = watch(rig.context, rig.connections, now)
        rig.context.clock = lambda: now

        async def no_answer(_: Endpoint) -> bool:
            return False

        probes = Probes(rig.context, lambda: rig.connections)
        probes.ask([unheard], no_answer)
        probes.ask([unheard], no_answer)  # it is being asked
        assert (await posted)[0] == 200
        assert (rig.context.table.trouble.ejections, rig.context.metrics.retries) == (1, 1)
        over.set()

    run(go, prefill=0, decode=2)


def test_a_worker_that_speaks_while_it_is_asked_is_no_black_hole():
    async def go(rig: Rig) -> None:
        busy = slow(rig)
        posted = asyncio.create_task(rig.post(ask(prompt="short", max_tokens=4000)))
        await until(lambda: busy.asked == 1)
        (unheard,) = watch(rig.context, rig.connections, rig.context.clock() + SILENT_S)

        async def late(_: Endpoint) -> bool:
            unheard.heard_at = rig.context.clock()  # to somebody else
            return False

        probes = Probes(rig.context, lambda: rig.connections)
        probes.ask([unheard], late)
        await until(lambda: not probes._asked)
        assert rig.context.table.trouble.ejections == 0
        busy.go.set()
        assert (await posted)[0] == 200

    run(go, prefill=0, decode=2)


def test_a_prefill_leg_is_short_whatever_is_asked_for():
    async def go(rig: Rig) -> None:
        busy = Slow()
        rig.prefill[0].behave = busy
        posted = asyncio.create_task(rig.post(ask(prompt=LONG, max_tokens=4000)))
        await until(lambda: busy.asked == 1)
        assert watch(rig.context, rig.connections, rig.context.clock() + SILENT_S) == []
        assert (await posted)[0] == 200  # the decode worker did it
        assert rig.context.table.trouble.ejections == 1
        busy.go.set()

    run(go)


def test_a_prefill_worker_that_decodes_has_as_long_as_any():
    """Incident: while all decode workers were full, what was kept on a prefill worker was cut after the time of a prefill, and
    its worker put out for it."""

    async def go(rig: Rig) -> None:
        busy, (decode,) = Slow(), rig.context.table.by_role["decode"]
        rig.prefill[0].behave = busy
        decode.elsewhere(1, 0, rig.context.clock())
        posted = asyncio.create_task(rig.post(ask(prompt=LONG, max_tokens=4000)))
        await until(lambda: busy.asked == 1)
        assert "kv_transfer_params" not in rig.prefill[0].seen[0]
        (unheard,) = watch(rig.context, rig.connections, rig.context.clock() + SILENT_S)
        assert unheard is rig.context.table.by_role["prefill"][0]
        rig.sweep(CONFIG.first_token_deadline_s + 10)
        await asyncio.sleep(0)
        assert not posted.done()
        busy.go.set()
        assert (await posted)[0] == 200
        assert (rig.context.table.trouble.ejections, unheard.breaker.failures) == (0, 0)
        decode.elsewhere(0, 0, rig.context.clock())

    run(go, config=msgspec.structs.replace(CONFIG, worker_slots=1, decide="cost"))


@pytest.mark.parametrize(
    ("more", "most_s", "between_s"),
    [
        pytest.param({}, 600.0, 30.0, id="all is seen"),
        pytest.param({"include_reasoning": True}, 600.0, 30.0, id="it is asked for"),
        pytest.param({"include_reasoning": False}, 600.0, 60.0 + 100 * 0.05, id="its own limit"),
        pytest.param({"include_reasoning": False, "max_tokens": None}, 600.0, 60.0 + 1_000 * 0.05, id="the fleet's"),
        pytest.param({"include_reasoning": False, "max_tokens": 1_000}, 80.0, 80.0, id="as long as a whole answer"),
        pytest.param({"include_reasoning": False}, 20.0, 30.0, id="never shorter than what is seen"),
        pytest.param({"include_reasoning": False, "stream": False}, 600.0, 30.0, id="no stream"),
    ],
)
def test_how_long_a_stream_may_say_nothing(more: dict[str, Any], most_s: float, between_s: float):
    body = {"model": "m", "messages": [{"role": "user", "content": "why"}], "max_tokens": 100, "stream": True}
    config = msgspec.structs.replace(BUDGET, whole_answer_most_s=most_s, inter_token_deadline_s=30.0)
    found = patient(parse_body(msgspec.json.encode(body | more), True, config), config)
    assert found == msgspec.structs.replace(config, inter_token_deadline_s=between_s)


@pytest.mark.parametrize("seen", [True, False])
def test_a_model_that_thinks_unseen_is_waited_for(seen: bool):
    """Incident: a stream without its reasoning was cut after 30 s of it, and its worker blamed."""

    async def go(rig: Rig) -> None:
        go_on = asyncio.Event()

        async def thinks(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(framed(b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'))
            await go_on.wait()
            writer.write(framed(b'data: {"choices":[{"index":0,"delta":{"content":"so"}}]}\n\ndata: [DONE]\n\n') + b"0\r\n\r\n")
            return True

        rig.decode[0].behave = thinks
        body = {"model": "m", "messages": [{"role": "user", "content": "why"}], "max_tokens": 4000, "stream": True}
        posted = asyncio.create_task(rig.post(body | {"include_reasoning": seen}, "/v1/chat/completions"))
        await until(lambda: any(one.flow is not None and one.flow.started for one in rig.connections))
        await asyncio.sleep(0.02)
        asked = watch(rig.context, rig.connections, rig.context.clock() + SILENT_S)
        (worker,) = rig.context.table.by_role["decode"]
        assert (asked, worker.breaker.closed) == (([], False) if seen else ([worker], True))
        rig.sweep(200)
        go_on.set()
        _, got = await posted
        assert (b"error" in got, b"[DONE]" in got) == (seen, not seen)
        rig.sweep(0)

    run(go, prefill=0)


def test_a_head_that_comes_early_is_no_first_token_of_an_answer_as_a_whole():
    async def go(rig: Rig) -> None:
        over = asyncio.Event()

        async def early(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
            await over.wait()
            writer.write(b'10\r\n{"choices": [1]}\r\n0\r\n\r\n')
            return True

        rig.decode[0].behave = early
        posted = asyncio.create_task(rig.post(ask(prompt="short", max_tokens=4000)))
        await until(lambda: any(c.flow is not None and c.flow.started for c in rig.connections))
        rig.sweep(CONFIG.inter_token_deadline_s + 100)
        over.set()
        status, got = await posted
        assert (status, b"[1]" in got) == (200, True)

    run(go, prefill=0)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("streamed", [False, True])
def test_b12_only_streams_have_first_tokens_and_gaps(chunks: int, streamed: bool):
    """Incident: a tier was sized by "first tokens" of 40 s that were whole answers."""

    async def go(rig: Rig) -> None:
        async def pieces(_: Any, writer: asyncio.StreamWriter) -> bool:
            streams = [b'data: {"choices":[]}\n\n'] * chunks + [b"data: [DONE]\n\n"]
            events = streams if streamed else [b'{"a":[', b"1,", b"1]}"] if chunks > 1 else [b"{}"]
            kind = b"text/event-stream" if streamed else b"application/json"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\ntransfer-encoding: chunked\r\n\r\n")
            for event in events:
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
                await asyncio.sleep(0.005)
            writer.write(b"0\r\n\r\n")
            return True

        rig.decode[0].behave = pieces
        assert (await rig.post(ask(prompt="short", stream=streamed)))[0] == 200
        served = rig.context.metrics.of("t", "r")
        found = (
            sum(served.ttft.fold()),
            sum(served.itl.fold()) >= chunks - 1 and bool(sum(served.itl.fold())),
            sum(served.whole.fold()),
        )
        assert found == ((1, True, 0) if streamed else (0, False, 1))
        assert "fleet_router_whole_answer_seconds_count" in rig.router.plain(b"/metrics")[2].decode()

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"what?\r\n", False),
        (b"", False),
        (None, False),
    ],
    ids=["ok", "no-such-path", "its-engine-died", "not-http", "closes", "says-nothing"],
)
def test_who_is_there(line: bytes | None, found: bool):
    async def go() -> None:
        over = asyncio.Event()

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if line is None:
                await over.wait()
            writer.write(line or b"")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        one = Endpoint(
            name="d", uid="u", address="127.0.0.1", http_port=port, agent_port=1, role="decode", tier="t", revision="r",
            compat="c",
        )  # fmt: skip
        assert await alive(one, 2.0 if line is not None else 0.1) is found
        over.set()
        server.close()
        if line is None:
            gone = await FakeWorker().start()
            await gone.stop()
            assert not await alive(Endpoint(**{**_fields(one), "http_port": gone.port}), 1.0)

    asyncio.run(go())


def _fields(endpoint: Endpoint) -> dict[str, Any]:
    return {name: getattr(endpoint, name) for name in endpoint.__struct_fields__}
