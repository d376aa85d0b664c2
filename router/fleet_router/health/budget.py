"""How many retries a router may make: a share of its requests, so that an outage is not answered with twice the load; and a share
of its prompts' length, because a prompt of 100,000 tokens that is sent again is not one retry among many.

Finagle's budget: every request brings a fifth of a retry, and a few are free, or a router with little traffic could make none.
Lengths are counted in bytes, about four a token: they are known before anybody counts tokens.
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
LONG_BYTES: Final = 400_000.0
"""Of a prompt of 100,000 tokens: the first, free and saved ones are enough for so many of these."""


@dataclass
class RetryBudget:
    """Of one router process."""

    saved: float = FIRST
    saved_bytes: float = FIRST * LONG_BYTES
    """Of prompts. One that is longer than what is free is sent again all the same, and paid back before the next one."""
    _at: float = 0.0
    refused: int = 0
    """Retries that it did not allow."""

    def asked(self, prompt_bytes: int = 0) -> None:
        """One more request."""
        if self.saved < SAVED_MOST:
            self.saved += SHARE
        if self.saved_bytes < SAVED_MOST * LONG_BYTES:
            self.saved_bytes += SHARE * prompt_bytes

    def take(self, now: float, prompt_bytes: int = 0) -> bool:
        """A retry of such a prompt, if there is one left."""
        back = max(0.0, now - self._at) * FREE / FREE_AGAIN_S
        if self.saved < FREE:
            self.saved = min(FREE, self.saved + back)
        if self.saved_bytes < FREE * LONG_BYTES:
            self.saved_bytes = min(FREE * LONG_BYTES, self.saved_bytes + back * LONG_BYTES)
        self._at = now
        if self.saved < 1.0 or self.saved_bytes < min(float(prompt_bytes), FREE * LONG_BYTES):
            self.refused += 1
            return False
        self.saved -= 1.0
        self.saved_bytes -= prompt_bytes
        return True
