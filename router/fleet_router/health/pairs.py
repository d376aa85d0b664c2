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


@dataclass
class PairHealth:
    """Breakers of those pairs that failed and have not answered since."""

    breakers: dict[tuple[str, str], Breaker] = field(default_factory=dict)
    """By (prefill, decode); empty while nothing is wrong."""
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
        self.opened += opens
        return opens

    def succeeded(self, prefill: str, decode: str, sent_at: float) -> None:
        """KV moved."""
        breaker = self.breakers.get((prefill, decode))
        if breaker is not None and (breaker.answers(sent_at) or breaker.closed):
            del self.breakers[prefill, decode]

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

    def keep(self, workers: frozenset[str]) -> None:
        """Only these workers are left."""
        self.breakers = {pair: breaker for pair, breaker in self.breakers.items() if workers.issuperset(pair)}
