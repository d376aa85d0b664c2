"""One bad or forgotten owner of KV fails its own pulls only; a lease is renewed for as long as somebody waits for its blocks."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import zmq

from fleet_wire.sidechannel import Confirm, Granted, Hello, Refused, Renew
from fleet_worker.transfer.base import KvTransferError
from fleet_worker.transfer.faults import Faults
from fleet_worker.transfer.holding import Holder
from fleet_worker.transfer.owner import SERVING_WINDOW_S, Owner
from fleet_worker.transfer.peers import IDLE_S, Peers
from fleet_worker.transfer.reader import Pull
from tests.fleet_worker.transfer.reading import (
    KEYLESS,
    LEASE_S,
    POOL,
    SETTINGS,
    Rig,
    SaidPeers,
    reference,
    welcome,
)


# -- what an owner says of itself -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("agent", [b"broken", b"another", b"\xff"], ids=["not-nixls", "another-name", "no-text"])
def test_an_owner_that_nixl_does_not_take_fails_its_own_pulls_only(rig: Rig, agent: bytes):
    """Incident: the metadata of one broken pod ended the transfer thread, and with it the engine."""
    rig.pull("good", reference())
    rig.peers.answer(welcome)
    rig.pull("bad", reference("10.0.0.2"))
    rig.pull("bad-too", reference("10.0.0.2"))
    rig.peers.answer(lambda call: welcome(call, agent=agent))
    assert rig.ended() == {"bad": "peer", "bad-too": "peer"}
    assert rig.agent.known == ["engine"]
    rig.reader.advance(time.monotonic())
    assert rig.reader.is_reading


def test_a_reference_that_cannot_be_said_fails_alone(rig: Rig):
    """lease_generation 2**70 cannot be encoded; the engine refuses such references, and this is the second line."""
    rig.pull("good", reference())
    rig.peers.answer(welcome)
    rig.pull("huge", reference(lease_generation=2**70))
    assert rig.ended() == {"huge": "peer"}
    assert (rig.reader.is_reading, rig.faults.total) == (True, 1)


def test_a_bug_while_nixl_may_write_still_ends_the_thread(rig: Rig):
    rig.pull("r", reference())
    rig.peers.answer(welcome)
    rig.reader._look = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        rig.reader.advance(time.monotonic())
    assert rig.ended() == {}


# -- epochs -----------------------------------------------------------------------------------------------------------------
def test_a_reference_of_an_owners_former_life_fails_alone(rig: Rig):
    """Incident: it made the reader forget the owner, and all pulls from its present life failed."""
    rig.pull("good", reference())
    rig.peers.answer(welcome)
    rig.pull("stale", reference(epoch="before"))
    rig.pull("stale-too", reference(epoch="long-before"))
    rig.peers.answer(welcome)
    assert rig.ended() == {"stale": "epoch", "stale-too": "epoch"}
    rig.pull("later", reference())
    assert len(rig.peers.told(Hello)) == 2
    assert (rig.reader.is_reading, rig.agent.known) == (True, ["engine"])


def test_an_owner_that_restarted_is_greeted_anew_and_read(rig: Rig):
    rig.pull("old", reference())
    rig.peers.answer(welcome)
    rig.pull("new", reference(epoch="next"))
    rig.peers.answer(lambda call: welcome(call, "next"))  # over the old connection: it is closed
    rig.peers.answer(lambda call: welcome(call, "next"))
    assert "new" not in rig.ended()
    assert rig.reader._pulls["new"].reading is not None
    assert rig.agent.known == ["engine"]


def test_on_the_first_greeting_another_life_is_told_as_such(rig: Rig):
    rig.pull("stale", reference(epoch="before"))
    rig.peers.answer(welcome)
    assert rig.ended() == {"stale": "epoch"}
    rig.pull("other", reference(remote_engine_id="somebody"))
    assert rig.ended() == {"stale": "epoch", "other": "epoch"}


def test_a_pull_of_a_forgotten_connection_leaves_its_successor_alone(rig: Rig):
    """Incident: the late end of a pull made the reader forget the owner's new connection too, which then nobody listened to: the
    pulls over it waited for ever, blocks and places with them."""
    for name in ("slow", "lost"):
        rig.pull(name, reference())
    rig.peers.answer(welcome)
    slow, lost = (rig.reader._pulls[name] for name in ("slow", "lost"))
    rig.reader._end(lost, KvTransferError("timeout", "the owner was silent"))
    rig.pull("next", reference())
    rig.peers.answer(welcome)
    rig.reader._end(slow, KvTransferError("timeout", "the owner was silent"))
    peer = rig.reader._pulls["next"].peer
    assert peer is not None
    assert rig.peers.sockets() == [peer.socket]
    assert rig.agent.known == ["engine"]


def test_an_owner_that_answers_a_greeting_with_something_else_fails_the_pull(rig: Rig):
    """Incident: it was greeted again, for ever."""
    rig.pull("r", reference())
    rig.peers.answer(lambda call: Granted(call=call))
    assert rig.ended() == {"r": "peer"}


# -- how many ---------------------------------------------------------------------------------------------------------------
def test_the_least_recently_used_owner_makes_room(context: zmq.Context[zmq.Socket[bytes]]):
    """Incident: after 1,023 prefill pods a decode worker had no socket left, and its engine ended."""
    peers = Peers(context, 5.0, Faults(), most=3)
    first, second, third = (peers.get(f"10.0.0.{n}", 5600, float(n)) for n in (1, 2, 3))
    peers.get("10.0.0.1", 5600, 4.0)
    assert peers.superfluous("10.0.0.1", 5600, 5.0, ()) == []
    assert peers.superfluous("10.0.0.9", 5600, 5.0, ()) == [second]
    assert peers.superfluous("10.0.0.9", 5600, 5.0, {id(second)}) == [third]
    assert peers.superfluous("10.0.0.9", 5600, 4.0 + IDLE_S, ()) == [first, second, third]
    assert peers.superfluous("10.0.0.9", 5600, 3.0 + IDLE_S, {id(third)}) == [second]
    with pytest.raises(KvTransferError, match="3 prefill workers are in use"):
        peers.get("10.0.0.9", 5600, 5.0)
    peers.drop(second)
    assert second.socket.closed
    peers.get("10.0.0.9", 5600, 5.0)
    peers.close()


def test_a_reader_goes_through_any_number_of_owners(context: zmq.Context[zmq.Socket[bytes]]):
    rig = Rig(context, most=4)
    for number in range(40):
        rig.pull(f"r{number}", reference(f"10.0.1.{number}"))
        for _ in range(2):  # it greets once more, as workers do that are older
            rig.peers.answer(lambda call: Refused(call=call, reason="incompatible"))
    assert set(rig.ended().values()) == {"incompatible"}
    assert len(rig.peers.sockets()) == 4
    for number in range(4):
        rig.pull(f"busy{number}", reference(f"10.0.2.{number}"))
    rig.pull("one-more", reference("10.0.2.9"))
    assert rig.ended()["one-more"] == "peers"


def test_an_agent_that_two_addresses_lead_to_is_forgotten_with_the_last_of_them(context: zmq.Context[zmq.Socket[bytes]]):
    rig = Rig(context)
    for host in ("10.0.0.1", "10.0.0.2"):
        rig.pull(host, reference(host))
        rig.peers.answer(welcome)
    rig.reader._forget(rig.peers.get("10.0.0.1", 5600, 0.0), gone=True)
    assert rig.agent.known == ["engine"]
    rig.reader._forget(rig.peers.get("10.0.0.2", 5600, 0.0), gone=True)
    assert rig.agent.known == ["engine"], "it is still read from"
    rig.agent.state = "ERR"
    rig.reader.advance(time.monotonic())
    assert rig.agent.known == []


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "[fd00::1]", "a.name"])
def test_an_owner_is_reached_by_address_or_name(context: zmq.Context[zmq.Socket[bytes]], host: str):
    peers = Peers(context, 5.0, Faults())
    assert not peers.get(host, 5600, 0.0).socket.closed
    peers.close()


@pytest.mark.parametrize(
    ("host", "named"), [("fd00::1", "[fd00::1]:5600"), ("[fd00::1]", "[fd00::1]:5600"), ("10.0.0.1", "10.0.0.1:5600")]
)
def test_an_owner_is_named_with_its_port_apart(context: zmq.Context[zmq.Socket[bytes]], host: str, named: str):
    """It was called fd00::1:5600, which is another address."""
    peers, told = Peers(context, 5.0, Faults()), list[object]()
    peer = peers.get(host, 5600, 0.0)
    peers.call(peer, lambda call: Renew(call=call, lease_id="l", epoch="e", generation=1), 0.0, told.append)
    peers.drop(peer)
    assert [str(one) for one in told] == [f"the prefill worker at {named} is gone or restarted"]


def test_no_such_address_is_an_error_of_the_pull(rig: Rig):
    rig.pull("r", reference("a b"))
    assert rig.ended() == {"r": "peer"}
    assert rig.peers.sockets() == []


# -- renewing ---------------------------------------------------------------------------------------------------------------
def test_a_waiting_request_renews_at_once_and_at_every_third_of_the_lease(context: zmq.Context[zmq.Socket[bytes]]):
    """Incident: nobody renewed while a decode leg waited for a place: the prefill was wasted and the request failed."""
    peers = SaidPeers(context)
    holder = Holder(LEASE_S, peers, peers.get)
    holder.hold("a", reference(), 100.0)
    holder.hold("b", reference("10.0.0.2"), 104.0)
    for now in range(100, 131):
        holder.advance(float(now))
    times = {
        lease: [now for now, said in peers.told(Renew) if said.lease_id == lease]
        for lease in ("lease-10.0.0.1", "lease-10.0.0.2")
    }
    assert times == {"lease-10.0.0.1": [100.0, 110.0, 120.0, 130.0], "lease-10.0.0.2": [104.0, 114.0, 124.0]}
    holder.let_go("a")
    holder.advance(134.0)
    holder.let_go("b")
    holder.advance(200.0)
    assert [now for now, _ in peers.told(Renew)][-1] == 134.0
    assert len(holder) == 0


def test_a_pull_renews_for_as_long_as_it_lasts_and_keeps_the_owner_awake(rig: Rig):
    rig.reader.holder.hold("r", reference(), time.monotonic())
    rig.pull("r", reference())
    assert len(rig.reader.holder) == 0
    rig.peers.answer(welcome)
    begun = time.monotonic()
    for tenth in range(1, 600):
        rig.reader.advance(begun + tenth / 10)
    times = [now - begun for now, _ in rig.peers.told(Renew)]
    assert times[-1] > 58
    assert max(later - earlier for earlier, later in pairwise(times)) < SERVING_WINDOW_S
    (renewed,) = {(message.lease_id, message.epoch, message.generation) for _, message in rig.peers.told(Renew)}
    assert renewed == ("lease-10.0.0.1", "now", 7)


def test_a_read_from_an_owner_that_says_nothing_ends_with_its_first_unanswered_renewal(rig: Rig):
    """Incident: a frozen owner held places and blocks for all of the read's 60 s, though it had been silent for 5 s."""
    begun = time.monotonic()
    rig.pull("r", reference())
    rig.peers.answer(welcome)
    for second in range(4):
        rig.peers.expire(begun + second)
        rig.reader.advance(begun + second)
    assert rig.ended() == {}
    rig.peers.expire(begun + 6)
    rig.reader.advance(begun + 6)
    assert rig.ended(lingering=True) == {"r": "timeout"}
    assert (rig.reader.is_reading, rig.reader.lingers, rig.peers.sockets()) == (False, True, [])
    rig.reader.cancel("r")
    rig.reader.advance(begun + 60)
    assert (rig.ended(), len(rig.done), rig.agent.known) == ({}, 1, ["engine"]), "its blocks may still be written"
    rig.agent.state = "DONE"
    rig.reader.advance(begun + 61)
    assert (rig.ended(), len(rig.done)) == ({"r": "timeout"}, 2)


