"""No bytes from the network end the transfer thread: neither what anybody sends to an owner, nor what an owner answers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_wire.sidechannel import MAX_MESSAGE_BYTES, BadFrameError, Granted, Hello, Renew, Welcome, decode, encode
from fleet_worker.transfer.base import KvTransferError
from fleet_worker.transfer.faults import Faults
from fleet_worker.transfer.peers import ANSWERS_PER_TURN, Answer, Peers
from tests.fleet_worker.transfer.test_nixl import Side

DEEP = b"\x82\xa1x" + b"\x91" * 200_000 + b"\xc0" + b"\xa4type\xa5hello"
"""Incident: one such frame, from anybody, was a RecursionError that ended the engine."""
GOOD = [
    encode(Hello(call=1, version=1, compat="same", block_bytes=4096, block_tokens=16)),
    encode(Renew(call=2**64 - 1, lease_id="x", epoch="y", generation=2**64 - 1)),
    encode(Welcome(call=1, engine_id="e", epoch="e", agent=b"", base_address=0, block_bytes=1, num_blocks=1)),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(["type", "call", "version", "compat", "lease_id", "epoch", "generation", "agent", "reason", "engine_id"])
KINDS = st.sampled_from(["hello", "welcome", "renew", "confirm", "granted", "refused"])


def cut(frame: bytes, at: int, byte: int) -> bytes:
    at %= len(frame)
    return frame[:at] + bytes([byte]) + frame[at + 1 :]


FRAMES = st.one_of(
    st.binary(max_size=200),
    VALUES.map(msgspec.msgpack.encode),
    st.dictionaries(NAMES, VALUES | KINDS, max_size=8).map(msgspec.msgpack.encode),
    st.builds(cut, st.sampled_from(GOOD), st.integers(0, 500), st.integers(0, 255)),
    st.builds(lambda frame, size: frame[:size], st.sampled_from(GOOD), st.integers(0, 100)),
    st.just(DEEP),
    st.sampled_from([b"\x81\xa4type\xa1\xff", b"\xdd\xff\xff\xff\xff", b"\xc1", b"\xdb\xff\xff\xff\xff"]),
)


@settings(max_examples=300, deadline=None)
@given(frame=FRAMES)
def test_a_frame_is_a_message_or_a_bad_frame(frame: bytes):
    try:
        decode(frame)
    except BadFrameError:
        return


@pytest.fixture(scope="module")
def owner() -> Iterator[Side]:
    made = Side("127.77.3.1")
    yield made
    made.connector.close()


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(st.lists(FRAMES, min_size=1, max_size=3), max_size=6))
def test_whatever_anybody_sends_to_an_owner_the_next_reader_is_answered(owner: Side, messages: list[list[bytes]]):
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.RCVTIMEO, 10_000)
        asking.connect("tcp://127.77.3.1:5600")
        for frames in messages:
            asking.send_multipart(frames)
        asking.send(encode(Hello(call=77, version=-5, compat="", block_bytes=0, block_tokens=0)))
        while decode(asking.recv()).call != 77:
            continue
    owner.connector.finished()  # raises when the thread is gone


def test_what_is_dropped_is_counted_and_not_all_of_it_written_down(owner: Side, caplog: pytest.LogCaptureFixture):
    before = owner.connector.dropped_frames()
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 10_000)
        asking.connect("tcp://127.77.3.1:5600")
        for _ in range(1000):
            asking.send(b"\xc1")
        asking.send(GOOD[0])
        asking.recv()
        asking.close(linger=0)
    assert owner.connector.dropped_frames() == before + 1000
    assert 0 < len([line for line in caplog.records if "side channel" in line.message]) < 20


def test_a_bug_in_an_answer_is_counted_and_the_next_question_answered(owner: Side, monkeypatch: pytest.MonkeyPatch):
    before, reply = owner.connector.dropped_frames(), owner.connector._owner.reply
    monkeypatch.setattr(owner.connector._owner, "reply", lambda asked, now: reply(asked, now) if asked.call == 1 else 1 / 0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 10_000)
        asking.connect("tcp://127.77.3.1:5600")
        asking.send(GOOD[1])
        asking.send(GOOD[0])
        assert decode(asking.recv()).call == 1
        asking.close(linger=0)
    assert owner.connector.dropped_frames() == before + 1


@pytest.fixture
def peers() -> Iterator[Peers]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Peers(context, 5.0, Faults())
    yield made
    made.close()
    context.term()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(FRAMES, max_size=6))
def test_whatever_an_owner_answers_its_question_gets_one_answer(peers: Peers, frames: list[bytes]):
    peer, told = peers.get("127.77.3.9", 5600, 0.0), list[Answer | KvTransferError]()

    peers.call(peer, renew, 0.0, told.append)
    for frame in frames:
        peers._answer(peer, frame)
    peers.expire(10.0)
    assert len(told) == 1
    assert not peer.calls


def renew(call: int) -> Renew:
    return Renew(call=call, lease_id="l", epoch="e", generation=1)


def test_an_answer_that_comes_when_its_call_is_over_is_no_fault(peers: Peers):
    peer, told = peers.get("127.77.3.9", 5600, 0.0), list[Answer | KvTransferError]()
    peers.call(peer, renew, 0.0, told.append)
    before, peer_calls = peers._faults.total, list(peer.calls)
    peers.expire(5.0)
    peers._answer(peer, encode(Granted(call=peer_calls[0])))
    assert [type(one) for one in told] == [KvTransferError], "its deadline had come"
    assert peers._faults.total == before


def test_what_fails_at_one_answer_is_counted_and_the_others_are_told(peers: Peers, caplog: pytest.LogCaptureFixture):
    peer, told = peers.get("127.77.3.9", 5600, 0.0), list[Answer | KvTransferError]()

    def fails(_: Answer | KvTransferError) -> None:
        raise ZeroDivisionError

    for on_answer in (fails, told.append):
        peers.call(peer, renew, 0.0, on_answer)
    before = peers._faults.total
    peers.drop(peer)
    assert (len(told), peers._faults.total - before) == (1, 1)
    assert caplog.records[-1].exc_info, "a bug of ours comes with its traceback"


def test_an_owner_that_has_not_answered_is_not_forgotten(peers: Peers):
    peer = peers.get("127.77.3.9", 5600, 0.0)
    peers.call(peer, renew, 0.0, lambda _: None)
    assert peers.superfluous("127.77.3.10", 5600, 1e6, ()) == []
    peers.expire(5.0)
    assert peers.superfluous("127.77.3.10", 5600, 1e6, ()) == [peer]


def test_what_cannot_be_asked_is_told_at_once(peers: Peers):
    """A thousand questions wait for an owner that is not there; no further one is kept, nor one to a socket that is gone."""
    peer, told = peers.get("127.77.3.9", 5600, 0.0), list[Answer | KvTransferError]()
    for _ in range(1_200):
        peers.call(peer, renew, 0.0, told.append)
    assert len(told) + len(peer.calls) == 1_200
    assert {str(one) for one in told} == {"the side channel to 127.77.3.9 is full"}
    peers.drop(peer)
    before = len(told)
    peers.call(peer, renew, 0.0, told.append)
    assert "the side channel to 127.77.3.9: " in str(told[before])
    assert not peer.calls


class Talking:
    """A socket that always has one more frame."""

    closed = False

    def __init__(self) -> None:
        self.heard = 0

    def recv(self, _: int) -> bytes:
        self.heard += 1
        assert self.heard < 100_000
        return b"rubbish"

    def close(self) -> None:
        self.closed = True


def test_an_owner_that_never_stops_talking_is_not_listened_to_for_ever(peers: Peers):
    talking, silent = peers.get("127.77.3.9", 5600, 0.0), peers.get("127.77.3.10", 5600, 0.0)
    talking.socket.close()
    talking.socket = Talking()  # type: ignore[assignment]
    told: list[Answer | KvTransferError] = []
    peers.call(silent, renew, 0.0, told.append)
    peers.receive()
    assert peers._faults.total == ANSWERS_PER_TURN
    peers.expire(10.0)
    assert len(told) == 1


def test_an_answer_that_is_longer_than_any_message_is_not_taken_in(peers: Peers):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as owner:
        owner.setsockopt(zmq.LINGER, 0)
        owner.setsockopt(zmq.RCVTIMEO, 10_000)
        owner.bind("tcp://127.77.3.11:5600")
        peer = peers.get("127.77.3.11", 5600, 0.0)
        peers.call(peer, renew, 0.0, lambda _: None)
        client, _ = owner.recv_multipart()
        owner.send_multipart([client, bytes(MAX_MESSAGE_BYTES)])
        assert len(peer.socket.recv()) == MAX_MESSAGE_BYTES
        owner.send_multipart([client, bytes(MAX_MESSAGE_BYTES + 1)])
        assert peer.socket.poll(500) == 0
