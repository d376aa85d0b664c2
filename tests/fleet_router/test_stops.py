"""Signals to a router process."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet_router.stops import ending


@contextmanager
def router(tmp_path: Path, *more: str, terminal: bool) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that is in a session of its own, and its port. `terminal`: that is the session's."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    master, slave = pty.openpty()
    name = os.ttyname(slave)
    opened = f"import os; os.close(os.open({name!r}, os.O_RDWR))\n" if terminal else ""  # a session takes the first one
    heard = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # whoever runs these tests under nohup ignores it
    code = f"{heard}{opened}import sys\nfrom fleet_router.__main__ import main\nsys.exit(main())"
    argv = [sys.executable, "-c", code, "--follow", f"dir:{tmp_path}", "--host", "127.0.0.1", "--port", str(port), *more]
    env = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=env)
    try:
        end = time.monotonic() + 30
        while not answers(port):
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)
        yield running, port
    finally:
        running.kill()
        running.wait()
        os.close(master)
        os.close(slave)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
            return re.match(rb"HTTP/1.1 200", client.recv(4_096)) is not None
    except OSError:
        return False


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_hang_up_without_a_terminal_ends_nothing(tmp_path: Path, processes: str):
    """`kill -HUP` means "read your configuration anew" to most daemons: it ended the router, and all its streams, at once."""
    with router(tmp_path, "--processes", processes, terminal=False) as (running, port):
        running.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert running.poll() is None
        assert answers(port)
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 0


def test_when_its_terminal_closes_a_router_drains(tmp_path: Path):
    with router(tmp_path, terminal=True) as (running, port):
        with socket.create_connection(("127.0.0.1", port), 5) as half:
            half.sendall(b"GET /health HTTP/1.1\r\nhost: h\r\n")
            time.sleep(0.2)
            running.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            half.sendall(b"\r\n")
            assert half.recv(4_096).startswith(b"HTTP/1.1 200")
        assert running.wait(10) == 0


def test_a_hang_up_that_the_caller_ignores_is_none():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending() == (signal.SIGTERM, signal.SIGINT)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert ending() == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