def test_a_pull_that_waits_for_its_owners_greeting_renews_at_every_third(rig: Rig):
    rig.pull("r", reference())
    begun = time.monotonic()
    for second in range(31):
        rig.reader.advance(begun + second)
    assert [round(now - begun) for now, _ in rig.peers.told(Renew)] == [10, 20, 30]


def test_an_owner_drives_while_a_lease_is_open_or_a_reader_spoke():
    """Incident: a reader that paused in mid-read over TCP waited 10 s for 0.75 s of work."""
    owner = Owner(SETTINGS, POOL, "engine", b"", KEYLESS)
    assert owner.drives_until(100.0) <= 100.0
    owner.reply(Hello(call=1, version=1, compat="x", block_bytes=1, block_tokens=1), 100.0)
    assert owner.drives_until(100.5) <= 100.5, "it was refused"
    owner.reply(Hello(call=1, version=1, compat="same", block_bytes=4096, block_tokens=16), 100.0)
    assert owner.drives_until(100.5) == 101.0
    assert owner.drives_until(102.0) < 102.0
    given = owner.grant("r", [3], 16)
    assert owner.drives_until(102.0) > 102.0
    confirm = Confirm(call=2, lease_id=given.lease_id, epoch=given.remote_epoch, generation=given.lease_generation)
    assert owner.reply(confirm, time.monotonic()) == Granted(call=2)
    assert owner.drives_until(102.0) < 102.0


