"""Who may greet this worker for its KV, and whose welcome it believes: pods that have the fleet's key (`fleet_wire.peerkey`).

The owner gives a challenge, the reader proves it, the owner proves its welcome over both. No clock of another machine is
compared: one that is wrong must not stop KV. A challenge says itself, under a secret of this life of the owner, when it was made:
of greetings that prove nothing nothing is kept, however many come. Of one that was proven a number is, so that it is good once.

`is_required` (the operator's word) and a key together make a worker strict: no KV without a proof, neither way. Without a key it
greets and is greeted as before there was one: a Secret that is not there must not stop a fleet. Used by the transfer thread
alone, but for `refused` and `is_guarded`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from fleet_wire.peerkey import HANDOFF, PROOF_BYTES, is_proven, proof, proven_by
from fleet_wire.sidechannel import PROVEN_VERSION, Prove, Welcome, proving_parts, welcoming_parts
from fleet_worker.transfer.keys import LOOK_S, NONCE_BYTES, SPREAD_S, Keys, Once, Refusals, place

STAMP_BYTES: Final = 8
BODY_BYTES: Final = STAMP_BYTES + NONCE_BYTES
CHALLENGE_BYTES: Final = BODY_BYTES + PROOF_BYTES
CHALLENGE_S: Final = 30.0
"""How long a challenge may be proven, by its owner's own clock; a reader's whole greeting takes 5 s at most."""
GRACE_S: Final = SPREAD_S
"""A worker that began without a key, and is given one, goes on as before for so long. One that begins with a key is strict at
once."""
MOST_COMPAT: Final = 256
"""Characters of a compatibility hash in a greeting: a proof is computed over less than a kilobyte, whatever somebody sends."""
HANDOFF_REASONS: Final = ("missing", "bounds", "stale", "wrong", "again", "full", "answer")
"""Why a greeting was refused, and `answer`: to one of ours the answer was not proven."""


class Handoff:
    """Of one worker, for both halves of a hand-off. `key` None: it was given no file."""

    def __init__(
        self, key: Path | None, scope: str, *, is_required: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._keys = Keys(key, scope, HANDOFF, clock, SPREAD_S)
        self._is_required, self._clock = is_required, clock
        self._secret = os.urandom(PROOF_BYTES)
        """Of this life: what an earlier one gave is nothing here."""
        self._once = Once(clock)
        self._look_at = float("-inf")
        self.is_guarded = False
        """Strict, at the last look. Any thread."""
        self.refused = Refusals("KV hand-off")
        """By HANDOFF_REASONS."""

    def follow(self, now: float) -> None:
        """At every turn: a worker that nobody greets for days must know the next key by then."""
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self.is_guarded = self.is_strict()

    def has_key(self) -> bool:
        """Proofs can be given and looked at."""
        return bool(self._keys.current())

    def is_strict(self) -> bool:
        """Neither a greeting nor a welcome counts without a proof."""
        return self._is_required and self.has_key() and self._clock() - self._keys.since >= GRACE_S

    # -- as the owner -----------------------------------------------------------------------------------------------
    def challenge(self) -> bytes:
        """A new one."""
        body = round(self._clock() * 1_000).to_bytes(STAMP_BYTES, "big", signed=True) + os.urandom(NONCE_BYTES)
        return body + proof(self._secret, body)

    def count_missing(self) -> None:
        """A greeting that proves nothing, to a strict owner."""
        self.refused.count("missing", words("missing"))

    def refusal(self, greeting: Prove, host: str, port: int) -> str:
        """Why it gets no welcome, one of HANDOFF_REASONS; empty: it is believed, once. `host`, `port`: our own."""
        why = self._why(greeting, host, port)
        if why:
            self.refused.count(why, words(why))
        return why

    def _why(self, greeting: Prove, host: str, port: int) -> str:
        sizes = (len(greeting.challenge), len(greeting.nonce), len(greeting.proof))
        if sizes != (CHALLENGE_BYTES, NONCE_BYTES, PROOF_BYTES) or len(greeting.compat) > MOST_COMPAT:
            return "bounds"
        now_ms, body = round(self._clock() * 1_000), greeting.challenge[:BODY_BYTES]
        made_ms = int.from_bytes(body[:STAMP_BYTES], "big", signed=True)
        good_ms = round(CHALLENGE_S * 1_000)
        if not is_proven(greeting.challenge[BODY_BYTES:], (self._secret,), body) or now_ms - made_ms > good_ms:
            return "stale"
        if not is_proven(greeting.proof, self._keys.current(), *proving_parts(greeting, place(host, port))):
            return "wrong"
        return self._once.take(body, now_ms, made_ms + good_ms)

    def welcoming(self, welcome: Welcome, greeting: Prove, host: str, port: int) -> Welcome:
        """The welcome of who was believed, with its proof: by the key that it has itself, for it may have no other."""
        keys = self._keys.current()
        key = proven_by(greeting.proof, keys, *proving_parts(greeting, place(host, port))) or keys[0]
        return msgspec.structs.replace(welcome, proof=proof(key, *welcoming_parts(welcome, greeting)))

    # -- as the reader ----------------------------------------------------------------------------------------------
    def signers(self) -> tuple[bytes, ...]:
        """The keys to prove oneself by, the likeliest first: the one that signs; while keys are being changed, the others. An
        owner that has just begun knows the newest alone, one that is late the oldest, one that began between two changes neither.
        """
        keys = self._keys.current()
        return tuple(dict.fromkeys((*keys[:1], *keys[:0:-1])))

    def proving(self, greeting: Prove, host: str, port: int, key: bytes = b"") -> Prove:
        """The greeting of the owner at this address, with its proof by `key`, one of `signers`; empty: the first."""
        asked = msgspec.structs.replace(greeting, version=PROVEN_VERSION, nonce=os.urandom(NONCE_BYTES), proof=b"")
        key = key or self._keys.current()[0]
        return msgspec.structs.replace(asked, proof=proof(key, *proving_parts(asked, place(host, port))))

    def believes(self, welcome: Welcome, greeting: Prove) -> bool:
        """It comes from one of our fleet, and answers this greeting."""
        parts = welcoming_parts(welcome, greeting)
        if len(welcome.proof) == PROOF_BYTES and is_proven(welcome.proof, self._keys.current(), *parts):
            return True
        self.count_unproven()
        return False

    def count_unproven(self) -> None:
        """An answer to one of our greetings was not believed."""
        self.refused.count("answer", words("answer"))


def words(why: str) -> str:
    """For whoever is on call, at both ends; nothing of this worker, nor of a key."""
    return f"no proof of the fleet's key ({why})"
