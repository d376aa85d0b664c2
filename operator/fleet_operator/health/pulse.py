"""Where vitals come from: the work loop's turns, the bytes of each watch, and a question to the API server when one is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import aiohttp

from fleet_operator.cluster.interface import ClusterError
from fleet_operator.health.vitals import Bounds, Vitals, ailments, silent

PASS: Final = ContextVar("PASS", default=0)
"""Number of the pass that this task is in: each worker of the loop has one at a time."""
CHECK_S: Final = 5.0
ASK_S: Final = 10.0


@dataclass(slots=True)
class _Stream:
    """The newest connection of one watch."""

    kind: str
    content: Any
    heard_at: float
    read_bytes: int

    @property
    def is_open(self) -> bool:
        """Neither side has ended it."""
        return self.content.exception() is None and not self.content.is_eof()


class Pulse:
    """Collects vitals; one per process."""

    def __init__(self, bounds: Bounds | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds or Bounds()
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        """By path: of several namespaces each has its own."""
        self._answered_at: float | None = None
        self._loop_at: float | None = None
        self._passes: dict[int, float] = {}
        self._numbers = count(1)
        self._working = False

    # -- the work loop ----------------------------------------------------------------------------------------------
    def turned(self) -> None:
        """The work loop turned."""
        self._working, self._loop_at = True, self._clock()

    def began(self) -> int:
        """A pass over one fleet begins, perhaps beside others; give what this returns to `ended`."""
        number = next(self._numbers)
        PASS.set(number)
        self._working, self._passes[number] = True, self._clock()
        return number

    def answered(self) -> None:
        """A write was answered. The pass that it is of goes on: one of hundreds of writes takes long when each does, and a
        restart would not make it shorter."""
        if PASS.get() in self._passes:
            self._passes[PASS.get()] = self._clock()

    def ended(self, number: int) -> None:
        """That pass is over."""
        self._passes.pop(number, None)

    # -- watches ----------------------------------------------------------------------------------------------------
    def opened(self, path: str, content: Any) -> None:
        """A watch was connected; `content` counts its bytes in `total_bytes`."""
        self._streams[path] = _Stream(path.rpartition("/")[2], content, self._clock(), content.total_bytes)

    def trace(self) -> aiohttp.TraceConfig:
        """Tells `opened` of every watch of an aiohttp session."""
        config = aiohttp.TraceConfig()

        async def ended(_: Any, __: Any, params: aiohttp.TraceRequestEndParams) -> None:
            if params.url.query.get("watch") in ("true", "1") and params.response.status == 200:
                self.opened(params.url.path, params.response.content)

        config.on_request_end.append(ended)
        return config

    def _heard(self) -> dict[str, float]:
        """By kind: when that watch of it which has been silent for longest last carried anything. One that has ended counts where
        no other of its kind is open: else its namespace is gone, or it is opened anew in a moment."""
        for stream in self._streams.values():
            if stream.content.total_bytes != stream.read_bytes:
                stream.read_bytes, stream.heard_at = stream.content.total_bytes, self._clock()
        alive = {stream.kind for stream in self._streams.values() if stream.is_open}
        self._streams = {path: one for path, one in self._streams.items() if one.is_open or one.kind not in alive}
        found: dict[str, float] = {}
        for stream in self._streams.values():
            pick = min if stream.kind in alive else max
            found[stream.kind] = pick(stream.heard_at, found.get(stream.kind, stream.heard_at))
        return found

    def watch_ages(self) -> dict[str, float]:
        """Seconds since each watch last carried anything."""
        return {kind: self._clock() - at for kind, at in sorted(self._heard().items())}

    # -- together ---------------------------------------------------------------------------------------------------
    def vitals(self) -> Vitals:
        """All that is known now."""
        oldest = min(self._passes.values(), default=None)
        return Vitals(self._working, self._loop_at, oldest, self._heard(), self._answered_at)

    def ailments(self) -> tuple[str, ...]:
        """What is wrong now; empty: nothing."""
        return ailments(self.vitals(), self._clock(), self._bounds)

    async def follow(self, ask: Callable[[], Awaitable[object]]) -> None:
        """For ever: note bytes of watches often enough to date them, and `ask` the API server when one is silent."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.check(ask)

    async def check(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Once."""
        if not silent(self.vitals(), self._clock(), self._bounds):
            return
        try:
            async with asyncio.timeout(ASK_S):
                await ask()
        except (ClusterError, TimeoutError):
            return
        self._answered_at = self._clock()
