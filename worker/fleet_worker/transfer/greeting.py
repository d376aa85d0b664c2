"""A reader's greeting of an owner, to its end: what each of them knows of proofs (`handoff.py`) is found out on the way.

A reader says that it knows proofs (PROVEN_VERSION). An owner with a key answers with a challenge; one without welcomes it; one
that is older than proofs refuses that version at once. A strict reader ends there. Another one, or one that has no key to prove,
greets once more as the older one knows it. Used by the transfer thread only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from fleet_wire.sidechannel import PROTOCOL_VERSION, PROVEN_VERSION, Challenge, Granted, Hello, Prove, Refused, Welcome
from fleet_worker.transfer.base import KvError, KvPool, KvReferenceError, KvTransferError
from fleet_worker.transfer.handoff import CHALLENGE_BYTES, Handoff
from fleet_worker.transfer.owner import TransferSettings
from fleet_worker.transfer.peers import Answer, OnAnswer, Peer, Peers

UNBELIEVED: Final = "unproven"
"""Reason of a refusal that the reader itself makes of an answer."""
MOST_SAID: Final = 200
"""Characters of an owner's own words that are told on; a refusal may have megabytes."""
MOST_REASON: Final = 64
PROOF_REASONS: Final = ("proof", "stale", UNBELIEVED)
"""Refusals that say nothing of the reference: another worker may be the right one."""


@dataclass(frozen=True, slots=True)
class _Greeting:
    """One, to its end."""

    peer: Peer
    done: OnAnswer
    until: float
    """All its questions are answered by then, or none counts: one for each of them let a slow liar hold a pull five times as
    long as a silent one."""
    is_second: bool = False


class Greeter:
    """Of one reader."""

    def __init__(self, settings: TransferSettings, pool: KvPool, peers: Peers, handoff: Handoff) -> None:
        self._compat, self._pool, self._peers, self._handoff = settings.compat, pool, peers, handoff

    def greet(self, peer: Peer, done: OnAnswer, until: float) -> None:
        """`done` gets a welcome that is believed, or whatever came instead, once, and by `until`. A welcome has a proof there
        only where it was looked at."""
        self._begin(_Greeting(peer, done, until))

    def _begin(self, greeting: _Greeting) -> None:
        self._hello(greeting, PROVEN_VERSION, lambda answer: self._answered(greeting, answer))

    def _hello(self, greeting: _Greeting, version: int, done: OnAnswer) -> None:
        pool, compat = self._pool, self._compat
        self._peers.call(
            greeting.peer,
            lambda call: Hello(
                call=call, version=version, compat=compat, block_bytes=pool.block_bytes, block_tokens=pool.block_tokens
            ),
            time.monotonic(),
            done,
            greeting.until,
        )

    def _answered(self, greeting: _Greeting, answer: Answer | KvTransferError) -> None:
        """Nothing of this is proven: a strict reader goes on with a challenge alone."""
        if isinstance(answer, Challenge) and not self._handoff.has_key():
            why = "it asks for a proof of the fleet's key, and this worker has none"
            self._plainly(greeting, Refused(call=answer.call, reason="proof", message=why))
        elif isinstance(answer, Challenge) and len(answer.challenge) == CHALLENGE_BYTES:
            self._prove(greeting, answer.challenge, self._handoff.signers())
        elif isinstance(answer, KvTransferError):
            greeting.done(answer)
        elif self._handoff.is_strict():
            self._handoff.count_unproven()
            greeting.done(_unbelieved(answer))
        elif isinstance(answer, Refused):
            self._plainly(greeting, answer)
        else:
            greeting.done(_without_proof(answer))

    def _plainly(self, greeting: _Greeting, refused: Refused) -> None:
        """As before there were proofs. Of a strict owner, which answers that with no welcome, the first word counts."""

        def told(answer: Answer | KvTransferError) -> None:
            greeting.done(refused if isinstance(answer, Granted) else _without_proof(answer))

        self._hello(greeting, PROTOCOL_VERSION, told)

    def _prove(self, greeting: _Greeting, challenge: bytes, keys: tuple[bytes, ...]) -> None:
        """By one key after the other, until the owner knows one: all of the same greeting, with its one deadline."""
        pool, compat, peer = self._pool, self._compat, greeting.peer
        said = list[Prove]()

        def proven(call: int) -> Prove:
            bare = Prove(
                call=call, version=PROVEN_VERSION, compat=compat, block_bytes=pool.block_bytes, block_tokens=pool.block_tokens,
                challenge=challenge, nonce=b"",
            )  # fmt: skip
            said.append(self._handoff.proving(bare, peer.host, peer.port, keys[0]))
            return said[-1]

        def ended(answer: Answer | KvTransferError) -> None:
            if isinstance(answer, Refused) and answer.reason == "proof" and keys[1:]:
                self._prove(greeting, challenge, keys[1:])
            else:
                self._ended(greeting, answer, said)

        self._peers.call(peer, proven, time.monotonic(), ended, greeting.until)

    def _ended(self, greeting: _Greeting, answer: Answer | KvTransferError, said: list[Prove]) -> None:
        """An owner that began anew in between knows its challenge no more: it gives another one, once. The last of `said` was
        said; none, where it could not be made: then its deadline came. A refusal proves nothing: of a strict reader's client it
        says nothing, either."""
        if isinstance(answer, Refused) and answer.reason == "stale" and not greeting.is_second:
            self._begin(replace(greeting, is_second=True))
        elif isinstance(answer, Refused) and answer.reason in PROOF_REASONS and not self._handoff.is_strict():
            self._plainly(greeting, answer)
        elif isinstance(answer, Refused) and answer.reason not in PROOF_REASONS and self._handoff.is_strict():
            self._handoff.count_unproven()
            greeting.done(_unbelieved(answer))
        elif isinstance(answer, Welcome) and not self._handoff.believes(answer, said[-1]):
            greeting.done(_unbelieved(answer))
        else:
            greeting.done(answer)


def _without_proof(answer: Answer | KvTransferError) -> Answer | KvTransferError:
    """What is written where a proof would be, in a welcome that was asked for none, is nobody's word."""
    return msgspec.structs.replace(answer, proof=b"") if isinstance(answer, Welcome) else answer


def _unbelieved(answer: Answer) -> Refused:
    """What a reader makes of an answer without the proof that it asked for."""
    said = f": {answer.message[:MOST_SAID]}" if isinstance(answer, Refused) and answer.message else ""
    return Refused(call=answer.call, reason=UNBELIEVED, message=f"no proof of the fleet's key in its answer{said}")


def refusal_error(peer: Peer, answer: Refused) -> KvError:
    """Why a pull fails: a pairing that cannot be (400), or a proof that is missing (503: another prefill may do)."""
    said, reason = answer.message[: 2 * MOST_SAID], answer.reason[:MOST_REASON]
    if reason == UNBELIEVED:
        return KvTransferError(UNBELIEVED, f"the prefill worker at {peer.host} is not believed: {said}")
    kind = KvTransferError if reason in PROOF_REASONS else KvReferenceError
    return kind(reason, f"the prefill worker refused the pairing: {said}")
