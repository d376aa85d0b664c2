"""One container's process: its own session, killed with its runtime, output pumped into a bounded log."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from fleet_operator.runtime.leftovers import adopt_orphans, kill_marked, kill_orphans, record
from fleet_operator.runtime.logs import ContainerLog, Tail

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_CHUNK: Final = 64 * 1024
ORPHANS_S: Final = 0.5


class ContainerProcess:
    """A started process; `wait` for its end, `close` when done with it."""

    def __init__(
        self, popen: subprocess.Popen[bytes], log: ContainerLog, message_bytes: int, mark: str, pids: Path, *, alone: bool
    ) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._log = log
        self._mark = mark
        self._others = pids if alone else None
        self._record = record(pids, popen.pid)
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._errors, self._output = Tail(message_bytes), Tail(message_bytes)
        self._pipes: dict[int, Tail] = {}
        for pipe, tail in ((popen.stdout, self._output), (popen.stderr, self._errors)):
            if pipe is not None:
                self._follow(pipe.fileno(), tail)
        self._loop.add_reader(self._pidfd, self._reap)

    async def wait(self) -> int:
        """The return code, negative for a signal; may be awaited by several."""
        return await asyncio.shield(self._exited)

    @property
    def running(self) -> bool:
        """Whether it has not been reaped yet."""
        return not self._exited.done()

    def terminate(self) -> None:
        """SIGTERM to the process that a container runtime would call PID 1."""
        if self.running:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to everything of the container, while it still hangs together: orphans cannot be told apart."""
        if self.running:
            kill_marked(self._mark, self.pid)

    def last_words(self) -> str:
        """The last lines of stderr, else of stdout: the termination message."""
        return self._errors.text() or self._output.text()

    def close(self) -> None:
        """Kill what is left of the group and its descendants, close pipes and log."""
        self.kill()
        if self.running:
            self._popen.wait()
            self._reap()
        for pipe in list(self._pipes):
            self._read(pipe)
            self._unfollow(pipe)
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()
        self._log.close()

    def _follow(self, pipe: int, tail: Tail) -> None:
        os.set_blocking(pipe, False)
        self._pipes[pipe] = tail
        self._loop.add_reader(pipe, self._read, pipe)

    def _unfollow(self, pipe: int) -> None:
        if self._pipes.pop(pipe, None) is not None:
            self._loop.remove_reader(pipe)

    def _read(self, pipe: int) -> None:
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._unfollow(pipe)
            return
        self._pipes[pipe].write(data)
        self._log.write(data)

    def _reap(self) -> None:
        if self._exited.done():
            return
        returncode = self._popen.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # As the end of PID 1 ends its namespace: nothing of the container outlives its first process.
        kill_marked(self._mark, self.pid)
        # what the dead one's children had for children comes to us when those have died too
        self._loop.call_later(ORPHANS_S, kill_orphans, self._others)
        self._record.unlink(missing_ok=True)
        for pipe in list(self._pipes):
            self._read(pipe)
        self._exited.set_result(returncode)


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    log: ContainerLog,
    *,
    message_bytes: int,
    mark: str,
    pids: Path,
    alone: bool = False,
) -> ContainerProcess:
    """Start `argv`; OSError when it cannot be executed. Must run on the event loop's thread: the child dies with it. `alone`:
    see RuntimeSettings."""
    adopt_orphans()
    popen = subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - one prctl call, prepared before the fork
    )
    try:
        return ContainerProcess(popen, log, message_bytes, mark, pids, alone=alone)
    except BaseException:  # its record cannot be written, no descriptor is left: nobody would look after it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
        kill_marked(mark, popen.pid)
        for stream in (popen.stdout, popen.stderr):
            if stream is not None:
                stream.close()
        raise


def die_with(parent: int) -> Callable[[], None]:
    """A `preexec_fn`: the child gets SIGKILL when the thread that started it ends."""

    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(137)

    return ask
