"""The engine of a worker, one process after another: which it is, for which role it was started, and how long that took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from fleet_worker.agent.command import Place, engine_command
from fleet_worker.agent.errors import ConfigError
from fleet_worker.agent.supervise import EngineProcess, how_ended, watch_children
from fleet_worker.config import Role, WorkerConfig

STOP_S = 10.0
CHECK_EVERY_S = 0.25


class Running:
    """At most one at a time."""

    def __init__(self, role: Role) -> None:
        self.process: EngineProcess | None = None
        self.role: Role | None = role
        """For which it is, or will be, started; None: it was stopped for another one, or ended before it served in that."""
        self.start_s: float | None = None
        """From its last start to its first token."""
        self._place: Place | None = None
        self._began = 0.0
        self._dropped = 0

    def begin(self, config: WorkerConfig, place: Place) -> int:
        """Start it; its pid. ConfigError."""
        engine = EngineProcess(engine_command(config, place))
        watch_children(asyncio.get_running_loop(), engine.reap)
        try:
            pid = engine.start()
        except OSError as error:
            raise ConfigError(f"engine {config.engine} cannot be started: {error}") from error
        self.process, self.role, self._place, self._began = engine, config.role, place, time.monotonic()
        return pid

    async def begin_anew(self, config: WorkerConfig) -> int:
        """End it, and start it where it was, as this configuration says; its pid. ConfigError."""
        if self.process is None or self._place is None:
            raise ConfigError(f"engine {config.engine} was never started")
        self.role = None
        await self.process.stop(STOP_S)
        self._dropped += self.process.log_dropped
        return self.begin(config, self._place)

    async def answers(self, healthy: Callable[[], Awaitable[bool]], wanted: Callable[[], bool], within_s: float) -> str:
        """Wait until it does: empty. Else why not, in words: it ended, took too long, or nobody wants it any more."""
        end = time.monotonic() + within_s
        while not self.ended and wanted() and time.monotonic() < end:
            if await healthy():
                return ""
            await asyncio.sleep(CHECK_EVERY_S)
        if self.process is None or not self.ended:
            return "its engine does not answer"
        self.role = None
        return f"its engine ended ({how_ended(self.process.exited.result())}): {self.process.last_words()}".rstrip(": ")

    def served(self) -> None:
        """A first token came."""
        if self._began:
            self.start_s, self._began = time.monotonic() - self._began, 0.0

    @property
    def ended(self) -> bool:
        """Its process is over."""
        return self.process is not None and self.process.exited.done()

    async def over(self) -> None:
        """Wait until its process, or the one that follows it, is over; returns soon, and may be asked again."""
        if self.process is None or self.ended:
            await asyncio.sleep(CHECK_EVERY_S)
        else:
            await asyncio.wait({self.process.exited})

    async def stop(self) -> None:
        """For good."""
        if self.process is not None:
            await self.process.stop(STOP_S)

    @property
    def log_dropped(self) -> int | None:
        """Lines that could not be written, of all of them; None before the first."""
        return self._dropped + self.process.log_dropped if self.process is not None else None
