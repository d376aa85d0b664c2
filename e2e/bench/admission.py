"""`make bench-admission`: what admission costs per request and per streamed chunk when nothing waits: keys, quotas, classes,
salt, usage and runaway detection all on, against the same router with open access, in front of the same workers in the same run.

CPU is user and system time of the router's process; a chunk's cost is the slope between short and long flooded streams, as in
`make bench-router`. Rounds alternate the order; figures are medians, differences medians of the rounds' differences.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
import uvloop

from e2e.bench.proxies import Proxy, ours, workers
from e2e.bench.router import FLOOD_LONG, FLOODS, SHORT, WHOLE_REQUESTS, requests, run, slope
from e2e.bench.table import report
from e2e.bench.tenants import ON, TENANTS, keyed

ROUNDS = 9
WORKERS = [f"127.84.0.{i}:8000" for i in range(1, 5)]


def one_round(proxy: Proxy, number: int) -> tuple[float, float, list[str]]:
    """(us per request, us per chunk, errors)."""

    def made(*args: object, **more: bool) -> list[bytes]:
        sent = requests(*args, **more)  # type: ignore[arg-type]
        return sent if proxy.name == "open" else keyed(sent)

    whole_us, whole = run(proxy, made(WHOLE_REQUESTS, number, None), None)
    little_us, little = run(proxy, made(FLOODS, 3_000 + number, SHORT, flood=True), SHORT)
    flood_us, flood = run(proxy, made(FLOODS, 4_000 + number, FLOOD_LONG, flood=True), FLOOD_LONG)
    return whole_us, slope(little_us, flood_us, SHORT, FLOOD_LONG), whole.errors + little.errors + flood.errors


def measure(rounds: int) -> dict[str, list[tuple[float, float, list[str]]]]:
    """All rounds; the first one warms up."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-admission-")))
        stack.enter_context(workers(WORKERS, folder))
        tenants = folder / "tenants.json"
        tenants.write_text(json.dumps(TENANTS))
        loops = msgspec.structs.replace(ON, runaway=True)
        proxies = [
            stack.enter_context(ours("open", "127.84.1.1:8080", [], WORKERS, folder)),
            stack.enter_context(ours("keys, quotas, classes, salt", "127.84.1.2:8080", [], WORKERS, folder, ON, tenants)),
            stack.enter_context(ours("and runaway detection", "127.84.1.3:8080", [], WORKERS, folder, loops, tenants)),
        ]
        found: dict[str, list[tuple[float, float, list[str]]]] = {proxy.name: [] for proxy in proxies}
        for number in range(rounds + 1):
            for proxy in proxies if number % 2 else reversed(proxies):
                found[proxy.name].append(one_round(proxy, number))
        return {name: rows[1:] for name, rows in found.items()}


def main() -> int:
    """Print the table and the JSON line; 1 when a request went wrong."""
    uvloop.install()
    found = measure(ROUNDS)
    median = statistics.median
    rows = [(n, median(r[0] for r in f), median(r[1] for r in f), sum(len(r[2]) for r in f)) for n, f in found.items()]
    open_, on, loops = found.values()
    figures = {
        "added_us_per_request": round(median(b[0] - a[0] for a, b in zip(open_, on, strict=True)), 2),
        "added_us_per_chunk": round(median(b[1] - a[1] for a, b in zip(open_, on, strict=True)), 3),
        "runaway_us_per_chunk": round(median(b[1] - a[1] for a, b in zip(on, loops, strict=True)), 3),
        "vs_open": round(median(b[0] / a[0] for a, b in zip(open_, on, strict=True)), 3),
        "rounds": ROUNDS, "errors": sum(row[3] for row in rows),
    }  # fmt: skip
    report(("router", "µs/request", "µs/chunk flooded", "errors"), rows, figures)
    for name, outcome in found.items():
        for error in [error for row in outcome for error in row[2]][:3]:
            print(f"{name}: {error}", file=sys.stderr)
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
