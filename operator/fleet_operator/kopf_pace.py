"""How often kopf may ask. It pauses after a request that failed, not where it takes all for well: a watch that ended is opened
anew at once, and after a 401 it logs in at once (it knows refused credentials when they come a second time, but each of our
sessions is another one). An API server, or a proxy before it, that goes on like that would be asked a thousand times a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import aiohttp

from fleet_operator.kopf_settings import RECONNECT_S, Patience

CALM_S = 60.0
"""A login that was good for so long is followed by the next one at once: a token that was renewed."""


class Pace:
    """Of one life of kopf, whatever sessions it has in it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._watched_at: dict[str, float] = {}
        """When the last watch of each path began."""
        self._login_at = float("-inf")
        self._pauses: Iterator[float] = iter(Patience())

    async def login(self) -> None:
        """Wait until the next login may be; longer each time when they are refused one after the other."""
        if self._clock() - self._login_at > CALM_S:
            self._pauses = iter(Patience())
        else:
            await self._sleep(next(self._pauses))
        self._login_at = self._clock()

    def trace(self) -> aiohttp.TraceConfig:
        """For kopf's session: it waits before a watch that begins too soon after the last one of its path."""
        config = aiohttp.TraceConfig()

        async def begins(_: aiohttp.ClientSession, __: object, params: aiohttp.TraceRequestStartParams) -> None:
            if "watch" in params.url.query:
                await self._watch(params.url.path)

        config.on_request_start.append(begins)
        return config

    async def _watch(self, path: str) -> None:
        wait_s = self._watched_at.get(path, float("-inf")) + RECONNECT_S - self._clock()
        if wait_s > 0:
            await self._sleep(wait_s)
        self._watched_at[path] = self._clock()
