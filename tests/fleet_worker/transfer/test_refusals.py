"""What a reader makes of an owner's refusal, which anybody may say who answers at its address."""

from __future__ import annotations

from pathlib import Path

from fleet_wire.sidechannel import Challenge, Refused, encode
from fleet_worker.transfer.base import KvTransferError
from fleet_worker.transfer.greeting import refusal_error
from fleet_worker.transfer.handoff import CHALLENGE_BYTES
from fleet_worker.transfer.peers import Peer
from tests.fleet_worker.transfer.test_handoff import HOST, KEY, PORT, Pod


def test_a_refusal_that_nobody_proved_is_no_word_against_a_client(tmp_path: Path):
    """Who took the address of a worker that has gone gave any challenge and then `incompatible`: a 400 for every client whose KV
    was there. A strict reader hears what it says, and its router has the prompt computed anew."""
    owner, reader = Pod(tmp_path, "owner", KEY), Pod(tmp_path, "reader", KEY)
    for reason in ("incompatible", "protocol", "x"):
        said = iter([Challenge(call=1, challenge=b"c" * CHALLENGE_BYTES), Refused(call=2, reason=reason, message="m" * 10_000)])
        answer = reader.hears(lambda _, said=said: encode(next(said)))  # type: ignore[misc]
        assert isinstance(answer, Refused)
        error = refusal_error(Peer(HOST, PORT, None), answer)  # type: ignore[arg-type]
        assert (type(error), error.reason) == (KvTransferError, "unproven")
        assert len(str(error)) < 500
    assert reader.handoff.refused == {"answer": 3}
    misfit = Pod(tmp_path, "misfit", KEY, compat="other").hears(owner.reply)
    assert isinstance(misfit, Refused)
    assert "compatibility hash" in misfit.message, "and whoever is on call reads it"


def test_of_what_an_owner_says_no_error_is_made_that_is_longer_than_a_line():
    """A refusal may have 4 MiB: it went into the answer and into every log on its way."""
    peer = Peer(HOST, PORT, None)  # type: ignore[arg-type]
    for reason in ("proof", "incompatible", "unproven"):
        assert len(str(refusal_error(peer, Refused(call=1, reason=reason, message="m" * 1_000_000)))) < 1_000
    assert len(refusal_error(peer, Refused(call=1, reason="r" * 1_000_000)).reason) < 100
