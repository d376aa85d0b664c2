"""Hedged prefills: when a prefill worker has not answered in a multiple of what it was expected to need, another one is asked,
too, and whoever answers first is taken. Pure.

A prefill leg has no effect but KV that can be given back, so that it may run twice. What it costs is another prompt's time:
hedges are a share of the prompts and of their tokens, and where all workers are slow they end with that share. The Tail at Scale
(Dean, Barroso 2013) defers the second request likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fleet_router.policy.candidate import Candidate
from fleet_router.policy.cost import missing_of
from fleet_router.policy.ring import cap_of
from fleet_router.policy.terms import Weighed

SAVED_MOST: Final = 10.0
"""A worker that stalls has many prompts at once."""
SAVED_TOKENS_MOST: Final = 1_048_576.0
"""The longest prompt that a fleet may take."""


class HedgeBudget:
    """Of one router process. It begins with nothing: what is spent is never more than its share of what was asked."""

    __slots__ = ("refused", "saved", "saved_tokens")

    def __init__(self) -> None:
        self.saved = self.saved_tokens = 0.0
        self.refused = 0
        """Hedges that it did not allow."""

    def asked(self, share: float, tokens: float) -> None:
        """A prefill worker was asked to compute so many tokens."""
        self.saved = min(SAVED_MOST, self.saved + share)
        self.saved_tokens = min(SAVED_TOKENS_MOST, self.saved_tokens + share * tokens)

    def take(self, tokens: float) -> bool:
        """So many are to be computed once more, if they are there."""
        if self.saved < 1.0 or self.saved_tokens < tokens:
            self.refused += 1
            return False
        self.saved -= 1.0
        self.saved_tokens -= tokens
        return True

    def give_back(self, tokens: float) -> None:
        """What was taken for so many is not computed: nothing was sent to the worker, or it never had it."""
        self.asked(1.0, tokens)


def wait_s(expected_s: float, after: float, least_s: float) -> float:
    """How long a prefill that is expected to take so long is waited for alone."""
    found = after * expected_s
    return found if found > least_s else least_s


def second(
    weighed: Weighed, first: Candidate, now: float, bound: float, usable: Callable[[Candidate], bool]
) -> tuple[Candidate, float] | None:
    """(worker, tokens that it lacks): whoever would have the prompt first of those that were compared for it, but for the first
    one. None: nobody else is usable and below the bound of load."""
    side = first.home
    if side is None:
        return None
    cap, found, least_s = cap_of(side.inflight, len(side.members), bound), None, 0.0
    for i, worker in enumerate(weighed.workers):
        if worker is first or worker.home is not side or worker.inflight >= cap * worker.share or not usable(worker):
            continue
        lacks = missing_of(weighed, i)
        queue_s = worker.free_at - now
        done_s = (queue_s if queue_s > 0.0 else 0.0) + worker.base_s + worker.token_s * lacks
        if found is None or done_s < least_s:
            found, least_s = (worker, lacks), done_s
    return found
