"""`make bench-routing ARGS="--scale-out"`: what do requests see that land on workers which join in mid-trace?

The real router process before 64 emulated workers; 8 more join at JOIN_S with empty caches, and begin slowly (routing.slowStart).
Joined: TTFT of requests that land on one of these in their first 60 s. Steady: of all requests before the join, but for WARM_S.
Both traces eight times faster than they are, in the time of the trace.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec

from e2e.bench.proxies import ours, process, serve_from, wait_for
from e2e.bench.router import p99
from e2e.bench.routing_client import Load, Seen
from e2e.bench.routing_trace import conversation, faster, synthetic
from e2e.bench.table import report
from fleet_router.config import HttpBounds, RouterConfig

ROUNDS = 6
"""Of one, a hundred requests land on a worker that joined: their p99 is the time of the longest prompt among them."""
WORKERS, JOINING = 64, 8
SPEED = 8.0
TIMES = 8.0
WARM_S, JOIN_S, FIRST_S = 10.0, 40.0, 60.0
SLOW_START_S = 60.0
BOUNDS = HttpBounds(body_bytes=16 * 1024 * 1024)
CONFIG = RouterConfig(
    fleet="bench", served_name="tiny", max_input_tokens=200_000, bounds=BOUNDS, slow_start_s=SLOW_START_S / SPEED
)
TRACES = {"conversation": conversation, "synthetic": synthetic}


def split(seen: Seen) -> tuple[list[float], list[float]]:
    """(TTFT on workers that joined, TTFT in the steady state)."""
    joined, steady = list[float](), list[float]()
    for (due_s, worker), ttft_s in zip(seen.landed, seen.ttft_s, strict=True):
        if worker >= WORKERS and due_s < JOIN_S + FIRST_S:
            joined.append(ttft_s)
        elif WARM_S <= due_s < JOIN_S:
            steady.append(ttft_s)
    return joined, steady


async def _drive(address: str, name: str, seed: int, documents: Path, backends: list[str]) -> Seen:
    load = Load(address, SPEED)
    asyncio.get_running_loop().call_later(JOIN_S / SPEED, serve_from, documents, [], backends)
    return await load.run(faster(TRACES[name](seed), TIMES))


def one_run(name: str, seed: int, net: int) -> Seen:
    """A fresh fleet, the whole trace."""
    backends = [f"127.{net}.0.{1 + i}:8000" for i in range(WORKERS + JOINING)]
    with tempfile.TemporaryDirectory(prefix="bench-scale-out-") as made:
        folder = Path(made)
        log, address = folder / "workers.log", f"127.{net}.9.1:8080"
        with process([sys.executable, "-m", "e2e.bench.routing_worker", str(SPEED), *backends], log) as running:
            wait_for(f"http://{backends[-1]}/health", running, log)
            with ours("ours", address, [], backends[:WORKERS], folder, CONFIG):
                return asyncio.run(_drive(address, name, seed, folder / address.replace(":", "-"), backends))


def main(rounds: int) -> int:
    """The table and the JSON line; 1 when a request went wrong."""
    rows, result, errors, net = [], dict[str, object](), 0, 130
    for name in TRACES:
        joined, steady, late = list[float](), list[float](), list[float]()
        for seed in range(rounds):
            net += 1
            seen = one_run(name, seed, net)
            found = split(seen)
            joined, steady, late = joined + found[0], steady + found[1], late + seen.lag_s
            errors += len(seen.errors)
        ratio = p99(joined) / p99(steady)
        for title, values in (("steady", steady), ("joined", joined)):
            rows.append((f"{name}, {title}", len(values), statistics.mean(values), statistics.median(values), p99(values)))
        result[name] = {
            "p99_joined_vs_steady": round(ratio, 3), "requests_joined": len(joined),
            "mean_joined_vs_steady": round(statistics.mean(joined) / statistics.mean(steady), 3),
            "late_p99_s": round(p99(late), 3),
        }  # fmt: skip
    shown = {**result, "slow_start_s": CONFIG.slow_start_s * SPEED, "rounds": rounds, "errors": errors}
    report(("", "requests", "TTFT mean s", "p50 s", "p99 s"), rows, msgspec.to_builtins(shown))
    return 1 if errors else 0
