"""Where a worker's answer begins and ends: interim answers before it are passed over, what stands behind it goes to nobody, and a
connection that said too much is not used again. However the bytes are cut into reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fleet_router.answerhead import AnswerHead
from fleet_router.upstream import CollectingUpstream, Pool, Upstream
from tests.fleet_router.rig import CONFIG, Rig, ask, run, until

BODY = b'{"choices":[{"text":"one"}]}'
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
EVIL = b'HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"e":"vil'
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SAID = b'data: {"choices":[{"index":0,"text":1}]}\n\n'
EVENT = b"%x\r\n%b\r\n" % (len(SAID), SAID)
DONE = b"e\r\ndata: [DONE]\n\n\r\n"
STREAM = SSE + EVENT + DONE + b"0\r\n\r\n"
TRAILED = SSE + EVENT + DONE + b"0\r\nx-t: 1\r\n\r\n"


class Wire:
    """A transport that takes everything."""

    def __init__(self) -> None:
        self.closed, self.reading = False, True

    def write(self, _: bytes) -> None: ...

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


class Heard:
    """A leg that keeps what it is told."""

    takes_whole = False

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.raw = self.body = b""
        self.ends = self.surplus = 0
        self.lost: list[str] = []

    def on_head(self, status: int, head: AnswerHead) -> None:
        self.heads.append(status)

    def on_whole(self, *_: Any) -> None: ...
    def on_head_alone(self) -> None: ...

    def on_raw(self, data: bytes) -> None:
        self.raw += data

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.ends += 1

    def on_surplus(self) -> None:
        assert self.ends == 1
        self.surplus += 1

    def on_lost(self, reason: str) -> None:
        self.lost.append(reason)


def heard(reads: list[bytes], kind: type[Upstream] = Upstream) -> tuple[Heard, Wire, Pool]:
    pool, leg, wire = Pool("127.0.0.1", 1), Heard(), Wire()
    connection: Any = kind(pool)
    connection.connection_made(wire)
    connection.send(leg, b"")
    for data in reads:
        if not wire.closed:
            connection.data_received(data)
    return leg, wire, pool


def cuts(data: bytes) -> list[list[bytes]]:
    """In one read, in two at every place, and byte by byte."""
    return [[data], *([data[:at], data[at:]] for at in range(1, len(data))), [data[at : at + 1] for at in range(len(data))]]


@pytest.mark.parametrize("kind", [Upstream, CollectingUpstream])
@pytest.mark.parametrize("answer", [WHOLE, STREAM, TRAILED], ids=["length", "chunked", "trailers"])
@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n",
        b"HTTP/1.1 102 P\r\n\r\nHTTP/1.1 103 Early Hints\r\ncontent-length: 7\r\n\r\n",
    ],
    ids=["nothing", "100", "103", "102-and-103"],
)
def test_b3_interim_answers_are_passed_over(kind: type[Upstream], answer: bytes, before: bytes):
    body = answer.partition(b"\r\n\r\n")[2]
    for reads in cuts(before + answer):
        leg, wire, pool = heard(reads, kind)
        assert (leg.heads, leg.raw, leg.ends, leg.surplus, leg.lost) == ([200], body, 1, 0, []), reads
        assert (wire.closed, len(pool._idle)) == (False, 1)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "switches protocols"),
        (b"HTTP/1.1 103 Early Hints\r\nx: " + b"y" * 70_000 + b"\r\n\r\n" + WHOLE, "head longer"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3000 + WHOLE, "head longer"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" + b"x" * 70_000, "head longer"),
        (b"HTTP/1.1 099 What\r\n\r\n", "not HTTP"),
        (b"\r\nHTTP/1.1 101 S\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "not HTTP"),
    ],
    ids=["101", "long", "endless", "no-end", "odd", "101-behind-a-break"],
)
def test_b3_what_is_no_interim_answer_is_a_fault(head: bytes, why: str):
    leg, wire, pool = heard([head])
    assert (leg.heads, leg.ends, len(leg.lost), wire.closed, pool._idle) == ([], 0, 1, True, [])
    assert why in leg.lost[0]


@pytest.mark.parametrize("kind", [Upstream, CollectingUpstream])
@pytest.mark.parametrize("answer", [WHOLE, STREAM, TRAILED], ids=["length", "chunked", "trailers"])
@pytest.mark.parametrize(
    "behind",
    [EVIL, STREAM, b"junk", b"\r\n", b"\r\n\r\n", b"\r\n" + EVIL],
    ids=["answer", "stream", "junk", "break", "breaks", "both"],
)
def test_b2_what_stands_behind_an_answer_goes_to_nobody(kind: type[Upstream], answer: bytes, behind: bytes):
    _, _, body = answer.partition(b"\r\n\r\n")
    told = BODY if answer is WHOLE else SAID + DONE[3:-2]
    for reads in [*cuts(answer + behind), [answer[:-3], answer[-3:-1], answer[-1:] + behind]]:
        leg, wire, pool = heard(reads, kind)
        begun = [
            read[len(answer) - end :] for read, end in zip(reads, ends(reads), strict=True) if end - len(read) < len(answer) < end
        ]
        together = bool(begun)
        if answer is not WHOLE and any(part.strip() for part in begun):  # its end may be as wrong as what follows it
            assert (leg.heads, leg.ends, len(leg.lost), wire.closed, pool._idle) == ([200], 0, 1, True, []), reads
            assert body.startswith(leg.raw)
            assert len(leg.raw) < len(body)
            continue
        assert (leg.heads, leg.raw, leg.ends, leg.lost) == ([200], body, 1, []), reads
        assert leg.body == (told if kind is CollectingUpstream else b"")
        assert leg.surplus == together, reads  # else it spoke unasked
        assert wire.closed
        assert together == (pool._idle == [])


def ends(reads: list[bytes]) -> list[int]:
    """Where each read ends."""
    found, at = [], 0
    for read in reads:
        at += len(read)
        found.append(at)
    return found


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_b2_an_answer_without_a_body_ends_with_its_head(status: bytes):
    head = b"HTTP/1.1 " + status + b"\r\n\r\n"
    leg, wire, pool = heard([head])
    assert (leg.ends, leg.raw, leg.surplus, wire.closed, len(pool._idle)) == (1, b"", 0, False, 1)
    leg, wire, pool = heard([head + EVIL])
    assert (len(leg.heads), leg.ends, leg.raw, leg.surplus, wire.closed) == (1, 1, b"", 1, True)


@pytest.mark.parametrize("streamed", [False, True])
def test_b2_a_client_gets_its_answer_and_the_worker_is_blamed(streamed: bool):
    answer = STREAM if streamed else WHOLE
    body = answer.partition(b"\r\n\r\n")[2]

    async def go(rig: Rig) -> None:
        async def twice(_: Any, writer: asyncio.StreamWriter) -> bool:
            writer.write(answer + (EVIL if len(rig.decode[0].seen) == 3 else b""))
            await writer.drain()
            return True

        rig.decode[0].behave = twice
        worker = rig.context.table.by_role["decode"][0]
        for i in range(5):  # also where its head came before
            status, got = await rig.post(ask(prompt=f"{i} short", stream=streamed))
            if streamed and i == 2:
                assert (b"something stands behind its end" in got, b"[DONE]" in got) == (True, False), got
            else:
                assert (status, got) == (200, body)
            assert worker.breaker.failures == (i == 2)
            assert len(worker.pool._idle) == (i != 2)
        served = rig.context.metrics.of("t", "r")
        assert (served.errors, served.requests) == (1, 5)

    run(go, prefill=0)


# -- pooled connections that close ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "after-it-had-the-request"])
def test_b9_only_a_connection_that_closed_before_the_worker_had_it_is_no_failure(late: bool):
    async def go(rig: Rig) -> None:
        clock = Clock(rig)

        async def closes(_: Any, writer: asyncio.StreamWriter) -> bool:
            if len(rig.decode[0].seen) + len(rig.decode[1].seen) != 3:
                return False
            clock.later_s = CONFIG.reused_close_s * (1.5 if late else 0.5)
            writer.close()
            return True

        for _ in rig.decode:
            await rig.post(ask(prompt="short"))
        assert [len(worker.seen) for worker in rig.decode] == [1, 1]
        for worker in rig.decode:
            worker.behave = closes
        status, _ = await rig.post(ask(prompt="short"))
        metrics, failures = rig.context.metrics, [w.breaker.failures for w in rig.context.table.by_role["decode"]]
        seen = [len(worker.seen) for worker in rig.decode]
        assert status == 200
        assert f"\nfleet_router_resends_total {int(not late)}\n".encode() in rig.router.plain(b"/metrics")[2]
        if late:  # another worker, out of the budget, and somebody is to blame
            assert (metrics.retries, metrics.resends, sum(failures), sorted(seen)) == (1, 0, 1, [2, 2])
        else:
            assert (metrics.retries, metrics.resends, sum(failures), sorted(seen)) == (0, 1, 0, [1, 3])

    run(go, prefill=0, decode=2, config=msgspec.structs.replace(CONFIG, policy="roundRobin"))


class Clock:
    """The router's, some seconds later."""

    def __init__(self, rig: Rig) -> None:
        self.later_s = 0.0
        now = rig.context.clock()
        rig.context.clock = lambda: now + self.later_s


