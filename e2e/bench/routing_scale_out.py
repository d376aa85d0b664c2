"""`make bench-routing ARGS="--scale-out"`: what do requests see that land on workers which join in mid-trace?

The real router process before emulated workers; more of them join at JOIN_S with empty caches, and begin slowly
(routing.slowStart). Joined: TTFT of requests that land on one of these in their first 60 s. Steady: of all requests before the
join, but for WARM_S. Of workers that nobody uses a good ratio says nothing: shares are what those that joined had of the requests
in each third of these 60 s, 1 when it was as much as everybody's. Where prefill workers are, a request lands on one of each role.

CASES are fleets: those that serve and those that join (`pd`: of each role), `alike`: all prompts begin alike. A trace is so much
faster than it is that those who prefill get as much each: for 64 workers eight times. Of small fleets each round has another part
of it. Chats are short but for their beginning: who lacks that, lacks most of a prompt. An engine writes an answer in a few
writes, however long it is, so that a router learns little of how streams slow each other: to whom a prefilled prompt goes for its
decode is mostly decided by KV, the bound and the ring. What is neither wait nor prefill tells how much of it this machine is, and
of decode workers what they had to do with it: the longest prompts, which nobody knows, go to those with the fewest streams.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path

from e2e.bench.proxies import ours, process, serve_from, wait_for
from e2e.bench.router import p99
from e2e.bench.routing_client import Landed, Load, Seen
from e2e.bench.routing_trace import Arrival, begun_alike, chats, conversation, faster, synthetic, window
from e2e.bench.routing_worker import PREFILL_BASE_S, PREFILL_TOKENS_PER_S
from e2e.bench.table import report
from fleet_router.config import HttpBounds, RouterConfig

ROUNDS = 6
"""Of one, a hundred requests land on a worker that joined: their p99 is the time of the longest prompt among them."""
WORKERS_OF_A_TRACE = 8
SPEED = 8.0
WARM_S, JOIN_S, FIRST_S, PART_S = 10.0, 40.0, 60.0, 20.0
SLOW_START_S = 60.0
SLOWEST = 3
BOUNDS = HttpBounds(body_bytes=16 * 1024 * 1024)
TRACES: dict[str, Callable[[int], list[Arrival]]] = {"conversation": conversation, "synthetic": synthetic, "chats": chats}


@dataclass(frozen=True)
class Case:
    """(those that serve, those that join); without prefill workers those of `decode` do both."""

    decode: tuple[int, int]
    prefill: tuple[int, int] = (0, 0)
    traces: tuple[str, ...] = ("conversation", "synthetic")
    beginning: int = 0
    """Tokens that all prompts begin with."""
    speed: float = SPEED
    rounds: int = ROUNDS
    """Of small fleets few requests land on those that join; of chats, which are short, many."""

    @property
    def config(self) -> RouterConfig:
        """Of the router."""
        slow_s = SLOW_START_S / self.speed
        return RouterConfig(fleet="bench", served_name="tiny", max_input_tokens=200_000, bounds=BOUNDS, slow_start_s=slow_s)

    def joining(self) -> dict[str, range]:
        """The numbers of those that join, by role: prefill workers come first."""
        first, last = sum(self.prefill), sum(self.prefill) + sum(self.decode)
        found = {"prefill": range(self.prefill[0], first), "decode": range(first + self.decode[0], last)}
        return {role: numbers for role, numbers in found.items() if numbers}

    def serving(self, role: str) -> int:
        """How many, before the others join."""
        return (self.prefill if role == "prefill" else self.decode)[0]

    def requests(self, name: str, seed: int) -> list[Arrival]:
        """What is sent."""
        times = (self.prefill[0] or self.decode[0]) / WORKERS_OF_A_TRACE
        trace = window(faster(TRACES[name](seed), times), JOIN_S + FIRST_S, seed)
        return begun_alike(trace, self.beginning) if self.beginning else trace


CASES = {
    "64+8": Case((64, 8)),
    "pd-32+4": Case((32, 4), (32, 4)),
    "8+2": Case((8, 2), rounds=12),
    "4+1": Case((4, 1), rounds=12),
    "alike-64+8": Case((64, 8), beginning=8_192),
    "alike-8+2": Case((8, 2), traces=("chats",), beginning=8_192, speed=2.0, rounds=2),
    "alike-pd-8+2": Case((8, 2), (8, 2), traces=("chats",), beginning=8_192, speed=2.0, rounds=2),
}
Times = list[tuple[float, Landed]]
"""TTFT, and where the request went."""


@dataclass
class Found:
    """Of the requests of a case, by where one role's workers had them."""

    steady: Times = field(default_factory=list)
    joined: Times = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