@pytest.mark.parametrize("cancelled", [False, True])
def test_of_a_cancelled_pull_no_further_chunk_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch, cancelled: bool):
    monkeypatch.setattr("fleet_worker.transfer.reader.CHUNK_BYTES", POOL.block_bytes)
    ref = reference(remote_block_ids=(3, 5, 7), digest="0" * 48)
    rig.reader.begin(Pull("r", ref, [3, 5, 7], [1, 2, 3], ref.digest, time.monotonic()))
    rig.peers.answer(welcome)
    rig.agent.state = "DONE"
    if cancelled:
        rig.reader.cancel("r")
    for _ in range(5):
        rig.reader.advance(time.monotonic())
    assert (rig.agent.reads, rig.agent.handles, len(rig.peers.told(Confirm))) == (1 if cancelled else 3, 0, 1)


def test_a_read_that_fails_as_it_is_posted_keeps_no_handle(rig: Rig):
    rig.agent.posted = "ERR"
    rig.pull("r", reference())
    rig.peers.answer(welcome)
    assert (rig.ended(), rig.ended(lingering=True)) == ({}, {"r": "read"})
    rig.agent.posted, rig.agent.state = "PROC", "DONE"
    for _ in range(2):  # what it had begun is over with the read behind it
        rig.reader.advance(time.monotonic())
    assert (rig.ended(), rig.agent.handles) == ({"r": "read"}, 0)


def test_a_read_whose_owner_is_forgotten_meanwhile_ends_with_its_chunk(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fleet_worker.transfer.reader.CHUNK_BYTES", POOL.block_bytes)
    ref = reference(remote_block_ids=(3, 5), digest="0" * 32)
    rig.reader.begin(Pull("r", ref, [3, 5], [1, 2], ref.digest, time.monotonic()))
    rig.peers.answer(welcome)
    rig.agent.posted = "ERR"
    rig.pull("bad", reference())
    rig.agent.posted, rig.agent.state = "PROC", "DONE"
    assert rig.ended(lingering=True) == {"bad": "read"}
    for _ in range(2):
        rig.reader.advance(time.monotonic())
    assert (rig.ended(), rig.agent.handles, rig.agent.reads) == ({"bad": "read", "r": "peer"}, 0, 3)