def test_a_connection_that_is_back_in_the_pool_is_not_paused():
    """The last bytes of an answer fill its client's buffer while its flow still knows the connection: nobody would resume it."""
    _, wire, pool = heard([WHOLE])
    connection = pool.idle()
    assert connection is not None
    connection.pause()
    assert wire.reading
    connection.send(Heard(), b"")
    connection.pause()
    assert not wire.reading
    connection.data_received(WHOLE)
    assert wire.reading


@pytest.mark.parametrize("flow_is_there", [True, False])
def test_a_connection_that_waited_in_the_pool_may_have_been_closed_meanwhile(flow_is_there: bool):
    """Also one whose client had left before it was made: it has answered nothing yet."""
    pool = Pool("127.0.0.1", 1)
    connection = Upstream(pool)
    connection.connection_made(Wire())  # type: ignore[arg-type]
    if not flow_is_there:
        pool.put(connection)
        assert pool.idle() is connection
    assert connection.used is not flow_is_there


def test_idle_connections_to_workers_expire():
    async def go(rig: Rig) -> None:
        await rig.post(ask(prompt="short"))
        pool, idle_s = rig.context.table.by_role["decode"][0].pool, CONFIG.upstream_idle_s
        expire: Callable[[float], None] = lambda now: rig.context.table.expire_idle(now, idle_s)  # noqa: E731
        expire(100.0)
        expire(100.0 + idle_s)
        assert len(pool._idle) == 1
        await rig.post(ask(prompt="short"))  # it is used
        expire(101.0 + idle_s)
        expire(100.0 + 2 * idle_s)
        assert len(pool._idle) == 1
        expire(102.0 + 2 * idle_s)
        assert (pool._idle, pool.closed_by_peer) == ([], 0)
        await until(lambda: rig.decode[0].closed_early == 1)

    run(go, prefill=0)
