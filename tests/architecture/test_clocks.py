"""The router goes by a monotonic clock: one that is set by 9 hours, either way, ends no wait, no quota and no ban early or late.
Who reads the wall clock all the same says why here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROUTER = Path(__file__).resolve().parents[2] / "router"
READ = {
    "fleet_router/context.py": "vLLM's two legs ask a clock each what day it is: towards its end one of them alone may",
    "fleet_router/tls.py": "certificates are good from and until a date",
    "fleet_router/gossip/link.py": "datagrams of 30 s ago are not taken, between machines that have no other clock in common",
    "fleet_router/metrics.py": "process_start_time_seconds is a date",
    "fleet_router/explain/journal.py": "a log line has a date",
    "fleet_router/explain/export.py": "spans have dates, by the offset of the moment in which they are sent",
    "fleet_router/explain/route.py": "records are shown with dates, by the offset of the moment in which they are asked for",
}
"""Module → why nothing else will do. None of them decides how long something takes."""
WALL = {
    "time": {"time", "time_ns", "ctime", "gmtime", "localtime", "strftime", "asctime", "clock_gettime", "clock_gettime_ns"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}


def reads(source: str) -> list[int]:
    """Lines in which something is named that tells the wall clock's time."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time" and {one.name for one in node.names} & WALL["time"]:
            found.append(node.lineno)
        if isinstance(node, ast.Attribute):
            of = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if node.attr in WALL.get(of, ()):
                found.append(node.lineno)
    return found


def test_only_these_modules_of_the_router_read_the_wall_clock():
    found = {str(path.relative_to(ROUTER)): lines for path in sorted(ROUTER.rglob("*.py")) if (lines := reads(path.read_text()))}
    assert {name: lines for name, lines in found.items() if name not in READ} == {}, "use the router's own clock: time.monotonic"
    assert sorted(READ) == sorted(found), "modules that read it no more"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import time\ntime.time()", [2]),
        ("import time\nclock = time.time_ns", [2]),
        ("from time import time", [1]),
        ("from time import monotonic", []),
        ("from datetime import datetime, UTC\ndatetime.now(UTC)", [2]),
        ("import datetime\ndatetime.datetime.utcnow()", [2]),
        ("import datetime\ndatetime.date.today()", [2]),
        ("import time\ntime.clock_gettime(time.CLOCK_REALTIME)", [2]),
        ("import time\ntime.monotonic()\ntime.perf_counter()", []),
        ("loop.time()", []),
    ],
)
def test_what_counts_as_reading_it(source: str, lines: list[int]):
    assert reads(source) == lines
