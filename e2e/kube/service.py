"""One process of the harness: started in its own session, dies with us, stopped within a bound, output in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleet_operator.runtime.process import die_with

STOP_S = 20


class Service:
    """A running process; `stop` ends it and everything in its session's group."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else None,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - one prctl call
            )
        self.pid = self._process.pid

    def check(self) -> None:
        """RuntimeError with the last lines of its log when it has ended."""
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"{self.name} ended with {code}:\n{self.tail()}")

    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll()

    def tail(self, size: int = 4_000) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-size:].decode(errors="replace")

    def rss_mb(self) -> int:
        """Resident memory now, in MB."""
        return int(Path(f"/proc/{self.pid}/status").read_text().split("VmRSS:")[1].split()[0]) // 1024

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the group."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(STOP_S)


def free_ports(count: int) -> list[int]:
    """Loopback TCP ports that nobody listens on now; all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
