"""Hear at once of requests that routers of a fleet at zero hold.

A router answers GET /held?wait_s=N when it holds something, at the latest after N seconds: one question per router in N seconds
costs nothing, and a fleet begins to wake within milliseconds, wherever its telemetry comes from. The answer is a count, not an
event: an answer that was lost is given again to the next question.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from fleet_operator.telemetry.cookies import no_cookies
from fleet_planner.types import Demand

WAIT_S = 10.0
"""A router that starts meanwhile is asked at the latest after this long."""
SLACK_S = 2.0
CONNECT_S = 2.0
MAX_BYTES = 64
CONNECTIONS = 4_096
"""Routers of sleeping fleets that are asked at the same time."""


class HeldRequests:
    """Asks routers."""

    def __init__(self, now: Callable[[], float] = time.time, wait_s: float = WAIT_S) -> None:
        self._now = now
        self._wait_s = wait_s
        timeout, limits = httpx.Timeout(wait_s + SLACK_S, connect=CONNECT_S), httpx.Limits(max_connections=CONNECTIONS)
        self._http = httpx.AsyncClient(timeout=timeout, trust_env=False, limits=limits, cookies=no_cookies())

    async def listen(self, routers: Sequence[str]) -> Demand | None:
        """As soon as one of the routers holds requests, at the latest after the wait; None when none of them answered."""
        asked = [asyncio.create_task(self._ask(url)) for url in routers]
        answered = False
        try:
            for finished in asyncio.as_completed(asked):
                held = await finished
                answered = answered or held is not None
                if held:
                    return Demand(held, None, self._now())
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return Demand(0, None, self._now()) if answered else None

    async def _ask(self, url: str) -> int | None:
        """What one router holds; None when it does not say."""
        try:
            async with (
                asyncio.timeout(self._wait_s + SLACK_S),
                self._http.stream("GET", f"{url}/held", params={"wait_s": f"{self._wait_s:g}"}) as answer,
            ):
                body = bytearray()
                async for chunk in answer.aiter_raw():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        return None
        except (httpx.HTTPError, httpx.InvalidURL, OSError):
            return None
        text = bytes(body).strip()
        return int(text) if answer.status_code == httpx.codes.OK and text.isdigit() else None

    async def close(self) -> None:
        """Release connections."""
        await self._http.aclose()
