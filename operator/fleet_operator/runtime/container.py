"""The life of one container: start, probe, restart with back-off, stop within a grace period."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from fleet_operator.runtime.decisions import (
    ProbeRow,
    ProbeSpec,
    exit_of,
    quick_exits_after,
    restart_delay_s,
    should_restart,
)
from fleet_operator.runtime.probing import Target, act
from fleet_operator.runtime.process import ContainerProcess
from fleet_operator.runtime.settings import RuntimeSettings
from fleet_operator.runtime.status import ContainerView


class LaunchError(Exception):
    """The container cannot be started now; `reason` is the kubelet's waiting reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Launcher(Protocol):
    """Starts a container's process and knows how to reach it."""

    async def start(self, container: Mapping[str, Any]) -> ContainerProcess:
        """A new process; LaunchError."""
        ...

    def target(self, container: Mapping[str, Any]) -> Target:
        """Where its probes and hooks go."""
        ...


def timestamp(at_s: float) -> str:
    """RFC 3339 in whole seconds, as the API writes times."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Container:
    """Runs one container of a pod; `changed` is called whenever `view` may differ."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        launcher: Launcher,
        settings: RuntimeSettings,
        changed: Callable[[], None],
        *,
        restart_policy: str = "Always",
        restarts: int = 0,
        grace_s: float = 30.0,
    ) -> None:
        self._spec = spec
        self._launcher = launcher
        self._settings = settings
        self._changed = changed
        self._policy = restart_policy
        self._grace_s = grace_s
        self._restarts = restarts
        self._state: dict[str, Any] = {"waiting": {"reason": "ContainerCreating"}}
        self._last: dict[str, Any] = {}
        self._ready = self._started = self._ended = False
        self._stopping = False
        self._process: ContainerProcess | None = None
        self._why = ""

    @property
    def view(self) -> ContainerView:
        """What the status shows."""
        return ContainerView(
            name=self._spec["name"],
            image=self._spec.get("image", ""),
            state=self._state,
            last_state=self._last,
            restarts=self._restarts,
            ready=self._ready,
            started=self._started,
            container_id=f"process://{self._process.pid}" if self._process else "",
            ended=self._ended,
        )

    async def run(self) -> int:
        """Until it ends for good: its exit code. Cancelling kills the process group."""
        quick_exits = 0
        while True:
            begun = time.monotonic()
            code = await self._run_once()
            if self._stopping or not should_restart(self._policy, 1 if code is None else code):
                self._ended = True
                self._changed()
                return 1 if code is None else code
            quick_exits = quick_exits_after(quick_exits, time.monotonic() - begun, self._settings)
            delay_s = restart_delay_s(quick_exits, self._settings)
            if code is not None:
                self._last = self._state
                text = f"back-off {delay_s:g}s restarting failed container={self._spec['name']}"
                self._state = {"waiting": {"reason": "CrashLoopBackOff", "message": text}}
                self._restarts += 1
                self._changed()
            await asyncio.sleep(delay_s)

    async def stop(self, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL to the group when the grace period is over; returns when the process is gone."""
        self._stopping = True
        process = self._process
        if process is None or not process.running:
            return
        deadline = time.monotonic() + grace_s
        await self._pre_stop(process, grace_s)
        process.terminate()
        with contextlib.suppress(TimeoutError):
            # The kubelet too grants two seconds after a preStop hook that used the whole grace period.
            async with asyncio.timeout(max(min(2.0, grace_s), deadline - time.monotonic())):
                await process.wait()
        process.kill()
        async with asyncio.timeout(self._settings.kill_wait_s):
            await process.wait()

    def kill(self) -> None:
        """SIGKILL to the group now, also while a hook runs: the grace period was shortened."""
        if self._process is not None:
            self._process.kill()

    async def _run_once(self) -> int | None:
        """One run of the process; None when it could not be started."""
        try:
            process = await self._launcher.start(self._spec)
        except LaunchError as error:
            self._state = {"waiting": {"reason": error.reason, "message": str(error)}}
            self._changed()
            return None
        try:
            return await self._attend(process)
        finally:
            process.close()

    async def _attend(self, process: ContainerProcess) -> int:
        self._process, self._why = process, ""
        started = timestamp(time.time())
        self._state = {"running": {"startedAt": started}}
        self._started = "startupProbe" not in self._spec
        self._ready = self._started and "readinessProbe" not in self._spec
        self._changed()
        async with self._probing():
            returncode = await process.wait()
        self._ready = self._started = False
        self._state = {"terminated": self._terminated(process, returncode, started)}
        self._changed()
        return exit_of(returncode)[0]

    def _terminated(self, process: ContainerProcess, returncode: int, started: str) -> dict[str, Any]:
        code, number = exit_of(returncode)
        words = process.last_words() if code else ""
        ended = {
            "exitCode": code,
            "reason": "Error" if code else "Completed",
            "startedAt": started,
            "finishedAt": timestamp(time.time()),
            "containerID": f"process://{process.pid}",
        }
        message = "\n".join(text for text in (self._why, words) if text)
        return ended | ({"message": message} if message else {}) | ({"signal": number} if number else {})

    @contextlib.asynccontextmanager
    async def _probing(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._probe())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self) -> None:
        if "startupProbe" in self._spec:
            if not await self._startup():
                return
            self._started = True
            self._ready = "readinessProbe" not in self._spec
            self._changed()
        async with asyncio.TaskGroup() as group:
            if "readinessProbe" in self._spec:
                group.create_task(self._readiness())
            if "livenessProbe" in self._spec:
                group.create_task(self._liveness())

    async def _startup(self) -> bool:
        async for row, why in self._rows(self._spec["startupProbe"]):
            if row.verdict == "failure":
                await self._unhealthy(f"startup probe failed: {why}", row.spec.grace_s)
                return False
            if row.verdict == "success":
                return True
        return False

    async def _readiness(self) -> None:
        async for row, _ in self._rows(self._spec["readinessProbe"]):
            ready = row.verdict == "success"
            if ready != self._ready:
                self._ready = ready
                self._changed()

    async def _liveness(self) -> None:
        async for row, why in self._rows(self._spec["livenessProbe"]):
            if row.verdict == "failure" and not self._stopping:
                await self._unhealthy(f"liveness probe failed: {why}", row.spec.grace_s)
                return

    async def _rows(self, probe: Mapping[str, Any]) -> AsyncIterator[tuple[ProbeRow, str]]:
        row = ProbeRow(ProbeSpec.parse(probe))
        target = self._launcher.target(self._spec)
        await asyncio.sleep(row.spec.initial_delay_s)
        while True:
            succeeded, why = await act(_action(probe), target, row.spec.timeout_s)
            row = row.after(succeeded)
            yield row, why
            await asyncio.sleep(row.spec.period_s)

    async def _unhealthy(self, why: str, grace_s: float | None) -> None:
        """Stop the process; the run loop starts it again as the restart policy says. `grace_s`: the probe's own."""
        process = self._process
        if process is None:
            return
        self._why = why
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s if grace_s is None else grace_s):
                await process.wait()
        process.kill()

    async def _pre_stop(self, process: ContainerProcess, grace_s: float) -> None:
        """The hook, for as long as there is a process."""
        hook = (self._spec.get("lifecycle") or {}).get("preStop")
        if not hook:
            return
        done = act(_action(hook), self._launcher.target(self._spec), grace_s)
        asked: list[asyncio.Future[Any]] = [asyncio.ensure_future(done), asyncio.ensure_future(process.wait())]
        try:
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


def _action(probe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: probe[name] for name in ("httpGet", "tcpSocket", "exec", "sleep") if name in probe}
