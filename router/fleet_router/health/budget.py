"""How many retries a router may make: a share of its requests, so that an outage is not answered with twice the load.

Finagle's budget: every request brings a fifth of a retry, and a few are free, or a router with little traffic could make none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE: Final = 0.2
FIRST: Final = 10.0
"""There from the beginning: enough to find a worker that fails."""
FREE: Final = 3.0
"""So many come back whatever the traffic."""
FREE_AGAIN_S: Final = 10.0
"""In so long all of them."""
SAVED_MOST: Final = 50.0
"""A worker that dies takes many requests with it at once."""


@dataclass
class RetryBudget:
    """Of one router process."""

    saved: float = FIRST
    _at: float = 0.0
    refused: int = 0
    """Retries that it did not allow."""

    def asked(self) -> None:
        """One more request."""
        if self.saved < SAVED_MOST:
            self.saved += SHARE

    def take(self, now: float) -> bool:
        """A retry, if there is one left."""
        if self.saved < FREE:
            self.saved = min(FREE, self.saved + max(0.0, now - self._at) * FREE / FREE_AGAIN_S)
        self._at = now
        if self.saved < 1.0:
            self.refused += 1
            return False
        self.saved -= 1.0
        return True
