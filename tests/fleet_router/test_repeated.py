"""Heads that come again: compared instead of parsed, with the same result to the last byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.answerhead import AnswerHead, KnownAnswer
from fleet_router.config import HttpBounds
from fleet_router.inbound import HEADS_MOST, Heads, Inbound, Incoming, new_request_id
from fleet_router.repeated import HEAD_MOST_BYTES, Repeated, around_length, worth_learning
from fleet_router.upstream import CollectingUpstream, Pool, Upstream
from tests.fleet_router.rig import Rig, answer_of, http, run
from tests.fleet_router.rig import ask as ask_for

BOUNDS = HttpBounds(body_bytes=2_000)
WANTED = frozenset({b"x-session"})
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer k\r\n%b\r\ncontent-length: %d\r\nx-session: s\r\n\r\n"


def message(body: bytes, line: bytes = b"accept: */*", length: int | None = None) -> bytes:
    return HEAD % (line, len(body) if length is None else length) + body


def told(inbound: Inbound) -> list[Any]:
    """Everything that was read, but for the ids."""
    rows = [
        (r.method, r.url, r.path, b"".join(r.body), r.keep_alive, r.key, r.slo_class, r.slo_ttft_ms, dict(r.kept))
        for r in inbound.requests
    ]
    error = inbound.error
    return [rows, None if error is None else (error.status, str(error)), inbound.current is None]


def fed(*packets: bytes, inbound: Inbound | None = None) -> Inbound:
    inbound = inbound or Inbound()
    for packet in packets:
        inbound.requests.clear()
        give(inbound, packet)
    return inbound


def give(inbound: Inbound, packet: bytes, bounds: HttpBounds = BOUNDS) -> None:
    """As a connection does."""
    request = inbound.again(packet, bounds, WANTED)
    if request is not None:
        inbound.requests.append(request)
    else:
        inbound.feed(packet, bounds, WANTED)


def test_the_same_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch):
    inbound, expected = fed(message(b"one")), told_fresh(message(b"another one"))
    monkeypatch.setattr(Inbound, "_parse", lambda *_: pytest.fail("parsed again"))
    first = inbound.requests[0].request_id
    assert told(fed(message(b"another one"), inbound=inbound)) == expected
    assert inbound.requests[0].request_id == inbound.requests[0].leg_id != first


def told_fresh(packet: bytes) -> list[Any]:
    inbound = Inbound()
    inbound.feed(packet, BOUNDS, WANTED)
    return told(inbound)


BODIES = st.binary(max_size=40) | st.sampled_from([b"", b"\r\n", b"\r\n\r\n", b"x\r\ncontent-length: 3\r\n\r\nabc", b"0\r\n\r\n"])
LINES = st.sampled_from([
    b"accept: */*", b"connection: close", b"transfer-encoding: chunked", b"x-request-id: mine", b"content-length: 3",
    b"expect: 100-continue", b"x: y\ncontent-length: 4", b"x-slo-class: batch", b"x-slo-ttft-ms: 20", b"x-session: t", b"A: \xff",
])  # fmt: skip
LENGTHS = st.none() | st.integers(0, 60) | st.integers(1_990, 2_010) | st.just(10**9)
PACKETS = st.builds(message, BODIES, LINES, LENGTHS)
CUT = st.integers(0, 400)


@given(PACKETS, st.lists(st.tuples(PACKETS, CUT), max_size=3))
def test_whatever_comes_is_read_as_by_a_parser_that_knows_nothing(first: bytes, rest: list[tuple[bytes, int]]):
    """A connection that has seen `first` reads the next packet like a new one, as long as nothing was left over."""
    inbound = fed(first)
    for packet, cut in rest:
        if inbound.error is not None or inbound.current is not None or not all(r.keep_alive for r in inbound.requests):
            return
        sent = packet[: len(packet) - cut] if cut < len(packet) else packet
        fed(sent, inbound=inbound)
        assert told(inbound) == told_fresh(sent)


def test_a_connection_that_begins_as_another_did_parses_nothing(monkeypatch: pytest.MonkeyPatch):
    heads = Heads()
    before = fed(message(b"one"), inbound=Inbound(heads)).requests[0]
    monkeypatch.setattr(Inbound, "_parse", lambda *_: pytest.fail("parsed again"))
    inbound = fed(message(b"another one"), inbound=Inbound(heads))
    monkeypatch.undo()
    assert told(inbound) == told_fresh(message(b"another one"))
    assert inbound.requests[0] is not before
    assert inbound.requests[0].request_id == inbound.requests[0].leg_id != before.request_id
    assert b"".join(before.body) == b"one"


@given(st.lists(st.tuples(PACKETS, CUT, st.sampled_from([BOUNDS, HttpBounds(body_bytes=2_000)])), max_size=6))
def test_whatever_connections_begin_with_is_read_as_by_a_process_that_knows_nothing(packets: list[tuple[bytes, int, HttpBounds]]):
    heads = Heads()
    for packet, cut, bounds in packets:
        sent = packet[: len(packet) - cut] if cut < len(packet) else packet
        inbound = Inbound(heads)
        give(inbound, sent, bounds)
        assert told(inbound) == told_fresh(sent)
        give(inbound, packet, bounds)  # and so goes what comes after it
        alone = Inbound()
        give(alone, sent, bounds)
        give(alone, packet, bounds)
        assert told(inbound) == told(alone)


def test_heads_of_connections_are_bounded_and_those_of_other_bounds_forgotten():
    heads, others = Heads(), HttpBounds(body_bytes=10)
    for number in range(3 * HEADS_MOST):
        fed(message(b"x", b"a: %d" % number), inbound=Inbound(heads))
        assert len(heads._requests) <= HEADS_MOST
    assert heads.find(message(b"x", b"a: %d" % number), BOUNDS, WANTED) is not None
    assert heads.find(message(b"x", b"a: %d" % number), others, WANTED) is None
    inbound = Inbound(heads)
    give(inbound, message(b"y" * 50, b"a: %d" % number), others)
    assert inbound.error is not None
    assert inbound.error.status == 413


@pytest.mark.parametrize("bounds", [HttpBounds(body_bytes=10), HttpBounds(header_count=2)])
def test_new_bounds_hold_for_heads_that_are_known(bounds: HttpBounds):
    inbound = fed(message(b"x" * 50))
    inbound.requests.clear()
    give(inbound, message(b"y" * 50), bounds)
    assert inbound.error is not None
    assert inbound.error.status in (413, 431)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\n\r\ncontent-length: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: y\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % 10**9,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_MOST_BYTES + b"\r\ncontent-length: 2\r\n\r\n",
    ],
)
def test_heads_that_are_not_learnt(head: bytes):
    assert around_length(head) is None


@given(st.binary(max_size=20), st.binary(max_size=20), st.integers(0, 30))
def test_a_body_is_whole_or_not_known(extra: bytes, body: bytes, length: int):
    around = around_length(b"HTTP/1.1 200 OK\r\nContent-Length:  2\r\na: b\r\n\r\nhi")
    assert around is not None
    known = Repeated(*around)
    data = around[0] + b"%d" % length + around[1] + body + extra
    at = known.body_at(data)
    assert bool(at) == (length == len(body + extra))
    if at:
        assert (data[at:], known.length_of(data, at)) == (body + extra, b"%d" % length)


@given(st.binary(max_size=20), st.integers(0, 30), st.booleans())
def test_nor_is_one_behind_a_message_that_was_known(body: bytes, length: int, other_end: bool):
    """Its length has as many digits."""
    around = around_length(b"HTTP/1.1 200 OK\r\nContent-Length:  2\r\na: b\r\n\r\nhi")
    assert around is not None
    for before in (b"x" * 9, b"x" * 19):
        known = Repeated(*around)
        assert known.body_at(around[0] + b"%d" % len(before) + around[1] + before) > 0
        after = around[1].replace(b"b", b"c") if other_end else around[1]
        assert bool(known.body_at(around[0] + b"%d" % length + after + body)) == (length == len(body) and not other_end)


def test_who_never_sends_the_same_head_twice_is_seldom_learnt_from():
    assert sum(worth_learning(misses) for misses in range(1, 161)) == 14


# -- workers ------------------------------------------------------------------------------------------------------------
class Wire:
    """A connection's transport."""

    def __init__(self) -> None:
        self.paused = False

    def get_extra_info(self, _: str) -> None:
        return None

    def is_closing(self) -> bool:
        return False

    def write(self, _: bytes) -> None: ...
    def abort(self) -> None: ...

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Heard:
    """A leg that writes down what it hears."""

    def __init__(self, *, whole: bool) -> None:
        self.takes_whole, self.told = whole, list[Any]()

    def on_whole(self, known: KnownAnswer, data: bytes, body_at: int) -> None:
        self.told.append(("whole", known.lines[0] + known.length_of(data, body_at) + known.lines[1], data[body_at:]))

    def on_head(self, status: int, head: AnswerHead) -> None:
        self.told.append(("head", status, head.fields))

    def on_head_alone(self) -> None: ...
    def on_body(self, data: bytes) -> None: ...

    def on_raw(self, data: bytes) -> None:
        self.told.append(("raw", data))

    def on_end(self) -> None:
        self.told.append(("end",))

    def on_lost(self, reason: str) -> None:
        self.told.append(("lost", reason))


