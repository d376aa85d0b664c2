"""Who may ask this worker for hot prefixes, and whom it believes: pods that have the fleet's key (`fleet_wire.peerkey`).

A question has a proof over all of it, whom it is for, when it was asked and a random number; an answer with tokens and KV has one
over itself and that number. Nothing is encrypted: who can listen on the way between two workers hears prompts in any case.
Without a key nobody is answered and nobody is asked. Used by the transfer thread alone. Hand-offs are proven in another way,
which needs no clock: `handoff.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from fleet_wire.peerkey import PROOF_BYTES, SEED, is_proven, proof
from fleet_wire.sidechannel import AskHot, Hottest, answering_parts, asking_parts
from fleet_worker.transfer.keys import NONCE_BYTES, Keys, Once, Refusals, place

SKEW_MS: Final = 30_000
"""Clocks of two workers may differ by so much, one way: as between routers. Numbers of questions are remembered for twice that
long: a new worker asks some 30 a second."""
MOST_WORD: Final = 256
"""Of each text in a question: a proof is computed over a kilobyte, whatever somebody sends."""
REASONS: Final = ("missing", "bounds", "no_key", "wrong", "clock", "again", "full", "answer")
"""Why a question was refused, and `answer`: of one that we asked the answer was not proven."""


class Trust:
    """Of one worker. `key` None: it was given no file."""

    def __init__(
        self,
        key: Path | None,
        scope: str,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = Keys(key, scope, SEED, clock)
        self._wall_ms = wall_ms
        self._once = Once(clock)
        self.refused = Refusals("hot prefixes")
        """By REASONS."""

    def current(self) -> tuple[bytes, ...]:
        """For seeding, the first one signs; empty: none."""
        return self._keys.current()

    # -- as the one that asks ---------------------------------------------------------------------------------------
    def asking(self, ask: AskHot, host: str, port: int) -> AskHot | None:
        """The question with its proof; None without a key."""
        keys = self.current()
        if not keys:
            return None
        asked = msgspec.structs.replace(ask, stamp_ms=self._wall_ms(), nonce=os.urandom(NONCE_BYTES), proof=b"")
        return msgspec.structs.replace(asked, proof=proof(keys[0], *asking_parts(asked, place(host, port))))

    def believes(self, answer: Hottest, nonce: bytes) -> bool:
        """It comes from one of our fleet, and answers this question."""
        if len(answer.proof) == PROOF_BYTES and is_proven(answer.proof, self.current(), *answering_parts(answer, nonce)):
            return True
        self.refused.count("answer", "an answer without a proof of the fleet's key (answer)")
        return False

    # -- as the one that is asked -----------------------------------------------------------------------------------
    def refusal(self, ask: AskHot, host: str, port: int) -> str:
        """Why this question is answered with nothing, one of REASONS; empty: it is believed, once. `host`, `port`: our own."""
        why = self._why(ask, host, port)
        if why:
            self.refused.count(why, self.words(why, ask))
        return why

    def words(self, why: str, ask: AskHot) -> str:
        """For whoever is on call, here and where it was asked. Whose clock is wrong nobody knows; who is told by how much has
        the key, for its proof was looked at before its clock."""
        if why != "clock":
            return f"no proof of the fleet's key ({why})"
        apart_s, most_s = (self._wall_ms() - ask.stamp_ms) / 1_000, SKEW_MS // 1_000
        return (
            f"the clock of who asks is {abs(apart_s):.0f} s {'behind' if apart_s > 0 else 'ahead'}, more than {most_s} s (clock)"
        )

    def _why(self, ask: AskHot, host: str, port: int) -> str:
        if not ask.proof:
            return "missing"
        words = (ask.compat, ask.weights, ask.names, ask.reader)
        if len(ask.proof) != PROOF_BYTES or len(ask.nonce) != NONCE_BYTES or max(map(len, words)) > MOST_WORD:
            return "bounds"
        keys = self.current()
        if not keys:
            return "no_key"
        if not is_proven(ask.proof, keys, *asking_parts(ask, place(host, port))):
            return "wrong"
        now_ms = self._wall_ms()
        if abs(now_ms - ask.stamp_ms) > SKEW_MS:
            return "clock"
        return self._once.take(ask.nonce, now_ms, now_ms + 2 * SKEW_MS)

    def answering(self, answer: Hottest, nonce: bytes) -> Hottest | None:
        """The answer with its proof; None without a key."""
        keys = self.current()
        return msgspec.structs.replace(answer, proof=proof(keys[0], *answering_parts(answer, nonce))) if keys else None
