"""The engine process: started so that neither it nor a child of it can outlive the agent, watched, stopped within a bound.

The agent is PID 1 of its container, so it also reaps every orphan; it peeks at dead children first (WNOWAIT), so that the
engine's own exit status is never taken by the reaper. Where it is not PID 1, `guard.py` does what the kernel does there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fleet_worker.agent import guard
from fleet_worker.agent.command import EngineCommand
from fleet_worker.agent.errors import ConfigError
from fleet_worker.agent.lastwords import Fatal, pick_cause
from fleet_worker.agent.logpump import STDERR, STDOUT, LogPump
from fleet_worker.segments import Segments, make
from fleet_worker.transfer.ucxlog import UcxReport

VLLM_BIN_ENV = "FLEET_VLLM_BIN"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TAIL_LINES = 40
LEFTOVERS_S = 5.0
"""Seconds that the engine's children have after it to end by themselves."""
WORDS_S = 0.5
"""Seconds in which a dead engine's last words are read, as a rule; a child of it may keep its stderr open."""
LOG_S = 1.0
"""Seconds in which the engine's last lines are written, as a rule."""
KILLED_S = 5.0
"""Seconds in which killed processes are gone, as a rule."""
GROUP_POLL_S = 0.05
NOTE_LEAST_S, NOTE_MOST_S = 1.0, 16.0
"""How often it is looked what the engine shares: often while it starts."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> Callable[[], None]:
    """Runs in the child before exec: the kernel kills it when the agent dies, whatever killed the agent."""

    def ask() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the agent died between fork and prctl
            os._exit(128 + signal.SIGKILL)

    return ask


def start_guard(shared: Segments) -> subprocess.Popen[bytes] | None:
    """It wants the engine's session on its stdin, and when that began; None where the kernel ends everything with us. No mark of
    a container is on it: a container runtime may end the agent, and leave the guard to its work. It has the lock of what is
    `shared` as we do: until it has ended as well, nobody sweeps there."""
    if os.getpid() == 1:
        return None
    folders, locks = ([], ()) if shared.folder is None else ([str(shared.folder)], (shared.lock,))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, *folders], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={},
        start_new_session=True, pass_fds=locks,
    )  # fmt: skip


def end_guard(guarding: subprocess.Popen[bytes] | None) -> None:
    """There is nothing to guard any more."""
    if guarding is not None:
        guarding.kill()
        if guarding.stdin is not None:
            guarding.stdin.close()
        guarding.wait()


class EngineProcess:
    """One engine child: `exited` is set with its return code."""

    def __init__(self, command: EngineCommand, log_fd: int = STDERR, out_fd: int = STDOUT) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._since = ""
        """When it was started, as the kernel says it."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._noting: asyncio.Task[None] | None = None
        self._shared = Segments()
        """What it shares with other engines."""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ucx = UcxReport()
        """By which transport the engine reads, in UCX's own words."""
        self.log = LogPump(self._heard, log_fd)
        self._fatal = Fatal()
        self.out = LogPump(self._told, out_fd)
        """vLLM logs to its stdout."""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def start(self) -> int:
        """Start it in a session of its own; returns its pid. OSError when it cannot be executed."""
        self._shared = make()
        env = {**self._command.defaults, **self._shared.environment, **os.environ, **self._command.env}
        try:
            self._guard = start_guard(self._shared)
            process = subprocess.Popen(
                self._command.argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - prctl is async-signal-safe
            )  # fmt: skip
        except BaseException:
            self._leave_nothing()
            raise
        self._process, self._since = process, guard.started_at(process.pid)
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody killed it already
                self._guard.stdin.write(f"{process.pid} {self._since}\n".encode())
                self._guard.stdin.flush()
        if process.stderr is not None and process.stdout is not None:
            self.log.follow(process.stderr)
            self.out.follow(process.stdout)
        self._noting = asyncio.get_running_loop().create_task(self._note(process.pid))
        return process.pid

    async def _note(self, session: int) -> None:
        """What it shares is noted while it is there: who is killed with it can tell nobody."""
        pause_s = NOTE_LEAST_S
        while not self.exited.done():
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(self._shared.note, session)
            pause_s = min(NOTE_MOST_S, 2 * pause_s)

    @property
    def log_dropped(self) -> int:
        """Lines of the engine that could not be written."""
        return self.log.dropped + self.out.dropped

    def _heard(self, line: str) -> bool:
        """All but UCX's tables is for our stderr; the last lines are kept for the cause of death."""
        if self.ucx.feed(line):
            return False
        self._tail.append(line.rstrip())
        return True

    def _told(self, line: str) -> bool:
        """All of its stdout is for ours."""
        self._fatal.feed(line)
        return True

    def reap(self) -> None:
        """Collect every dead child; resolves `exited` when the engine is among them. Call on SIGCHLD."""
        while (dead := _dead_child()) is not None:
            if self._process is not None and dead == self._process.pid:
                self._process.wait()
            else:
                with contextlib.suppress(ChildProcessError):  # whoever started it was quicker
                    os.waitpid(dead, 0)
        # not only when it was among them: Popen looks, too, before it sends a signal
        if self._process is not None and self._process.returncode is not None and not self.exited.done():
            self.exited.set_result(self._process.returncode)

    async def stop(self, grace_s: float) -> None:
        """Its own signal to the engine, which ends its own children in its order; SIGKILL to whatever of it is left at the end.

        Its last child may be Python's resource tracker, which removes the shared memory that the others left.
        """
        process = self._process
        if self._noting is not None:
            self._noting.cancel()
            await asyncio.wait({self._noting})
        if process is not None:
            if not self.exited.done():
                process.send_signal(self._command.stop_signal)
                self.reap()
                await asyncio.wait({self.exited}, timeout=grace_s)
            if self.exited.done():
                await self._group_gone(LEFTOVERS_S)
            guard.kill_session(process.pid, self._since)
            await self.exited
            await self._group_gone(KILLED_S)
            await asyncio.gather(*(asyncio.to_thread(pump.finish, LOG_S) for pump in (self.out, self.log)))
        self._leave_nothing()
        # a loop that is closed with a handler in place cannot take the signal of a late child
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def _leave_nothing(self) -> None:
        """There is no engine any more."""
        end_guard(self._guard)
        self._shared.close()
        self._shared = Segments()

    async def _group_gone(self, within_s: float) -> None:
        """Until no process of the engine's group is left, or the time is up."""
        end = time.monotonic() + within_s
        while self._process is not None and time.monotonic() < end:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return
            await asyncio.sleep(GROUP_POLL_S)

    def last_words(self) -> str:
        """What vLLM says to be fatal, else the most telling of the last stderr lines. Its end is known before the threads that
        read them have come to theirs."""
        if self.exited.done():
            self.log.hear_out(WORDS_S)
            self.out.hear_out(WORDS_S)
        return self._fatal.words or pick_cause(list(self._tail))


def _dead_child() -> int | None:
    """A child that ended and that nobody has waited for; it stays so."""
    try:
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if dead is None else dead.si_pid


def find_vllm() -> str:
    """FLEET_VLLM_BIN, else `vllm` on PATH; ConfigError otherwise."""
    found = os.environ.get(VLLM_BIN_ENV) or shutil.which("vllm")
    if not found or not Path(found).exists():
        raise ConfigError(f"engine vllm: no executable at {VLLM_BIN_ENV} and no vllm on PATH")
    return found


def how_ended(code: int) -> str:
    """A process's return code in words. Real-time signals have no names."""
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"


def watch_children(loop: asyncio.AbstractEventLoop, reap: Callable[[], None]) -> None:
    """Reap on every SIGCHLD. Orphans become our children although we may not be PID 1 (`fleet up`)."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    loop.add_signal_handler(signal.SIGCHLD, reap)
