"""CPU time and memory of a process and its descendants, from /proc."""

from __future__ import annotations

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


def rss_mb(pid: int) -> float:
    """Resident memory now."""
    total_kb = 0
    for member in family(pid):
        lines = Path(f"/proc/{member}/status").read_text().splitlines()
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return total_kb / 1024
