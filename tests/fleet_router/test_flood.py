"""Reads that come thick and fast are handed on together, and nothing of them is lost, late or anybody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router import upstream
from fleet_router.flood import FEW, FLOOD_S, LAST_CHUNK, MOST_BYTES, Flood
from fleet_router.outbox import Outbox
from fleet_router.upstream import Pool, Upstream
from tests.fleet_router.test_framing import DONE, EVENT, SSE, Heard, Wire

FAST_S = FLOOD_S / 10


def handed_on(flood: Flood, reads: list[tuple[float, bytes]]) -> list[bytes]:
    """What is, read by read; nobody comes for the rest."""
    out = []
    for at, data in reads:
        if not flood.holds(data, at):
            out.append(flood.take(at, data) if flood.bytes else data)
    return out


def test_tokens_as_an_engine_makes_them_do_not_wait():
    reads = [(1.0 + FLOOD_S * 1.1 * i, b"e%d" % i) for i in range(50)]
    assert handed_on(Flood(), reads) == [data for _, data in reads]


def test_the_first_few_do_not_wait_however_fast_they_come():
    reads = [(1.0 + FAST_S * i / 10, b"e") for i in range(30)]
    flood = Flood()
    assert handed_on(flood, reads) == [b"e"] * (1 + FEW)
    assert (flood.bytes, flood.take(2.0)) == (29 - FEW, b"e" * (29 - FEW))


def test_a_slow_one_ends_the_flood():
    """A few may come at once at each step, as with speculative decoding."""
    reads = [(step * 0.02 + FAST_S * i, b"%d" % i) for step in range(1, 20) for i in range(1 + FEW)]
    assert handed_on(Flood(), reads) == [data for _, data in reads]


@pytest.mark.parametrize("last", [b"x" * MOST_BYTES, b"e\r\n" + LAST_CHUNK], ids=["much", "end"])
def test_who_waits_goes_with_what_waits_for_nothing(last: bytes):
    reads = [(1.0 + FAST_S * i / 10, b"e") for i in range(9)] + [(1.0 + FAST_S, last)]
    assert handed_on(Flood(), reads)[-1] == b"e" * (8 - FEW) + last


@given(st.lists(st.tuples(st.sampled_from([0.0, FAST_S, FLOOD_S, 0.02]), st.binary(min_size=1, max_size=40)), max_size=60))
def test_all_of_it_is_handed_on_in_order_and_in_time(reads: list[tuple[float, bytes]]):
    """With somebody who comes for it when its time is over."""
    flood, now, out, due = Flood(), 1.0, b"", None
    for gap_s, data in reads:
        now += gap_s
        if due is not None and now >= due:
            out, due = out + (flood.take(due) if flood.bytes else b""), None
        if flood.holds(data, now):
            due = now + FLOOD_S if due is None else due
        else:
            out += flood.take(now, data) if flood.bytes else data
        assert flood.bytes < MOST_BYTES
        assert not flood.bytes or due is not None
    assert out + flood.take(now) == b"".join(data for _, data in reads)


class Later(asyncio.AbstractEventLoop):
    """What is to be done later is done when a test says so."""

    def __init__(self) -> None:
        self.then: list[Callable[[], object]] = []

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        callback(*args)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        assert delay == FLOOD_S
        self.then.append(callback)

    def pass_by(self) -> None:
        then, self.then = self.then, []
        for one in then:
            one()


class Rig:
    """A connection in the middle of a stream that floods: so many events came in no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, events: int = FEW + 4) -> None:
        monkeypatch.setattr(upstream, "monotonic", lambda: 5.0)
        self.loop, self.wire, self.leg, self.pool = Later(), Wire(), Heard(), Pool("127.0.0.1", 1)
        self.outbox = Outbox()
        self.outbox._loop = self.loop
        self.connection: Any = Upstream(self.pool)
        self.connection.connection_made(self.wire)
        self.connection.send(self.leg, b"x", self.outbox)
        for data in [SSE, *[EVENT] * events]:
            self.connection.data_received(data)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


TOLD, ALL = EVENT * (FEW + 1), EVENT * (FEW + 4)


def test_the_rest_comes_a_little_later(rig: Rig):
    assert rig.leg.raw == TOLD
    rig.connection.data_received(EVENT)
    assert len(rig.loop.then) == 1
    rig.loop.pass_by()
    assert rig.leg.raw == ALL + EVENT
    rig.connection.data_received(EVENT)
    assert (rig.leg.raw, len(rig.loop.then)) == (ALL + EVENT, 1)


def test_the_end_waits_for_nothing(rig: Rig):
    rig.connection.data_received(DONE + LAST_CHUNK)
    assert (rig.leg.raw, rig.leg.ends, rig.leg.lost) == (ALL + DONE + LAST_CHUNK, 1, [])
    assert rig.pool.idle() is rig.connection


def test_a_worker_that_dies_has_said_what_waits(rig: Rig):
    rig.connection.connection_lost(None)
    assert (rig.leg.raw, rig.leg.ends, len(rig.leg.lost)) == (ALL, 0, 1)
    rig.loop.pass_by()
    assert rig.leg.raw == ALL


def test_an_end_that_waits_is_an_end_though_the_connection_closes(rig: Rig):
    """With trailers it is not known by its looks."""
    rig.connection.data_received(DONE + b"0\r\nx-t: 1\r\n\r\n")
    assert rig.leg.ends == 0
    rig.wire.closed = True
    rig.connection.connection_lost(None)
    assert (rig.leg.ends, rig.leg.lost, rig.pool.idle()) == (1, [], None)


def test_whoever_gave_up_hears_no_more(rig: Rig):
    rig.connection.abandon(rig.leg)
    rig.loop.pass_by()
    assert (rig.leg.raw, rig.leg.lost, rig.wire.closed) == (TOLD, [], True)


def test_a_client_that_does_not_read_gets_it_when_it_does(rig: Rig):
    """What is told meanwhile would look like progress, and it would have another deadline."""
    rig.connection.pause()
    rig.loop.pass_by()
    assert rig.leg.raw == TOLD
    rig.connection.resume()
    assert rig.leg.raw == TOLD  # not within the callback of its client's connection
    rig.loop.pass_by()
    assert rig.leg.raw == ALL


def test_bytes_at_the_heels_of_an_answer_are_not_kept_for_the_next_one(rig: Rig):
    rig.connection.data_received(DONE + LAST_CHUNK)
    rig.connection.data_received(EVENT)
    assert (rig.wire.closed, rig.loop.then and rig.leg.raw) == (True, ALL + DONE + LAST_CHUNK)


def test_the_next_answer_begins_anew(rig: Rig):
    rig.connection.data_received(DONE + LAST_CHUNK)
    nexts = Heard()
    rig.connection.send(nexts, b"x", rig.outbox)
    for data in [SSE, *[EVENT] * (FEW + 1)]:
        rig.connection.data_received(data)
    assert nexts.raw == TOLD
    rig.loop.pass_by()
    assert (nexts.raw, rig.leg.raw) == (TOLD, ALL + DONE + LAST_CHUNK)


def test_an_answer_that_tells_its_length_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    rig = Rig(monkeypatch, events=0)
    rig.connection.data_received(DONE + LAST_CHUNK)
    leg = Heard()
    rig.connection.send(leg, b"x", rig.outbox)
    rig.connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
    for _ in range(50):
        rig.connection.data_received(b"x")
    assert (leg.raw, rig.loop.then) == (b"x" * 50, [])
