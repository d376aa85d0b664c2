"""Which ports a process listens on, and which ones a README says: the first table under its line `**Ports.**`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

Ports = set[tuple[str, int]]
"""(protocol, port)."""
ROW = re.compile(r"^\| (\d+)(?:-(\d+))?/(tcp|udp) \| [^|]+ \| ([^|]+) \|$")
ALWAYS = "always"


def listening(*pids: int) -> Ports:
    """Every socket of these processes that takes something from elsewhere."""
    inodes = set()
    for one in (one for pid in pids for one in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(one)))
    found = set()
    for name, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{pids[0]}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == state:
                found.add((name[:3], int(fields[1].rpartition(":")[2], 16)))
    return found


def documented(readme: Path, when: Iterable[str] | None = None) -> Ports:
    """Of the rows whose last column says one of `when`; None: of all."""
    lines = readme.read_text().partition("**Ports.**")[2].split("\n")
    rows: list[str] = []
    for line in lines:
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            break
    found: Ports = set()
    for row in rows[2:]:
        matched = ROW.match(row)
        assert matched is not None, row
        first, last, protocol, told = matched.groups()
        if when is None or told in when:
            found |= {(protocol, port) for port in range(int(first), int(last or first) + 1)}
    return found