def answer(body: bytes, more: bytes = b"content-type: t\r\n", status: int = 200) -> bytes:
    return b"HTTP/1.1 %d OK\r\ndate: d\r\nContent-Length: %d\r\n%b\r\n" % (status, len(body), more) + body


def connection(kind: type[Upstream] = Upstream) -> tuple[Upstream, Pool, Wire]:
    pool, wire = Pool("127.0.0.1", 1, kind), Wire()
    made = kind(pool)
    made.connection_made(wire)  # type: ignore[arg-type] # no asyncio.Transport
    return made, pool, wire


def ask(made: Upstream, *packets: bytes, whole: bool = True) -> list[Any]:
    leg = Heard(whole=whole)
    made.send(leg, b"")
    for packet in packets:
        made.data_received(packet)
    return leg.told


@pytest.mark.parametrize("kind", [Upstream, CollectingUpstream])
def test_an_answer_with_a_known_head_comes_whole(kind: type[Upstream]):
    made, pool, _ = connection(kind)
    assert [one[0] for one in ask(made, answer(b"one"))] == ["head", "raw", "end"]
    lines = b"\r\nContent-Length: 7\r\ncontent-type: t"
    assert ask(made, answer(b"another")) == [("whole", lines, b"another")]
    assert pool.idle() is made


