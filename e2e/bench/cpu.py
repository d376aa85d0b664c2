"""CPU time, memory and cores of a process and its descendants, from /proc."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def family(pid: int) -> list[int]:
    """The process and all of its descendants."""
    found, at = [pid], 0
    while at < len(found):
        for task in Path(f"/proc/{found[at]}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
        at += 1
    return found


def cpu_s(pid: int) -> float:
    """Seconds on a CPU so far: user and system time of all threads, exact to the nanosecond (utime and stime tick in 10 ms)."""
    tasks = [task for member in family(pid) for task in Path(f"/proc/{member}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def apart(cores: Collection[int]) -> tuple[set[int], set[int]]:
    """(the core of what is measured, those of all the rest): one of its own, where there are two."""
    last = max(cores)
    return {last}, set(cores) - {last} or {last}


def pin(pid: int, cores: Collection[int]) -> None:
    """From now on all of its threads run there, and those that they start."""
    for member in family(pid):
        for task in Path(f"/proc/{member}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


def rss_mb(pid: int) -> float:
    """Resident memory now."""
    total_kb = 0
    for member in family(pid):
        lines = Path(f"/proc/{member}/status").read_text().splitlines()
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return total_kb / 1024
