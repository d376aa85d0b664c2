"""Operator processes that start at once: `python -m e2e.faultproxy.nursery` imports the operator and forks one per order.

Each child runs `fleet_operator.__main__.main` as a process of its own, with its own log. Orders are JSON lines on stdin, one
answer per line: {"start": argv, "log": path} gives {"pid"}, {"wait": pid, "block": bool} gives {"code"} (null: still running).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Nursery:
    """The test's side: a context manager."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        argv = [sys.executable, "-m", "e2e.faultproxy.nursery"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._lock = threading.Lock()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(20)
        self._process.stdout.close()  # type: ignore[union-attr]

    def start(self, argv: list[str], log: Path) -> OperatorProcess:
        """A running operator."""
        return OperatorProcess(self, self._ask({"start": argv, "log": str(log)})["pid"], log)

    def wait(self, pid: int, *, block: bool) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        code: int | None = self._ask({"wait": pid, "block": block})["code"]
        return code

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer


class OperatorProcess:
    """One life of the operator."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self._nursery = nursery
        self.pid = pid
        self.log = log
        self._code: int | None = None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Safe to call twice and from any thread."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._code = self._nursery.wait(self.pid, block=True)

    def stop(self) -> int | None:
        """SIGTERM and its exit code."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
            self._code = self._nursery.wait(self.pid, block=True)
        return self._code

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        if self._code is None:
            self._code = self._nursery.wait(self.pid, block=False)
        return self._code

    def check(self) -> None:
        """RuntimeError when it has ended by itself."""
        if self.poll() is not None:
            raise RuntimeError(f"the operator ended with {self._code}:\n{self.tail()}")

    def tail(self, size: int = 3_000) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-size:].decode(errors="replace")


def _serve() -> None:
    import aiohttp  # noqa: F401
    import kopf  # noqa: F401

    import fleet_operator.__main__
    import fleet_operator.cluster.kube
    import fleet_operator.process
    import fleet_operator.reconciler
    import fleet_operator.shell_kopf
    import fleet_operator.telemetry.collect  # noqa: F401

    codes: dict[int, int | None] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            pid = os.fork() or _child(order["start"], order["log"])
            codes[pid] = None
            answer = {"pid": pid}
        else:
            pid = order["wait"]
            if codes[pid] is None:  # two threads of the test may ask for the same end
                done, status = os.waitpid(pid, 0 if order["block"] else os.WNOHANG)
                codes[pid] = os.waitstatus_to_exitcode(status) if done else None
            answer = {"code": codes[pid]}
        print(json.dumps(answer), flush=True)
    for pid in [pid for pid, code in codes.items() if code is None]:
        os.kill(pid, signal.SIGKILL)


def _child(argv: list[str], log: str) -> int:
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from fleet_operator.__main__ import main
        from fleet_operator.runtime.process import die_with

        die_with(os.getppid())()
        sys.argv = ["fleet-operator", *argv]
        code = main()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