def split(seen: Sequence[Seen], joining: range, serving: int, role: str) -> Found:
    """Of some rounds."""
    found, since = Found(), [[0, 0] for _ in range(round(FIRST_S / PART_S))]
    for run in seen:
        for ttft_s, landed in zip(run.ttft_s, run.landed, strict=True):
            joined = (landed.prefill if role == "prefill" else landed.worker) in joining
            if JOIN_S <= landed.due_s < JOIN_S + FIRST_S:
                part = since[int((landed.due_s - JOIN_S) / PART_S)]
                part[0] += joined
                part[1] += 1
            if joined and landed.due_s < JOIN_S + FIRST_S:
                found.joined.append((ttft_s, landed))
            elif WARM_S <= landed.due_s < JOIN_S:
                found.steady.append((ttft_s, landed))
    equal = len(joining) / (serving + len(joining))
    found.shares = [new / max(1, every) / equal for new, every in since]
    return found


async def _drive(address: str, case: Case, trace: Sequence[Arrival], join: Callable[[], None]) -> Seen:
    load = Load(address, case.speed)
    asyncio.get_running_loop().call_later(JOIN_S / case.speed, join)
    return await load.run(trace)


def one_run(case: Case, trace: Sequence[Arrival], net: int) -> Seen:
    """A fresh fleet, the whole trace."""
    prefill = [f"127.{net}.1.{1 + i}:8000" for i in range(sum(case.prefill))]
    decode = [f"127.{net}.0.{1 + i}:8000" for i in range(sum(case.decode))]
    with tempfile.TemporaryDirectory(prefix="bench-scale-out-") as made:
        folder = Path(made)
        log, address = folder / "workers.log", f"127.{net}.9.1:8080"
        argv = [sys.executable, "-m", "e2e.bench.routing_worker", str(case.speed), *prefill, *decode]
        with process(argv, log) as running:
            wait_for(f"http://{decode[-1]}/health", running, log)
            with ours("ours", address, prefill[: case.prefill[0]], decode[: case.decode[0]], folder, case.config):
                join = partial(serve_from, folder / address.replace(":", "-"), prefill, decode)
                return asyncio.run(_drive(address, case, trace, join))


def _rest_s(one: tuple[float, Landed]) -> float:
    """Of its TTFT, less its prefill and the wait for that: the router, this machine, KV on its way."""
    ttft_s, landed = one
    return ttft_s - landed.waited_s - PREFILL_BASE_S - landed.computed / PREFILL_TOKENS_PER_S


def figures(found: Found) -> dict[str, object]:
    """Of a case, a trace and a role."""
    joined, steady = ([ttft_s for ttft_s, _ in some] for some in (found.joined, found.steady))
    slowest = sorted(found.joined, key=itemgetter(0), reverse=True)[:SLOWEST]
    return {
        "p99_joined_vs_steady": round(p99(joined) / p99(steady), 3), "requests_joined": len(joined),
        "mean_joined_vs_steady": round(statistics.mean(joined) / statistics.mean(steady), 3),
        "shares": [round(share, 2) for share in found.shares],
        "neither_wait_nor_prefill_p99_s": {
            "joined": round(p99([_rest_s(one) for one in found.joined]), 3),
            "steady": round(p99([_rest_s(one) for one in found.steady]), 3),
        },
        "slowest": [
            {
                "ttft_s": round(ttft_s, 2), "waited_s": round(one.waited_s, 2), "tokens": one.tokens, "computed": one.computed,
                "after_s": round(one.due_s - JOIN_S, 1),
            }
            for ttft_s, one in slowest
        ],
    }  # fmt: skip


def _rows(title: str, found: Found) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for when, some in (("steady", found.steady), ("joined", found.joined)):
        ttft_s = [one for one, _ in some]
        shares = " ".join(f"{share:.2f}" for share in found.shares) if when == "joined" else ""
        numbers = (statistics.mean(ttft_s), statistics.median(ttft_s), p99(ttft_s)) if ttft_s else ("-",) * 3
        rows.append((f"{title}: {when}", len(ttft_s), *numbers, shares))
    return rows


def main(rounds: int | None, chosen: Sequence[str]) -> int:
    """The table and the JSON line; 1 when a request went wrong, or none landed on a worker that joined."""
    rows, result, errors, late, net = list[tuple[object, ...]](), dict[str, object](), list[str](), list[float](), 0
    for fleet, name in [(one, name) for one in chosen for name in CASES[one].traces]:
        case, seen = CASES[fleet], list[Seen]()
        for seed in range(rounds or case.rounds):
            net += 1
            seen.append(one_run(case, case.requests(name, seed), 130 + net % 100))
        errors += [error for run in seen for error in run.errors]
        late += [lag_s for run in seen for lag_s in run.lag_s]
        roles = case.joining()
        for role, joining in roles.items():
            found = split(seen, joining, case.serving(role), role)
            shown = f"{fleet}, {name}" + (f", {role}" if len(roles) > 1 else "")
            rows += _rows(shown, found)
            if found.joined:
                result[shown] = figures(found)
            else:
                errors.append(f"{shown}: nothing landed on those that joined")
    for error in errors[:SLOWEST]:
        print(error, file=sys.stderr)
    rest = {"slow_start_s": SLOW_START_S, "rounds": rounds, "late_p99_s": round(p99(late), 3), "errors": len(errors)}
    report(("", "requests", "TTFT mean s", "p50 s", "p99 s", "shares"), rows, {**result, **rest})
    return 1 if errors else 0
