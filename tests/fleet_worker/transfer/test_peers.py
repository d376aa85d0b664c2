"""One bad or forgotten owner of KV fails its own pulls only; a lease is renewed for as long as somebody waits for its blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
import zmq

from fleet_wire.kv import KvReference
from fleet_wire.sidechannel import Confirm, Granted, Hello, Message, Refused, Renew, Welcome
from fleet_worker.transfer.base import FetchResult, KvPool, KvTransferError
from fleet_worker.transfer.faults import Faults
from fleet_worker.transfer.holding import Holder
from fleet_worker.transfer.owner import SERVING_WINDOW_S, Owner, TransferSettings
from fleet_worker.transfer.peers import IDLE_S, Peer, Peers
from fleet_worker.transfer.reader import STUCK_S, Pull, Reader, StuckReadError

LEASE_S = 30.0
MEMORY = torch.zeros((64, 4096), dtype=torch.uint8)
POOL = KvPool(MEMORY.data_ptr(), 4096, 64, 16)
SETTINGS = TransferSettings("127.0.0.1", 5600, "same", lease_s=LEASE_S, read_timeout_s=1000.0)


def reference(host: str = "10.0.0.1", epoch: str = "now", **change: Any) -> KvReference:
    made = KvReference(
        do_remote_prefill=True, remote_block_ids=(3,), remote_engine_id="engine", remote_request_id="r", remote_host=host,
        remote_port=5600, remote_num_tokens=16, lease_id=f"lease-{host}", lease_generation=7, remote_epoch=epoch, digest="0" * 16,
    )  # fmt: skip
    return msgspec.structs.replace(made, **change)


def welcome(call: int, epoch: str = "now", agent: bytes = b"engine") -> Welcome:
    return Welcome(call=call, engine_id="engine", epoch=epoch, agent=agent, base_address=0, block_bytes=4096, num_blocks=64)


class Agent:
    """NIXL, whose reads end when the test says so."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self.made_known = 0
        self.state = self.posted = "PROC"
        self.handles, self.reads = 0, 0

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata == b"broken":
            raise RuntimeError("NIXL_ERR_MISMATCH")
        name = metadata.decode()
        self.made_known += 1
        self.known += [] if name in self.known else [name]
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, descriptors: list[Any], _: str) -> list[Any]:
        return descriptors

    def initialize_xfer(self, *_: Any) -> object:
        self.handles += 1
        return object()

    def transfer(self, _: object) -> str:
        self.reads += 1
        return self.posted

    def check_xfer_state(self, _: object) -> str:
        return self.state

    def release_xfer_handle(self, _: object) -> None:
        self.handles -= 1


class NoProver:
    def proofs(self) -> list[Any]:
        return []

    def ask(self, *_: Any) -> None:
        return None


