"""Who may ask this worker for hot prefixes, and whom it believes: pods that have the fleet's key (`fleet_wire.peerkey`).

A question has a proof over all of it, whom it is for, when it was asked and a random number; an answer with tokens and KV has one
over itself and that number. Nothing is encrypted: who can listen on the way between two workers hears prompts in any case.
Without a key nobody is answered and nobody is asked. Used by the transfer thread alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import msgspec

from fleet_wire.keyfile import KeyFile
from fleet_wire.peerkey import PROOF_BYTES, SEED, derived, is_proven, proof
from fleet_wire.sidechannel import AskHot, Hottest, answering_parts, asking_parts

NONCE_BYTES: Final = 16
SKEW_MS: Final = 30_000
"""Clocks of two workers may differ by so much, one way: as between routers."""
MOST_NONCES: Final = 8_192
"""Questions that are remembered for twice that long, of which each was proven: a new worker asks some 30 a second."""
MOST_WORD: Final = 256
"""Of each text in a question: a proof is computed over a kilobyte, whatever somebody sends."""
LOOK_S: Final = 2.0
REASONS: Final = ("missing", "bounds", "no_key", "wrong", "clock", "again", "full", "answer")
"""Why a question was refused, and `answer`: of one that we asked the answer was not proven."""
LOG = logging.getLogger("fleet.worker.transfer")


class Trust:
    """Of one worker. `key` None: it was given no file."""

    def __init__(
        self,
        key: Path | None,
        scope: str,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = None if key is None else KeyFile(key)
        self._scope, self._wall_ms, self._clock = scope, wall_ms, clock
        self._keys: tuple[bytes, ...] = ()
        self._lines: tuple[bytes, ...] = ()
        self._looked_at = self._swept_at = float("-inf")
        self._nonces: OrderedDict[bytes, int] = OrderedDict()
        """Of questions that were believed, and until when nobody may ask them again, in the order of their coming."""
        self.refused: Counter[str] = Counter()
        """By REASONS. Read by other threads."""

    def current(self) -> tuple[bytes, ...]:
        """For seeding, the first one signs; empty: none. The file is looked at every 2 s at most."""
        now = self._clock()
        if self._file is not None and now - self._looked_at >= LOOK_S:
            self._looked_at = now
            if problem := self._file.look():
                LOG.warning("the key that the fleet's workers share (%s): %s", self._file.path, problem)
            if self._file.keys is not self._lines:
                self._lines = self._file.keys
                self._keys = derived(self._lines, SEED, self._scope)
        return self._keys

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
        self._count("answer", "an answer without a proof of the fleet's key (answer)")
        return False

    # -- as the one that is asked -----------------------------------------------------------------------------------
    def refusal(self, ask: AskHot, host: str, port: int) -> str:
        """Why this question is answered with nothing, one of REASONS; empty: it is believed, once. `host`, `port`: our own."""
        why = self._why(ask, host, port)
        if why:
            self._count(why, self.words(why, ask))
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
        return self._remember(ask, now_ms)

    def _remember(self, ask: AskHot, now_ms: int) -> str:
        """Numbers of questions that are too old to be believed again are forgotten; a clock that is set back keeps them, and they
        keep their place before newer ones: these are looked through, too, once there is no room."""
        while self._nonces and next(iter(self._nonces.values())) < now_ms:
            self._nonces.popitem(last=False)
        if ask.nonce in self._nonces:
            return "again"
        if len(self._nonces) >= MOST_NONCES and not self._has_room(now_ms):
            return "full"
        self._nonces[ask.nonce] = now_ms + 2 * SKEW_MS
        return ""

    def _has_room(self, now_ms: int) -> bool:
        """After a look through all of them, every 2 s at most: who has the key and asks without end costs no more."""
        now = self._clock()
        if now - self._swept_at >= LOOK_S:
            self._swept_at = now
            self._nonces = OrderedDict((nonce, until) for nonce, until in self._nonces.items() if until >= now_ms)
        return len(self._nonces) < MOST_NONCES

    def answering(self, answer: Hottest, nonce: bytes) -> Hottest | None:
        """The answer with its proof; None without a key."""
        keys = self.current()
        return msgspec.structs.replace(answer, proof=proof(keys[0], *answering_parts(answer, nonce))) if keys else None

    def _count(self, why: str, words: str) -> None:
        """Said for the 1st, 2nd, 4th, 8th... of a reason: whoever tries does not fill the disk."""
        self.refused[why] += 1
        count = self.refused[why]
        if count & (count - 1) == 0:
            LOG.warning("hot prefixes: refused: %s, %d so far", words, count)


def place(host: str, port: int) -> str:
    """One spelling of a worker's address, whatever form it was given in."""
    bare = host.strip("[]")
    try:
        bare = ip_address(bare).compressed
    except ValueError:
        bare = bare.lower()
    return f"{bare}|{port}"
