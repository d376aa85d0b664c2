"""To whom a process talks, as the kernel knows it: not what a test's server happens to see of it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STEP_S = 0.005
LISTENS = "0A"
Address = tuple[str, int]
Talk = tuple[str, Address, Address]
"""(protocol, here, there)."""


def address(text: str) -> Address:
    """As `/proc/net` writes it: words of the machine's own order."""
    host, _, port = text.partition(":")
    words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
    raw = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw), int(port, 16)


def talks(pid: int) -> set[Talk]:
    """Its TCP sockets that do not listen, in whatever state they are, and its UDP sockets."""
    inodes = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(one)))
    return {(name, here, there) for name, here, there, state, inode in rows(pid) if inode in inodes and state != LISTENS}


def rows(pid: int) -> Iterator[tuple[str, Address, Address, str, str]]:
    """Every socket of its network, those of nobody too: one that was closed is there for a minute more (TIME_WAIT)."""
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            yield name, address(fields[1]), address(fields[2]), fields[3], fields[9]


@contextmanager
def watched(pid: int) -> Iterator[set[Talk]]:
    """What it talks to meanwhile; looked at some hundred times a second, and once more at the end."""
    found, over = set[Talk](), threading.Event()

    def look() -> None:
        while not over.is_set():
            found.update(talks(pid))
            time.sleep(STEP_S)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        over.set()
        looking.join()
        found.update(talks(pid))
