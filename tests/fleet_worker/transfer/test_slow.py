"""Owners that answer late, and nothing of use: a pull waits for all of a greeting as long as for one answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from fleet_wire.sidechannel import Challenge, Granted, Message, Refused
from fleet_worker.transfer import greeting, reader
from fleet_worker.transfer.handoff import CHALLENGE_BYTES
from tests.fleet_worker.transfer.reading import KEYLESS, SETTINGS, Rig, reference, welcome
from tests.fleet_worker.transfer.test_handoff import KEY, Pod

LIMIT_S = SETTINGS.call_timeout_s
LATE_S = 0.9 * LIMIT_S


class Clock:
    """In the place of `time`."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (greeting, reader):
        monkeypatch.setattr(module, "time", made)
    return made


CHALLENGED, STALE = Challenge(call=0, challenge=b"c" * CHALLENGE_BYTES), Refused(call=0, reason="stale")
LIES: dict[str, tuple[str, Sequence[Message]]] = {
    "silence": ("strict", []),
    "stale, twice": ("strict", [CHALLENGED, STALE, CHALLENGED, STALE]),
    "stale, and then not believed": ("lax", [CHALLENGED, STALE, CHALLENGED, STALE, Granted(call=0)]),
    "no proof": ("lax", [CHALLENGED, Refused(call=0, reason="proof"), Granted(call=0)]),
    "a challenge to who has no key": ("keyless", [CHALLENGED, Granted(call=0)]),
    "another life each time": ("met", [welcome(0, epoch="x"), welcome(0, epoch="y"), welcome(0, epoch="z")]),
}


def answered(rig: Rig, clock: Clock, said: Sequence[Message], late_s: float) -> float:
    """Seconds until the pull ended, with one answer after the other, each so late."""
    begun, left = clock.now, list(said)
    for _ in range(10):
        due = clock.now + (late_s if left else LIMIT_S)
        while clock.now < due and not rig.done:  # a turn of the transfer thread each 50 ms, as in `nixl.py`
            clock.now += 0.05
            rig.peers.expire(clock.now)
        if rig.done:
            break
        told = left.pop(0)
        rig.peers.answer(lambda call, told=told: msgspec.structs.replace(told, call=call))  # type: ignore[misc]
    return clock.now - begun


def rig_of(kind: str, folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> Rig:
    if kind in ("keyless", "met"):
        return Rig(context, handoff=KEYLESS)
    return Rig(context, handoff=Pod(folder, "reader", KEY, required=kind == "strict").handoff)


@pytest.mark.parametrize(("kind", "said"), LIES.values(), ids=LIES)
def test_who_answers_late_and_lies_holds_a_pull_no_longer_than_who_is_silent(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], clock: Clock, kind: str, said: Sequence[Message]
):
    """Each question had a deadline of its own: with an answer just before it, five of them were 23 s instead of 5."""
    rig = rig_of(kind, tmp_path, context)
    if kind == "met":
        rig.pull("before", reference(epoch="before"))
        rig.peers.answer(lambda call: welcome(call, epoch="before"))
    rig.pull("r", reference())
    assert answered(rig, clock, said, LATE_S) <= LIMIT_S + 0.1
    assert rig.ended()["r"] == "timeout"


def test_who_answers_late_and_is_honest_is_read(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], clock: Clock):
    """The most questions that a greeting has: an owner that began anew in between, and had no key by then."""
    rig = rig_of("lax", tmp_path, context)
    rig.pull("r", reference())
    said = [CHALLENGED, STALE, CHALLENGED, Refused(call=0, reason="proof"), welcome(0)]
    for told in said:
        clock.now += LIMIT_S / 6
        rig.peers.expire(clock.now)
        rig.peers.answer(lambda call, told=told: msgspec.structs.replace(told, call=call))  # type: ignore[misc]
    assert (rig.ended(), rig.agent.reads) == ({}, 1)


def test_the_next_pull_has_all_of_the_time(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], clock: Clock):
    rig = rig_of("keyless", tmp_path, context)
    rig.pull("r", reference())
    answered(rig, clock, [], LATE_S)
    rig.done.clear()
    rig.pull("next", reference())
    clock.now += LATE_S
    rig.peers.expire(clock.now)
    rig.peers.answer(welcome)
    assert (rig.ended(), rig.agent.reads) == ({}, 1)