class SaidPeers(Peers):
    """Peers whose questions the test answers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], most: int = 8) -> None:
        super().__init__(context, 5.0, Faults(), most)
        self.asked: list[tuple[float, Peer, Message]] = []

    def call(self, peer: Peer, make: Callable[[int], Any], now: float, on_answer: Any) -> None:
        super().call(peer, make, now, on_answer)
        self.asked.append((now, peer, make(self._next_call)))

    def told(self, kind: type[Message]) -> list[tuple[float, Any]]:
        return [(now, message) for now, _, message in self.asked if isinstance(message, kind)]

    def answer(self, make: Callable[[int], Message]) -> None:
        """Answer the last question."""
        _, peer, message = self.asked[-1]
        self._tell(peer.calls.pop(message.call), make(message.call))  # type: ignore[arg-type]


class Rig:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], most: int = 8) -> None:
        self.peers, self.agent, self.done = SaidPeers(context, most), Agent(), list[FetchResult]()
        self.faults = Faults()
        self.reader = Reader(SETTINGS, POOL, self.agent, self.peers, NoProver(), self.done.append, self.faults)  # type: ignore[arg-type]

    def pull(self, name: str, ref: KvReference) -> None:
        self.reader.begin(Pull(name, ref, [3], [1], ref.digest, time.monotonic()))

    def ended(self, *, lingering: bool = False) -> dict[str, str]:
        """Whose blocks came back; `lingering`: who was told, and whose did not."""
        over = {result.request_id: result for result in self.done}  # of two reports the last one
        return {name: one.error.reason if one.error else "" for name, one in over.items() if one.lingers is lingering}


class Kept(zmq.Context):  # type: ignore[type-arg]
    """Holds its sockets until the test is over."""

    def socket(self, *args: Any, **more: Any) -> Any:
        made = super().socket(*args, **more)
        self.__dict__.setdefault("kept", []).append(made)
        return made


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = Kept()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def rig(context: zmq.Context[zmq.Socket[bytes]]) -> Rig:
    return Rig(context)


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


def test_an_owner_that_lives_is_greeted_again_and_not_made_known_again(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """Incident: each time that a live owner was forgotten (nobody had asked it for a quarter of an hour) and needed again, UCX
    kept two more sockets at either end for ever."""
    monkeypatch.setattr("fleet_worker.transfer.reader.SPARE_AGENTS", 1)
    rig.agent.state = "ERR"
    for round_ in range(3):
        rig.pull(f"r{round_}", reference())
        rig.peers.answer(welcome)
        rig.reader._end(rig.reader._pulls[f"r{round_}"], KvTransferError("lease-unknown", "too late"))
        rig.reader._forget(rig.peers.get("10.0.0.1", 5600, 0.0))
    assert (rig.agent.known, rig.agent.made_known) == (["engine"], 1)
    rig.pull("other", reference("10.0.0.9", remote_engine_id="next"))
    rig.peers.answer(lambda call: msgspec.structs.replace(welcome(call, agent=b"next"), engine_id="next"))
    rig.reader._end(rig.reader._pulls["other"], KvTransferError("lease-unknown", "too late"))
    rig.reader._forget(rig.peers.get("10.0.0.9", 5600, 0.0))
    assert rig.agent.known == ["next"], "of too many the one goes that nobody needed for longest"
    rig.pull("last", reference("10.0.0.9", remote_engine_id="next"))
    rig.peers.answer(lambda call: msgspec.structs.replace(welcome(call, agent=b"next"), engine_id="next"))
    rig.reader.advance(time.monotonic())
    assert (rig.ended()["last"], rig.agent.known) == ("read", []), "a connection that failed is not used again"


def test_an_owner_that_is_forgotten_and_greeted_again_loses_no_read_in_flight(rig: Rig):
    """Incident: of a read from an owner that NIXL was told to forget nobody knew when it was over."""
    rig.pull("lingering", reference())
    rig.peers.answer(welcome)
    rig.reader._forget(rig.peers.get("10.0.0.1", 5600, 0.0))
    rig.pull("next", reference())
    rig.agent.add_remote_agent = None  # type: ignore[assignment,method-assign]
    rig.peers.answer(welcome)
    assert rig.reader._pulls["next"].reading is not None
    rig.agent.state = "ERR"
    rig.reader.advance(time.monotonic())
    assert rig.ended() == {"lingering": "read", "next": "read"}
    assert rig.agent.known == []


@pytest.mark.parametrize(("state", "known"), [("DONE", ["engine"]), ("ERR", [])])
def test_what_becomes_of_a_lingering_read_says_whether_its_connection_is_used_again(rig: Rig, state: str, known: list[str]):
    rig.pull("r", reference())
    rig.peers.answer(welcome)
    rig.reader.advance(time.monotonic() + SETTINGS.read_timeout_s + 1)
    rig.agent.state = state
    rig.reader.advance(time.monotonic())
    assert (rig.ended(), rig.agent.known) == ({"r": "timeout"}, known)


@pytest.mark.parametrize(
    ("blocks", "late_s", "ends"),
    [
        (1, 121, False),
        (1, STUCK_S - 1, False),
        (1, STUCK_S + 1, True),
        (POOL.num_blocks // 2, 121, False),
        (POOL.num_blocks // 2 + 1, 119, False),
        (POOL.num_blocks // 2 + 1, 121, True),
    ],
)
def test_a_read_that_does_not_end_at_all_ends_the_engine(rig: Rig, blocks: int, late_s: float, ends: bool):
    """Not soon: a node without power is nobody's fault who read from it, and its kernel tells after a quarter of an hour."""
    rig.reader._settings = replace(SETTINGS, read_timeout_s=60.0)
    begun = time.monotonic()
    for number in range(blocks):
        rig.pull(f"r{number}", reference())
    rig.peers.answer(welcome)
    rig.reader.advance(begun + 61)
    assert rig.ended(lingering=True) == {f"r{number}": "timeout" for number in range(blocks)}
    with pytest.raises(StuckReadError) if ends else nullcontext():
        rig.reader.advance(begun + 60 + late_s)


