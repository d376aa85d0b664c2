"""Reads that nobody waits for any more: their blocks are nobody else's until NIXL says that they are over."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import pytest

from fleet_worker.transfer.base import KvTransferError
from fleet_worker.transfer.reader import STUCK_S, Pull, StuckReadError
from tests.fleet_worker.transfer.reading import (
    POOL,
    SETTINGS,
    Rig,
    reference,
    welcome,
)


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