@pytest.mark.parametrize(
    "packets",
    [
        [answer(b"another")[:-1], b"r"],
        [answer(b"another", more=b"x: y\r\n")],
        [answer(b"another", status=500)],
        [answer(b"")],
    ],
)
def test_other_answers_are_parsed(packets: list[bytes]):
    made, pool, _ = connection()
    ask(made, answer(b"one"))
    heard = ask(made, *packets)
    fresh, _, _ = connection()
    assert heard == ask(fresh, *packets)
    assert (heard[0][0], heard[-1]) == ("head", ("end",))
    assert pool.idle() is made


def test_a_leg_that_reads_pieces_gets_pieces():
    made, _, _ = connection()
    ask(made, answer(b"one"))
    assert [one[0] for one in ask(made, answer(b"two"), whole=False)] == ["head", "raw", "end"]


@pytest.mark.parametrize("more", [b"transfer-encoding: chunked\r\n", b"content-length: 3\r\n", b"connection: close\r\n"])
def test_only_a_length_that_is_given_once_is_learnt(more: bytes):
    made, pool, _ = connection()
    ask(made, answer(b"one", more=more))
    assert pool.known is None


def test_a_connection_that_was_paused_reads_for_whoever_has_it_next():
    made, pool, wire = connection()
    leg = Heard(whole=False)
    made.send(leg, b"")
    made.data_received(answer(b"two")[:-1])
    made.pause()
    assert wire.paused
    made.data_received(b"o")
    assert (pool.idle(), wire.paused) == (made, False)


def test_requests_with_their_own_name_keep_it():
    inbound = fed(message(b"one", b"x-request-id: mine"), message(b"two", b"x-request-id: mine"))
    request: Incoming = inbound.requests[0]
    assert request.request_id == "mine"
    assert request.leg_id.endswith(".mine")


# -- all of it ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prefill", [0, 1])
def test_requests_of_one_connection_are_answered_counted_and_remembered_alike(prefill: int, monkeypatch: pytest.MonkeyPatch):
    """The first one is parsed, the others are known: from then on no parser of HTTP is asked anything."""

    async def go(rig: Rig) -> None:
        reader, writer, _ = await rig.connect()
        answers = []
        for number in range(4):
            writer.write(http(ask_for(prompt=str(number) * 2_000, user="u" * 2 * number)))
            answers.append(await answer_of(reader))
            if number == 1:
                monkeypatch.setattr(Inbound, "feed", lambda *_: pytest.fail("parsed again"))
                monkeypatch.setattr(Upstream, "_feed_head", lambda *_: pytest.fail("parsed again"))
        ids = [headers.pop("x-request-id") for _, headers, _ in answers]
        assert len(set(ids)) == 4
        assert answers[1:] == answers[:3]
        records = list(rig.context.recorder.smooth)
        assert [(r.request_id, r.status, r.writes, r.ended) for r in records] == [(id_, 200, 1, "answered") for id_ in ids]
        assert all(r.came_at <= r.first_at <= r.last_at <= r.ended_at for r in records)
        assert [bool(r.tries[0].prefilled_at) for r in records] == [bool(prefill)] * 4
        metrics = rig.context.metrics
        assert (metrics.requests[200], sum(metrics.handed_over.values())) == (4, 4 * prefill)
        (served,) = metrics.served.values()
        assert (served.requests, sum(served.whole.fold()), sum(served.ttft.fold()), served.errors) == (4, 4, 0, 0)
        assert [body["user"] for body in rig.decode[0].seen] == ["u" * 2 * number for number in range(4)]
        assert all(("kv_transfer_params" in body) == bool(prefill) for body in rig.decode[0].seen)
        assert all(worker.released == [] for worker in rig.prefill)

    run(go, prefill=prefill)


def test_request_ids_are_32_digits_and_none_comes_twice():
    ids = [new_request_id() for _ in range(2 * 65_536 + 2)]
    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {32}
    numbers = [int(one, 16) for one in ids]
    assert numbers == list(range(numbers[0], numbers[0] + len(ids)))