@pytest.mark.parametrize("told", [False, True])
def test_when_the_transfers_end_nobody_gets_blocks_that_a_read_may_write(rig: Rig, told: bool):
    """They came back with the error, and the engine computed a step in them before it heard of the end."""
    begun = time.monotonic()
    rig.pull("reading", reference())
    rig.peers.answer(welcome)
    rig.pull("greeting", reference("10.0.0.2"))
    if told:
        rig.reader.advance(begun + SETTINGS.read_timeout_s + 1)
    rig.reader.fail_all(KvTransferError("stopped", "the KV transfer of this worker stopped"))
    assert rig.ended() == {"greeting": "stopped"}
    assert rig.ended(lingering=True) == {"reading": "timeout" if told else "stopped"}
    assert len(rig.done) == 2, "each was told once"


@pytest.mark.parametrize("arrives", [True, False])
def test_a_read_that_takes_too_long_ends_the_others_of_its_owner_only_when_nothing_arrives(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, arrives: bool
):
    """Incident: NIXL forgot the owner when one pull's time was up, and all that others read from it failed at once."""
    monkeypatch.setattr("fleet_worker.transfer.reader.CHUNK_BYTES", 4096)
    now, two = time.monotonic(), reference(remote_block_ids=(3, 4), digest="0" * 32)
    rig.reader.begin(Pull("late", reference(), [3], [1], "0" * 16, now - SETTINGS.read_timeout_s + 60))
    rig.peers.answer(welcome)
    rig.reader.begin(Pull("other", two, [3, 4], [2, 3], two.digest, now))
    rig.reader._prover.ask = lambda *_: None  # type: ignore[method-assign, attr-defined]
    late = rig.reader._pulls["late"].handle
    states = iter(["DONE"] if arrives else [])
    monkeypatch.setattr(rig.agent, "check_xfer_state", lambda handle: "PROC" if handle is late else next(states, "PROC"))
    rig.reader.advance(now)
    rig.reader.advance(now + 61)
    assert rig.ended(lingering=True)["late"] == "timeout"
    assert rig.agent.known == ["engine"]
    assert ("other" in rig.reader._pulls and rig.reader._pulls["other"].peer.welcome is not None) is arrives  # type: ignore[union-attr]


def test_a_read_that_nixl_lost_track_of_keeps_its_blocks_until_it_lets_go(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """What it says of a read then is nothing of whether that still writes."""

    def raising(_: object) -> str:
        raise RuntimeError("NIXL_ERR_NOT_FOUND")

    rig.pull("r", reference())
    rig.peers.answer(welcome)
    monkeypatch.setattr(rig.agent, "check_xfer_state", raising)
    with monkeypatch.context() as busy:
        busy.setattr(rig.agent, "release_xfer_handle", raising)
        rig.reader.advance(time.monotonic())
    assert (rig.ended(), rig.ended(lingering=True)) == ({}, {"r": "read"})
    rig.reader.advance(time.monotonic())
    assert rig.ended() == {"r": "read"}


def test_a_pull_that_waits_for_its_owners_greeting_renews_at_every_third(rig: Rig):
    rig.pull("r", reference())
    begun = time.monotonic()
    for second in range(31):
        rig.reader.advance(begun + second)
    assert [round(now - begun) for now, _ in rig.peers.told(Renew)] == [10, 20, 30]


def test_an_owner_drives_while_a_lease_is_open_or_a_reader_spoke():
    """Incident: a reader that paused in mid-read over TCP waited 10 s for 0.75 s of work."""
    owner = Owner(SETTINGS, POOL, "engine", b"")
    assert owner.drives_until(100.0) <= 100.0
    owner.reply(Hello(call=1, version=1, compat="x", block_bytes=1, block_tokens=1), 100.0)
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
    assert (rig.ended(), rig.agent.handles) == ({"r": "read"}, 0)


def test_a_read_whose_owner_is_forgotten_meanwhile_ends_with_its_chunk(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fleet_worker.transfer.reader.CHUNK_BYTES", POOL.block_bytes)
    ref = reference(remote_block_ids=(3, 5), digest="0" * 32)
    rig.reader.begin(Pull("r", ref, [3, 5], [1, 2], ref.digest, time.monotonic()))
    rig.peers.answer(welcome)
    rig.agent.posted = "ERR"
    rig.pull("bad", reference())
    rig.agent.posted, rig.agent.state = "PROC", "DONE"
    assert rig.ended() == {"bad": "read"}
    rig.reader.advance(time.monotonic())
    assert (rig.ended(), rig.agent.handles, rig.agent.reads) == ({"bad": "read", "r": "peer"}, 0, 2)
