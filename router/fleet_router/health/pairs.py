"""Health of (prefill, decode) pairs: KV that does not move between two workers is first that pair's fault.

A pair is put out before its workers. A prefill worker whose KV at least two decode workers, and at least half of its partners,
could not get is put out as a whole; a decode worker never is: it can prefill for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fleet_router.health.breaker import PAIR_FAILURES_MOST, Breaker

PAIRS_MOST: Final = 4_096
"""Pairs that failed lately; the one that failed first is forgotten for the next."""
PARTNERS_LEAST: Final = 2
MOVED_S: Final = 300.0
"""KV that moved so long ago or less shows that a pair works."""


@dataclass
class PairHealth:
    """Breakers of those pairs that failed and have not answered since."""

    breakers: dict[tuple[str, str], Breaker] = field(default_factory=dict)
    """By (prefill, decode); empty while nothing is wrong."""
    moved: dict[tuple[str, str], float] = field(default_factory=dict)
    """Pairs between which KV moved, and when it was asked for; counted only while some pair fails, to tell which side it is."""
    opened: int = 0
    """Times that a pair was put out."""

    def failed(self, prefill: str, decode: str, now: float) -> bool:
        """KV did not move between them; True when the pair is put out by it."""
        pair = (prefill, decode)
        breaker = self.breakers.get(pair)
        if breaker is None:
            if len(self.breakers) >= PAIRS_MOST:
                self.breakers.pop(next(iter(self.breakers)))
            breaker = self.breakers[pair] = Breaker(PAIR_FAILURES_MOST)
        opens = breaker.failed(now)
        if opens:
            self.moved.pop(pair, None)
        self.opened += opens
        return opens

    def succeeded(self, prefill: str, decode: str, sent_at: float) -> None:
        """KV moved."""
        pair = (prefill, decode)
        breaker = self.breakers.get(pair)
        if breaker is not None:
            if not (breaker.answers(sent_at) or breaker.closed):
                return
            del self.breakers[pair]
        if self.breakers:
            self.moved.pop(pair, None)  # the newest last
            if len(self.moved) >= PAIRS_MOST:
                del self.moved[next(iter(self.moved))]
            self.moved[pair] = sent_at
        else:
            self.moved.clear()

    def blocks(self, prefill: str, decode: str, now: float) -> bool:
        """This pair is not to be used now. When its time is over it is on trial: one more failure puts it out for longer."""
        breaker = self.breakers.get((prefill, decode))
        return breaker is not None and now < breaker.until

    def condemns(self, prefill: str, decodes: int, now: float) -> bool:
        """So many pairs of this prefill worker are put out that it is no pair's fault any more. `decodes`: its partners."""
        out = sum(p == prefill and now < breaker.until for (p, _), breaker in self.breakers.items())
        return out >= PARTNERS_LEAST and 2 * out >= decodes

    def out(self, now: float) -> list[tuple[str, str]]:
        """Pairs that are put out."""
        return [pair for pair, breaker in self.breakers.items() if now < breaker.until]

    def lasting(self) -> list[tuple[str, str]]:
        """Pairs that were put out, tried again and put out again, and between which no KV has moved since: not a
        worker that was started anew, but the way between the two."""
        return [pair for pair, breaker in self.breakers.items() if not breaker.closed and breaker.openings > 1]

    def beside(self, now: float) -> list[tuple[str, str]]:
        """Pairs between which KV moved lately, of which one worker is in a pair of `lasting`; the newest first."""
        failing = self.lasting()
        givers, takers = {prefill for prefill, _ in failing}, {decode for _, decode in failing}
        lately = [pair for pair, at in reversed(self.moved.items()) if now - at <= MOVED_S]
        return [(prefill, decode) for prefill, decode in lately if prefill in givers or decode in takers]

    def keep(self, workers: frozenset[str]) -> None:
        """Only these workers are left."""
        self.breakers = {pair: breaker for pair, breaker in self.breakers.items() if workers.issuperset(pair)}
        self.moved = {pair: at for pair, at in self.moved.items() if workers.issuperset(pair)} if self.breakers else {}
