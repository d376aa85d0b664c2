"""Which workers of a role may be asked: the fit ones, and when these are less than half also those that failed (panic).

Half of a role can be broken by what it is asked, by a network or by a wrong configuration; sending everything to the rest would
break that, too. Who does not listen at all is asked only when nobody else is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from fleet_router.health.breaker import Breaker

PANIC_BELOW: Final = 0.5


class Watched(Protocol):
    """A worker with a breaker."""

    breaker: Breaker

    @property
    def own(self) -> int:
        """Requests of ours that run there."""
        ...


W = TypeVar("W", bound=Watched)


def fit(workers: Sequence[W], now: float) -> list[W]:
    """Those that may be asked without a panic."""
    return [worker for worker in workers if worker.breaker.allows(now, worker.own)]


def askable(workers: Sequence[W], now: float) -> list[W]:
    """Those to choose from; empty only when there are none."""
    found = fit(workers, now)
    if len(found) >= PANIC_BELOW * len(workers):
        return found
    return [worker for worker in workers if not worker.breaker.gone or worker in found] or list(workers)
