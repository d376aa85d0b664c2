"""Owners that a reader met before it asked for proofs: what of them still counts once it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from fleet_wire.sidechannel import PROTOCOL_VERSION, Challenge, Hello, Message, Prove, Refused, Welcome
from fleet_worker.transfer.handoff import GRACE_S
from tests.fleet_worker.transfer.reading import Rig, reference, welcome
from tests.fleet_worker.transfer.test_handoff import KEY, Pod

PAST_GRACE_S = 2 * GRACE_S


class Pair:
    """A reader that began without a key, and who answers at its owner's address."""

    def __init__(self, folder: Path, context: zmq.Context[zmq.Socket[bytes]], reader: Pod) -> None:
        self.reader, self.owner = reader, Pod(folder, "owner", KEY)
        self.rig = Rig(context, handoff=reader.handoff)

    def become_strict(self) -> None:
        self.reader.write(KEY)
        self.reader.later()
        self.reader.later(PAST_GRACE_S)
        assert self.reader.handoff.is_guarded

    def prove(self, change: Callable[[Welcome], Welcome] = lambda told: told) -> None:
        """The owner, which has the key, answers challenge and proof. `change`: what it says of itself."""
        self.rig.peers.answer(lambda call: Challenge(call=call, challenge=self.owner.challenge()))
        asked = self.rig.peers.asked[-1][2]
        assert isinstance(asked, Prove)
        self.rig.peers.answer(lambda call: self.owner.handoff.welcoming(change(welcome(call)), asked, "10.0.0.1", 5600))

    def greetings(self) -> int:
        return len(self.rig.peers.told(Hello))


@pytest.fixture
def pair(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> Pair:
    return Pair(tmp_path, context, Pod(tmp_path, "reader"))


def met(pair: Pair, told: Callable[[int], Message] = welcome) -> None:
    """A first pull, before anything is proven: its read goes on for the whole test."""
    pair.rig.pull("first", reference())
    pair.rig.peers.answer(told)
    assert (pair.rig.agent.reads, pair.greetings()) == (1, 1)


def test_the_owner_is_greeted_once_more_and_its_reads_go_on(pair: Pair):
    met(pair)
    pair.become_strict()
    for name in ("second", "third"):
        pair.rig.pull(name, reference())
    assert (pair.greetings(), pair.rig.agent.reads) == (2, 1), "nothing more is read before the proof"
    pair.prove()
    assert (pair.rig.agent.reads, pair.rig.agent.made_known) == (3, 1)
    pair.rig.pull("fourth", reference())
    assert (pair.greetings(), pair.rig.agent.reads, pair.rig.ended()) == (2, 4, {})


def test_who_proves_to_be_another_one_than_was_there_takes_its_place(pair: Pair):
    """Who took the address meanwhile said everything as the owner does, but where its memory is."""
    met(pair)
    pair.become_strict()
    pair.rig.pull("second", reference())
    pair.prove(lambda told: msgspec.structs.replace(told, base_address=4096))
    pair.prove(lambda told: msgspec.structs.replace(told, base_address=4096))
    (peer,) = pair.rig.peers._peers.values()
    assert peer.welcome is not None
    assert (peer.welcome.base_address, pair.rig.agent.reads) == (4096, 2)


def test_nothing_is_read_over_what_nixl_was_told_by_who_was_there_before(pair: Pair):
    """He called himself as the owner does, and his read went on: NIXL knew that name, and the pulls of the proven owner, with its
    address, were read from him."""
    met(pair, lambda call: welcome(call, agent=b"engine|his"))
    pair.become_strict()
    pair.rig.pull("second", reference())
    pair.prove()
    pair.prove()
    assert (pair.rig.ended(), pair.rig.agent.reads) == ({"second": "peer"}, 1)
    pair.rig.agent.state = "DONE"
    pair.rig.reader.advance(time.monotonic())
    assert pair.rig.agent.known == []
    pair.rig.pull("third", reference())
    pair.prove()
    assert (pair.rig.agent.told["engine"], pair.rig.agent.reads) == (b"engine", 2)


@pytest.mark.parametrize("answer", ["a plain welcome", "a welcome with rubbish for a proof", "a refusal"])
def test_who_cannot_prove_it_is_read_no_more(pair: Pair, answer: str):
    met(pair, lambda call: msgspec.structs.replace(welcome(call), proof=b"x" * 32 if "rubbish" in answer else b""))
    pair.become_strict()
    for number in range(3):
        pair.rig.pull(f"later-{number}", reference())
        plain = Refused(call=0, reason="incompatible") if answer == "a refusal" else welcome(0)
        pair.rig.peers.answer(lambda call, plain=plain: msgspec.structs.replace(plain, call=call))  # type: ignore[misc]
    assert pair.rig.ended() == dict.fromkeys(("later-0", "later-1", "later-2"), "unproven")
    assert (pair.rig.agent.reads, pair.greetings()) == (1, 4)


def test_before_that_nobody_is_greeted_anew(pair: Pair):
    met(pair)
    pair.reader.write(KEY)
    pair.reader.later()
    pair.rig.pull("second", reference())
    assert (pair.greetings(), pair.rig.agent.reads) == (1, 2)
    assert pair.rig.peers.told(Hello)[0][1].version > PROTOCOL_VERSION


def test_a_plain_welcome_takes_no_proven_ones_place(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]):
    """Of a reader that is not strict: a reference of another life has it greet anew, and somebody else answers."""
    pair = Pair(tmp_path, context, Pod(tmp_path, "lax", KEY, required=False))
    pair.rig.pull("first", reference())
    pair.prove()
    pair.rig.pull("stale", reference(epoch="before"))
    pair.rig.peers.answer(lambda call: msgspec.structs.replace(welcome(call), base_address=4096))
    (peer,) = pair.rig.peers._peers.values()
    assert peer.welcome is not None
    assert (peer.welcome.base_address, bool(peer.welcome.proof)) == (0, True)
