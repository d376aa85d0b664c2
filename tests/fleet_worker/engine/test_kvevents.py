"""Replays of KV events: whole and in order, without stopping the engine's thread, whatever anybody sends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_wire.events import END_OF_REPLAY, BlockStored, decode
from fleet_worker.engine import kvevents
from fleet_worker.engine.blocks import CacheEvent
from fleet_worker.engine.kvevents import MAX_REPLAYS, REPLAYED_PER_TURN, KvEventPublisher
from tests.fleet_worker.transfer.reading import is_kept_alive

HOST, PORT = "127.77.2.1", 15_558


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    made = KvEventPublisher(HOST, 15_557, PORT, 16)
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def subscriber(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.connect(f"tcp://{HOST}:{PORT}")
    return made


def store(publisher: KvEventPublisher, count: int) -> None:
    for number in range(count):
        publisher.publish([CacheEvent(True, number.to_bytes(16, "big"), None, (number,))])


def question(start: int) -> list[bytes]:
    return [b"", start.to_bytes(8, "big")]


def turn_until(publisher: KvEventPublisher, asking: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """(number, token) of each batch until the end of the replay."""
    found: list[tuple[int, int]] = []
    end = time.monotonic() + 20
    while time.monotonic() < end:
        publisher.publish([])
        while asking.poll(1):
            frames = asking.recv_multipart()
            if frames[-2] == END_OF_REPLAY:
                return found
            (event,) = decode(frames[-1]).events
            assert isinstance(event, BlockStored)
            found.append((int.from_bytes(frames[-2], "big"), event.token_ids[0]))
    raise AssertionError("the replay never ended")


@pytest.mark.parametrize("start", [0, 7, 299, 300, 2**64 - 1])
def test_a_replay_is_whole_and_in_order(publisher: KvEventPublisher, context: zmq.Context[zmq.Socket[bytes]], start: int):
    store(publisher, 300)
    with subscriber(context) as asking:
        asking.send_multipart(question(start))
        found = turn_until(publisher, asking)
    assert found == [(number, number) for number in range(start, 300)]


def test_a_replay_begins_with_the_oldest_that_is_kept(monkeypatch: pytest.MonkeyPatch, context: zmq.Context[zmq.Socket[bytes]]):
    monkeypatch.setattr(kvevents, "REPLAY_BATCHES", 50)
    publisher = KvEventPublisher(HOST, 15_557, PORT, 16)
    store(publisher, 300)
    with subscriber(context) as asking:
        asking.send_multipart(question(10))
        found = turn_until(publisher, asking)
    assert [number for number, _ in found] == list(range(250, 300))
    publisher.close()


def test_what_is_published_meanwhile_is_in_the_replay(publisher: KvEventPublisher):
    sent: list[list[bytes]] = []
    publisher._replay.send_multipart = lambda frames, _: sent.append(frames)  # type: ignore[method-assign,assignment]
    store(publisher, 2 * REPLAYED_PER_TURN)
    publisher._asked([b"me", *question(0)])
    for _ in range(4):
        publisher.publish([CacheEvent(True, b"n" * 16, None, (1,))])
    numbers = [int.from_bytes(frames[3], "big", signed=True) for frames in sent]
    assert numbers == [*range(2 * REPLAYED_PER_TURN + 3), -1]


@pytest.mark.parametrize("subscribers", [1, 5, MAX_REPLAYS, 300])
def test_one_turn_sends_a_bounded_number_of_batches(publisher: KvEventPublisher, subscribers: int):
    """Incident: 300 questions stopped every token of everybody for 11 s."""
    sent: list[list[bytes]] = []
    publisher._replay.send_multipart = lambda frames, _: sent.append(frames)  # type: ignore[method-assign,assignment]
    store(publisher, 500)
    for number in range(subscribers):
        for _ in range(3):  # who asks again does not get twice as much
            publisher._asked([str(number).encode(), *question(0)])
    publisher.publish([])
    assert 0 < len(sent) <= REPLAYED_PER_TURN
    assert len({frames[0] for frames in sent}) == min(subscribers, MAX_REPLAYS)


RUBBISH = st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\0" * 8, b"\xff" * 8])), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(RUBBISH, max_size=8))
def test_whatever_is_asked_the_next_subscriber_is_answered(
    publisher: KvEventPublisher, context: zmq.Context[zmq.Socket[bytes]], frames: list[list[bytes]]
):
    if publisher._next == 0:
        store(publisher, 3)
    with subscriber(context) as hostile, subscriber(context) as good:
        for parts in frames:
            hostile.send_multipart(parts)
        good.send_multipart(question(1))
        assert turn_until(publisher, good) == [(1, 1), (2, 2)]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_publisher_on_an_ipv6_address():
    publisher = KvEventPublisher("::1", 15_557, PORT, 16)
    publisher.close()


@pytest.mark.parametrize("port", [PORT, 15_557])
def test_of_a_router_whose_node_lost_its_power_the_kernel_tells(publisher: KvEventPublisher, port: int):
    assert is_kept_alive(HOST, port)
