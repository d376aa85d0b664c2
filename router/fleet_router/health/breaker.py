"""One breaker per worker and per pair: closed, open for a while after failures, then on trial until an answer comes.

Sources of the numbers: the reliability notes, section 4 (5 consecutive failures or 1 refused connect, 5 s x 2^k up to 60 s).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FAILURES_MOST: Final = 5
"""In a row."""
PAIR_FAILURES_MOST: Final = 3
OPEN_FIRST_S: Final = 5.0
OPEN_MOST_S: Final = 60.0
DOUBLED_MOST: Final = 16
"""Times; by far more than it takes from the first to the longest. Of a thousand the result would be no float."""
FORGIVEN_S: Final = 120.0
"""After so long without opening the next time is as short as the first."""
OUTLIER_SHARE: Final = 0.4
"""Of about the last `OUTLIER_OVER` answers: who fails so often is put out, also when it never fails five times in a row."""
OUTLIER_OVER: Final = 16


@dataclass(eq=False)
class Breaker:
    """State of one worker, or of one pair. A success costs two comparisons as long as nothing is wrong."""

    most: int = FAILURES_MOST
    failures: int = 0
    """In a row."""
    share: float = 0.0
    """Of failures, over about the last 16 answers."""
    openings: int = 0
    opened_at: float = 0.0
    until: float = 0.0
    """Open until then; 0: closed."""
    gone: bool = False
    """Nobody listens there: not even in a panic is it worth asking while others listen."""

    @property
    def closed(self) -> bool:
        """Nothing is wrong."""
        return self.until == 0.0

    def failed(self, now: float, *, gone: bool = False) -> bool:
        """One more failure; True when the breaker opens by it. `gone`: the connect was refused, nothing ran."""
        self.failures += 1
        self.share += (1.0 - self.share) / OUTLIER_OVER
        if not self.closed:
            if now < self.until:  # what was under way when it opened says nothing new
                self.gone = self.gone or gone
                return False
        elif not gone and self.failures < self.most and self.share < OUTLIER_SHARE:
            return False
        self.open(now, gone=gone)
        return True

    def open(self, now: float, *, gone: bool = False) -> None:
        """Put out for 5, 10, 20 ... 60 s."""
        if now - self.opened_at > FORGIVEN_S:
            self.openings = 0
        self.until = now + min(OPEN_MOST_S, OPEN_FIRST_S * 2.0 ** min(self.openings, DOUBLED_MOST))
        self.openings += 1
        self.opened_at = now
        self.gone = gone

    def answers(self, sent_at: float) -> bool:
        """An answer begins to what was sent then; True when the breaker closes by it. Failures are not forgotten before one is
        whole. Answers to what was sent before it opened do not close it: a worker that dies finishes some."""
        if self.until == 0.0 or sent_at < self.opened_at:
            return False
        self.until, self.gone, self.share = 0.0, False, 0.0
        return True

    def succeeded(self) -> None:
        """An answer is whole."""
        self.failures = 0
        if self.share:
            self.share -= self.share / OUTLIER_OVER

    def allows(self, now: float, inflight: int) -> bool:
        """May be asked: closed, or on trial with nothing under way."""
        return self.until == 0.0 or (self.until <= now and inflight == 0)
