"""Workers that lose races (`hedging.py`): slower ones, and those that swallow what they are sent. Pure.

A leg that is overtaken is cut, so that its worker never is silent for as long as `silence` asks. To lose a race is no failure: a
slower worker loses them all, and each is as likely to lose the next one as any other. So nobody is put out for that. But of a
worker that has lost some in a row and said nothing to anybody meanwhile, one leg runs on: who is slow answers it, and who
swallows requests is silent, as before.
"""

from __future__ import annotations

from typing import Final

LOST_MOST: Final = 3
"""In a row: the last of them runs on. It costs its prompt's computing once more, which is too much for every race."""


class Races:
    """Of one worker."""

    __slots__ = ("lost", "since")

    def __init__(self) -> None:
        self.lost, self.since = 0, 0.0
        """How many in a row, without a word to anybody since then."""

    def lost_one(self, sent_at: float, now: float, patience_s: float, heard_at: float, *, on_trial: bool = False) -> bool:
        """A leg that was sent then is overtaken now; it was to take `patience_s` at most. `heard_at`: when an answer of the
        worker began last; `on_trial`: it was put out before. True: the leg is to run on."""
        if heard_at >= sent_at:
            self.lost = 0
        elif now - sent_at >= patience_s:
            if self.lost and heard_at >= self.since:
                self.lost = 0
            if not self.lost:
                self.since = sent_at
            self.lost += 1
            return self.lost >= (1 if on_trial else LOST_MOST)
        return False


def swallows(sent_at: float, due_at: float, heard_at: float, now: float, silent_s: float) -> bool:
    """The worker of a leg that runs on has said nothing to anybody since that was sent, and was to have answered so long ago."""
    return heard_at <= sent_at and now - max(sent_at, due_at) > silent_s
