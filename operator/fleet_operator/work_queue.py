"""Which fleet to look at next: each once however many events came, first come first served, never twice at the same time.

After a pass a fleet rests for a while that follows from how long the pass took, so that a storm of events about one fleet becomes
few passes, one quiet fleet is looked at at once, and a slow API server makes the operator ask less, not more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Key = tuple[str, str]
"""(namespace, name) of a fleet."""
REST_LEAST_S = 0.05
REST_MOST_S = 1.0
REST_SHARE = 2.0
"""A pass that took t seconds is followed by this many times t of rest."""


class WorkQueue:
    """Keys to work on; all calls from one event loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ready: dict[Key, float] = {}
        """Since when each waits."""
        self._resting: dict[Key, asyncio.TimerHandle] = {}
        self._rested_at: dict[Key, float] = {}
        self._busy: dict[Key, bool] = {}
        """Keys being worked on; True: something changed meanwhile."""
        self._wake = asyncio.Event()

    def add(self, key: Key) -> None:
        """Look at `key`: now, when its rest is over, or once more when the present pass is."""
        if key in self._busy:
            self._busy[key] = True
        elif key not in self._ready and key not in self._resting:
            wait_s = self._rested_at.get(key, 0.0) - self._now()
            if wait_s <= 0:
                self._due(key)
            else:
                self._resting[key] = asyncio.get_running_loop().call_later(wait_s, self._due, key)

    def _due(self, key: Key) -> None:
        self._resting.pop(key, None)
        self._ready[key] = self._now()
        self._wake.set()

    async def take(self) -> Key:
        """The next key; `done` must follow."""
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        return self._start(next(iter(self._ready)))

    def take_any(self) -> Key | None:
        """The next key without waiting for its rest to end; None when no key is to be looked at."""
        for key in self._ready:
            return self._start(key)
        for key, timer in self._resting.items():
            timer.cancel()
            del self._resting[key]
            return self._start(key)
        return None

    def _start(self, key: Key) -> Key:
        self._ready.pop(key, None)
        self._busy[key] = False
        return key

    def done(self, key: Key, took_s: float) -> None:
        """The pass over `key` is over."""
        now = self._now()
        self._rested_at.pop(key, None)  # the longest ago first
        self._rested_at[key] = now + min(REST_MOST_S, max(REST_LEAST_S, took_s * REST_SHARE))
        while self._rested_at[oldest := next(iter(self._rested_at))] <= now:
            del self._rested_at[oldest]
        if self._busy.pop(key):
            self.add(key)

    def backlog(self) -> tuple[int, float]:
        """How many wait, and for how long the first of them has, seconds."""
        return len(self._ready), max(0.0, self._now() - min(self._ready.values())) if self._ready else 0.0

    def forget(self, key: Key) -> None:
        """The fleet is gone; a pass that is under way ends by itself."""
        self._rested_at.pop(key, None)
