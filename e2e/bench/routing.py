"""`make bench-routing`: how good the routing is: two traces through the real router process and emulated workers, next to
sglang-router, smg and vllm-router with their cache-aware policies, each alone with fresh workers in the same run.

8 workers take the traces as they are; 64 those of eight communities of users at once, each with its own prompts: as much for each
worker, and as many of its blocks seen before. TTFT is what the client sees, in the time of the trace, which runs SPEED times
faster than the clock: what a router adds to a request counts as often. Load: prompt tokens that a worker had to compute, the most
of one over the mean of all. Beside it a yardstick: what the same prompts come to when each goes to the worker with the least work
and no cache counts.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvloop

from e2e.bench import routing_scale_out as scale_out
from e2e.bench.cpu import cpu_s
from e2e.bench.proxies import Proxy, ours, process, sglang, smg, vllm_router, wait_for
from e2e.bench.router import p99
from e2e.bench.routing_client import Load, Seen
from e2e.bench.routing_trace import Arrival, conversation, synthetic, together
from e2e.bench.table import report
from fleet_router.config import HttpBounds, RouterConfig

TRACES = {"conversation": conversation, "synthetic": synthetic}
SPEEDS = {8: 24.0, 64: 8.0}
"""How much faster than the clock a fleet of this size lives: fleets of 8 see 83 requests per second, those of 64 220."""
CONFIG = RouterConfig(fleet="bench", served_name="tiny", max_input_tokens=200_000, bounds=HttpBounds(body_bytes=16 * 1024 * 1024))
OURS = "ours"
LATE_S = 0.5
AGAIN = 2
"""A run whose requests left later than LATE_S (p99) says that this machine had other things to do: it is repeated so often."""


@dataclass
class Run:
    """One router, one trace."""

    seen: Seen
    hit: float
    """Share of the prompt tokens that came from a cache."""
    load: float
    least_load: float
    """The same of the same prompts, each given to whoever has least work, whatever its cache."""
    cpu_us: float
    requests: int

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.seen.ttft_s)

    @property
    def p99_s(self) -> float:
        return p99(self.seen.ttft_s)

    @property
    def late_s(self) -> float:
        """How late requests left, p99."""
        return p99(self.seen.lag_s)


Start = Callable[[str, Sequence[str], Path], AbstractContextManager[Proxy]]


def _ours(address: str, backends: Sequence[str], folder: Path) -> AbstractContextManager[Proxy]:
    return ours(OURS, address, [], backends, folder, CONFIG)


ROUTERS: dict[str, Start] = {OURS: _ours, "smg": smg, "sglang-router": sglang, "vllm-router": vllm_router}


def one_run(start: Start, trace: Sequence[Arrival], workers: int, speed: float, net: int) -> Run:
    """Fresh workers, a fresh router, the whole trace."""
    backends = [f"127.{net}.{i // 200}.{1 + i % 200}:8000" for i in range(workers)]
    with tempfile.TemporaryDirectory(prefix="bench-routing-") as name:
        folder = Path(name)
        log = folder / "workers.log"
        with process([sys.executable, "-m", "e2e.bench.routing_worker", str(speed), *backends], log) as running:
            wait_for(f"http://{backends[-1]}/health", running, log)
            with start(f"127.{net}.9.1:8080", backends, folder) as proxy:
                assert proxy.pid is not None
                before = cpu_s(proxy.pid)
                seen = asyncio.run(_drive(proxy.address, speed, trace))
                cpu_us = (cpu_s(proxy.pid) - before) / len(trace) * 1e6
            told = httpx.get(f"http://{backends[0]}/stats", trust_env=False).json()
    rows = told["workers"]
    computed = [row[2] for row in rows]
    hit = 1 - sum(computed) / max(1, sum(row[1] for row in rows))
    load = max(computed) / statistics.mean(computed)
    return Run(seen, hit, load, greedy(told["prompts"], workers), cpu_us, len(trace))


def greedy(prompts: Sequence[int], workers: int) -> float:
    """Load max/mean when each prompt in turn goes to the worker with the least work."""
    loads = [0] * workers
    for tokens in prompts:
        heapq.heapreplace(loads, loads[0] + tokens)
    return max(loads) / statistics.mean(loads)


def undisturbed(start: Start, trace: Sequence[Arrival], workers: int, net: int) -> Run:
    """One run in which the client kept its times, if there is one among a few."""
    found = one_run(start, trace, workers, SPEEDS[workers], net)
    for _ in range(AGAIN):
        if found.late_s <= LATE_S:
            break
        other = one_run(start, trace, workers, SPEEDS[workers], net)
        found = min(found, other, key=lambda run: run.late_s)
    return found


async def _drive(address: str, speed: float, trace: Sequence[Arrival]) -> Seen:
    return await Load(address, speed).run(trace)


def figures(runs: dict[str, list[Run]]) -> dict[str, object]:
    """Of one trace and size: ratios are medians over the rounds."""
    peers = [name for name in runs if name != OURS]
    best_mean = min(peers, key=lambda name: statistics.median(run.mean_s for run in runs[name]), default=OURS)
    best_p99 = min(peers, key=lambda name: statistics.median(run.p99_s for run in runs[name]), default=OURS)

    def ratio(of: Callable[[Run], float], peer: str) -> float:
        return round(statistics.median(of(a) / of(b) for a, b in zip(runs[OURS], runs[peer], strict=True)), 3)

    return {
        "ttft_mean_vs_best_peer": ratio(lambda run: run.mean_s, best_mean), "best_peer": best_mean,
        "ttft_p99_vs_best_peer": ratio(lambda run: run.p99_s, best_p99), "best_peer_p99": best_p99,
        "disturbed": [name for name, found in runs.items() if max(run.late_s for run in found) > LATE_S],
        "load_max_over_mean": round(statistics.median(run.load for run in runs[OURS]), 3), "bound": CONFIG.load_bound,
        "load_least_work_first": round(statistics.median(run.least_load for run in runs[OURS]), 3),
        "errors": sum(len(run.seen.errors) for run in runs[OURS]),
        "peer_errors": {name: sum(len(run.seen.errors) for run in runs[name]) for name in peers},
    }  # fmt: skip


def row(title: str, runs: Sequence[Run]) -> tuple[object, ...]:
    """Of the table."""
    median = statistics.median
    return (
        title, median(run.mean_s for run in runs), median(median(run.seen.ttft_s) for run in runs),
        median(run.p99_s for run in runs), f"{median(run.hit for run in runs):.3f}", f"{median(run.load for run in runs):.2f}",
        median(run.cpu_us for run in runs), f"{max(run.late_s for run in runs):.3f}",
        sum(len(run.seen.errors) for run in runs),
    )  # fmt: skip


def main() -> int:
    """Print the table and the JSON line; 1 when a request of ours went wrong."""
    parser = argparse.ArgumentParser(description="routing quality against peers")
    parser.add_argument("--workers", type=int, nargs="*", default=list(SPEEDS), choices=SPEEDS)
    parser.add_argument("--traces", nargs="*", default=list(TRACES), choices=TRACES)
    parser.add_argument("--routers", nargs="*", default=list(ROUTERS), choices=ROUTERS)
    parser.add_argument("--rounds", type=int, help="of each trace; default: 1, with --scale-out each fleet's own")
    parser.add_argument(
        "--scale-out", nargs="*", metavar="CASE", choices=scale_out.CASES,
        help="TTFT on workers that join in the middle of a trace, ours alone; of these fleets, by default of all: %(choices)s",
    )  # fmt: skip
    given = parser.parse_args()
    uvloop.install()
    if given.scale_out is not None:
        return scale_out.main(given.rounds, given.scale_out or list(scale_out.CASES))
    rounds = given.rounds or 1
    rows, result, net = [], dict[str, object](), 90
    for workers in given.workers:
        for name in given.traces:
            runs: dict[str, list[Run]] = {router: [] for router in given.routers}
            for number in range(rounds):
                trace = together(TRACES[name], number, workers // 8)
                for router in given.routers if number % 2 == 0 else reversed(given.routers):
                    net = 90 + (net - 89) % 40
                    runs[router].append(undisturbed(ROUTERS[router], trace, workers, net))
            rows += [row(f"{name}, {workers} workers: {router}", done) for router, done in runs.items()]
            result[f"{name}_{workers}"] = figures(runs)
            for router, done in runs.items():
                for error in [error for run in done for error in run.seen.errors][:2]:
                    print(f"{name}, {workers} workers: {router}: {error}", file=sys.stderr)
    errors = sum(found["errors"] for found in result.values())  # type: ignore[index]
    headers = ("", "TTFT mean s", "p50 s", "p99 s", "hit", "load max/mean", "router µs/request", "sent late p99 s", "errors")
    report(headers, rows, {**result, "rounds": rounds, "errors": errors})
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
