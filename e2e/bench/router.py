"""`make bench-router`: what our router costs per request and per streamed chunk, against sglang-router (cache_aware), vllm-router
(P/D) and plain Envoy in front of the same workers in the same run.

CPU is user and system time of the router's processes. A chunk's cost is the slope between short and long streams, twice: flooded
(the worker writes all events at once: what handling an event costs) and paced (an event per stream every 5 ms: on top of it one
wake-up, one receive and one send of the kernel per event, the same for every router). Figures are medians, ratios medians of the
rounds' ratios. Proxies have a core of their own, one after the other, as on machines where neither workers nor clients are: where
the scheduler put them decided by a factor of two what a flooded chunk cost, for it came with many others or with few. All of it
is started many times: where a process has its memory decides a tenth of its figures, for as long as it runs. TTFT p99 is of all
rounds' streams together, some 10,000: of one round's it is the eleventh slowest, which differs by a third from round to round;
how far its ratio goes when one round is left out is told with it. It is told twice: of all streams, of which one in seven is the
first of 32 connections that come at once, and of those on connections that are kept, as clients with a pool have it. Whole
answers are asked for with prompts of three sizes; streams have the middle one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec
import uvloop

from e2e.bench.backend import FLOOD, TICK_S
from e2e.bench.client import Outcome, drive
from e2e.bench.cpu import apart, cpu_s, pin, rss_mb
from e2e.bench.proxies import Proxy, envoy, ours, sglang, vllm_router_pd, workers
from e2e.bench.table import report
from e2e.bench.tenants import ON, TENANTS, keyed
from fleet_router.config import TraceConfig
from fleet_router.metrics import COMPILED

STARTS, ROUNDS = 9, 2
"""Of all proxies anew, and of each start."""
CONNECTIONS = 32
WHOLE_REQUESTS = 2_000
SIZED_REQUESTS = 1_000
"""Of each other size."""
STREAMS = 224
FIRSTS = 3
"""Times more of the short ones, for their first tokens alone."""
SHORT, LONG = 4, 44
FLOODS = 192
FLOOD_LONG = 244
"""The workers say the same word again and again: at 256 it would be a loop, which one of the routers looks for."""
PREFIXES = 50
KEYS, FILLS_MOST = 100_000, 40
"""So many prefix entries the goal for memory speaks of; loads that it may take to make them."""
WORKERS = [f"127.83.0.{i}:8000" for i in range(1, 5)]
COLLECTOR = "127.83.0.9:4318"
"""Of spans, in a process of its own, as collectors are: in a worker a batch of spans held up every worker's streams."""
EVERYTHING, EVERYTHING_PD = "ours, everything on", "ours P/D, everything on"
"""Keys, quotas, classes, salt, runaway detection, and spans of every request that the rate allows."""
COMPARED = frozenset({"no proxy", "ours", "envoy", EVERYTHING})
"""By their first tokens."""
WITH_KEYS = frozenset({EVERYTHING, EVERYTHING_PD})
SHORT_WORDS, USUAL_WORDS, LONG_WORDS = (12, 20), (400, 180), (1_900, 860)
"""Of a prompt: those that a fiftieth of all share, and its own. About 0.2, 3.4 and 16 KB."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
WORDS = ["router", "moves", "blocks", "of", "keys", "and", "values", "between", "two", "workers", "before", "noon", "again"]


@dataclass
class Figures:
    """One proxy's figures, one entry per round where nothing else is said."""

    request_us: list[float] = field(default_factory=list)
    short_us: list[float] = field(default_factory=list)
    long_us: list[float] = field(default_factory=list)
    chunk_us: list[float] = field(default_factory=list)
    paced_us: list[float] = field(default_factory=list)
    ttft_s: list[list[float]] = field(default_factory=list)
    """Of each stream."""
    ttft_kept_s: list[list[float]] = field(default_factory=list)
    rss_mb: float = 0.0
    prefix_keys: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def ttft_p99_ms(self) -> float:
        """Of all streams."""
        return p99([*chain.from_iterable(self.ttft_s)]) * 1e3

    @property
    def ttft_kept_p99_ms(self) -> float:
        """Of those on connections that had had an answer before."""
        return p99([*chain.from_iterable(self.ttft_kept_s)]) * 1e3


def prompts(count: int, seed: int, words: tuple[int, int] = USUAL_WORDS) -> list[str]:
    """Words that others share, then those of its own."""
    rng, (common, own) = random.Random(seed), words
    shared = [" ".join(random.Random(i).choices(WORDS, k=common)) for i in range(PREFIXES)]
    return [f"{rng.choice(shared)} {seed}-{i} {' '.join(rng.choices(WORDS, k=own))}" for i in range(count)]


def requests(
    count: int, seed: int, chunks: int | None, *, flood: bool = False, words: tuple[int, int] = USUAL_WORDS
) -> list[bytes]:
    """Ready to send."""
    made = []
    for prompt in prompts(count, seed, words):
        said = f"{prompt} {FLOOD}" if flood else prompt
        body = {"model": "tiny", "prompt": said, "max_tokens": chunks or 16, "temperature": 0}
        raw = json.dumps(body | ({"stream": True} if chunks else {})).encode()
        made.append(HEAD + f"content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return made


def run(proxy: Proxy, sent: list[bytes], chunks: int | None) -> tuple[float, Outcome]:
    """(CPU microseconds per request, outcome)."""
    sent = keyed(sent) if proxy.name in WITH_KEYS else sent
    before = cpu_s(proxy.pid) if proxy.pid else 0.0
    outcome = asyncio.run(drive(proxy.address, sent, CONNECTIONS, chunks))
    after = cpu_s(proxy.pid) if proxy.pid else 0.0
    return (after - before) / len(sent) * 1e6, outcome


@dataclass(frozen=True)
class Load:
    """What every proxy is given once per round, one after the other."""

    count: int
    seed: int
    """Plus the round's number: every load and round has prompts of its own."""
    chunks: int | None = None
    flood: bool = False
    words: tuple[int, int] = USUAL_WORDS
    of_all: bool = True
    """Else of those whose first tokens are compared."""

    def requests(self, number: int) -> list[bytes]:
        """Of one round, ready to send."""
        return requests(self.count, self.seed + number, self.chunks, flood=self.flood, words=self.words)


LOADS = {
    "whole": Load(WHOLE_REQUESTS, 0),
    "small": Load(SIZED_REQUESTS, 5_000, words=SHORT_WORDS),
    "large": Load(SIZED_REQUESTS, 6_000, words=LONG_WORDS),
    "short": Load(STREAMS, 1_000, SHORT),
    "long": Load(STREAMS, 2_000, LONG),
    "little": Load(FLOODS, 3_000, SHORT, flood=True),
    "flood": Load(FLOODS, 4_000, FLOOD_LONG, flood=True),
} | {f"first {one}": Load(STREAMS, (7 + one) * 1_000, SHORT, of_all=False) for one in range(FIRSTS)}
Ran = dict[str, tuple[float, Outcome]]


def one_round(proxies: list[Proxy], number: int) -> dict[str, Ran]:
    """By proxy and load. Each load is given to all proxies within seconds, in an order of its own: what else a machine does
    changes, and figures that are compared should have the same of it."""
    ran: dict[str, Ran] = {proxy.name: {} for proxy in proxies}
    for at, (name, load) in enumerate(LOADS.items()):
        order = random.Random(number * len(LOADS) + at).sample(proxies, len(proxies))
        for proxy in order:
            if load.of_all or proxy.name in COMPARED:
                ran[proxy.name][name] = run(proxy, load.requests(number), load.chunks)
    return ran


def note(proxy: Proxy, ran: Ran, into: Figures) -> None:
    """One round of one proxy."""
    cpu_us = {name: us for name, (us, _) in ran.items()}
    into.request_us.append(cpu_us["whole"])
    into.short_us.append(cpu_us["small"])
    into.long_us.append(cpu_us["large"])
    into.paced_us.append(slope(cpu_us["short"], cpu_us["long"], SHORT, LONG))
    into.chunk_us.append(slope(cpu_us["little"], cpu_us["flood"], SHORT, FLOOD_LONG))
    streams = [outcome for name, (_, outcome) in ran.items() if name in ("short", "long") or not LOADS[name].of_all]
    into.ttft_s.append([took for one in streams for took in one.ttft_s])
    into.ttft_kept_s.append([took for one in streams for took in one.ttft_kept_s])
    for _, outcome in ran.values():
        into.errors += outcome.errors
    into.errors += wrong_pace(ran["long"][1].fastest_stream_s, ran["flood"][1].fastest_stream_s)
    if proxy.pid:
        into.rss_mb = max(into.rss_mb, rss_mb(proxy.pid))
    if proxy.name.startswith("ours"):
        into.prefix_keys = max(into.prefix_keys, prefix_keys(proxy.address))


def fill(proxy: Proxy, into: Figures) -> None:
    """As many prefix entries as its memory is told for."""
    for number in range(FILLS_MOST):
        if into.prefix_keys >= KEYS:
            break
        _, outcome = run(proxy, LOADS["whole"].requests(50_000 + number), None)
        into.errors += outcome.errors
        into.prefix_keys = max(into.prefix_keys, prefix_keys(proxy.address))
    if proxy.pid:
        into.rss_mb = max(into.rss_mb, rss_mb(proxy.pid))


def prefix_keys(address: str) -> int:
    """What our router knows of prompts by now, by its own metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(next(line for line in lines if line.startswith("fleet_router_prefix_keys ")).split()[1])


def slope(short_us: float, long_us: float, short: int, long: int) -> float:
    """Cost of one more chunk."""
    return (long_us - short_us) / (long - short)


def wrong_pace(paced_s: float, flooded_s: float) -> list[str]:
    """What is wrong when a proxy was given another load than the rest: then its figures compare nothing."""
    paced_least_s, flooded_most_s = LONG * TICK_S / 2, FLOOD_LONG * TICK_S / 2
    wrong = []
    if paced_s < paced_least_s:
        wrong.append(f"a paced stream took {paced_s:.3f} s, expected at least {paced_least_s:.3f} s")
    if flooded_s > flooded_most_s:
        wrong.append(f"the fastest flooded stream took {flooded_s:.3f} s, expected at most {flooded_most_s:.3f} s")
    return wrong


def p99(values: list[float]) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


def ratio(mine: list[float], theirs: list[float]) -> float:
    """Median over the rounds of ours ÷ theirs."""
    return round(statistics.median(a / b for a, b in zip(mine, theirs, strict=True)), 3)


def tails(mine: list[list[float]], theirs: list[list[float]]) -> tuple[float, float, float]:
    """(p99 over all rounds, ours ÷ theirs; the least and the most of it with one round left out)."""

    def of(left_out: int) -> float:
        both = ([took for number, one in enumerate(rounds) if number != left_out for took in one] for rounds in (mine, theirs))
        return round(p99(next(both)) / p99(next(both)), 3)

    without = [of(number) for number in range(len(mine))]
    return of(-1), min(without), max(without)


def summary(found: dict[str, Figures]) -> dict[str, float | int | bool | tuple[float, float, float]]:
    """The last line."""
    mine, disaggregated, direct, everything = found["ours"], found["ours P/D"], found["no proxy"], found[EVERYTHING]
    whole_pd, peer, plain = found[EVERYTHING_PD], found["sglang-router cache_aware"], found["envoy"]
    theirs_pd, median, of_ours = found["vllm-router P/D"], statistics.median, (mine, disaggregated, everything, whole_pd)
    return {
        "us_per_request": round(median(mine.request_us), 1), "us_per_request_pd": round(median(disaggregated.request_us), 1),
        "us_per_chunk": round(median(mine.chunk_us), 2), "us_per_chunk_paced": round(median(mine.paced_us), 2),
        "ttft_added_p99_ms": round(mine.ttft_p99_ms - direct.ttft_p99_ms, 2),
        "rss_mb": round(max(one.rss_mb for one in of_ours), 1), "prefix_keys": min(one.prefix_keys for one in of_ours),
        "vs_vllm_router_pd": ratio(disaggregated.request_us, theirs_pd.request_us),
        "vs_vllm_router_pd_short": ratio(disaggregated.short_us, theirs_pd.short_us),
        "vs_vllm_router_pd_16k": ratio(disaggregated.long_us, theirs_pd.long_us),
        "pd_vs_sglang_cache_aware": ratio(disaggregated.request_us, peer.request_us),
        "pd_vs_envoy": ratio(disaggregated.request_us, plain.request_us),
        "everything_pd_vs_vllm_router_pd": ratio(whole_pd.request_us, theirs_pd.request_us),
        "everything_vs_sglang_cache_aware": ratio(everything.request_us, peer.request_us),
        "everything_vs_envoy": ratio(everything.request_us, plain.request_us),
        "everything_vs_envoy_short": ratio(everything.short_us, plain.short_us),
        "everything_vs_envoy_16k": ratio(everything.long_us, plain.long_us),
        "everything_chunk_vs_envoy": ratio(everything.chunk_us, plain.chunk_us),
        "everything_chunk_paced_vs_envoy": ratio(everything.paced_us, plain.paced_us),
        "everything_ttft_vs_envoy": tails(everything.ttft_s, plain.ttft_s),
        "everything_ttft_kept_vs_envoy": tails(everything.ttft_kept_s, plain.ttft_kept_s),
        "vs_sglang_cache_aware": ratio(mine.request_us, peer.request_us), "vs_envoy": ratio(mine.request_us, plain.request_us),
        "vs_sglang_short": ratio(mine.short_us, peer.short_us), "vs_envoy_short": ratio(mine.short_us, plain.short_us),
        "vs_sglang_16k": ratio(mine.long_us, peer.long_us), "vs_envoy_16k": ratio(mine.long_us, plain.long_us),
        "chunk_vs_sglang": ratio(mine.chunk_us, peer.chunk_us), "chunk_vs_envoy": ratio(mine.chunk_us, plain.chunk_us),
        "chunk_paced_vs_sglang": ratio(mine.paced_us, peer.paced_us),
        "chunk_paced_vs_envoy": ratio(mine.paced_us, plain.paced_us),
        "ttft_vs_envoy": tails(mine.ttft_s, plain.ttft_s),
        "ttft_kept_vs_envoy": tails(mine.ttft_kept_s, plain.ttft_kept_s),
        "compiled": COMPILED, "rounds": len(mine.request_us), "errors": sum(len(figures.errors) for figures in found.values()),
    }  # fmt: skip


def measure(starts: int, rounds: int) -> dict[str, Figures]:
    """So many rounds of each start."""
    found: dict[str, Figures] = {}
    of_proxies, of_others = apart(os.sched_getaffinity(0))
    os.sched_setaffinity(0, of_others)  # and all that this process starts
    for start in range(starts):
        measure_once(start * rounds, rounds, found, of_proxies, last=start == starts - 1)
    return found


def measure_once(before: int, rounds: int, found: dict[str, Figures], of_proxies: set[int], *, last: bool) -> None:
    """All rounds of one start, `before` which there were so many; the first one of each proxy warms it up and does not count.
    The `last` one also tells what memory many prefix entries take."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-router-")))
        stack.enter_context(workers(WORKERS, folder))
        stack.enter_context(workers([COLLECTOR], folder, "collector"))
        tenants = folder / "tenants.json"
        tenants.write_text(json.dumps(TENANTS))
        traces = TraceConfig(endpoint=f"http://{COLLECTOR}", sample=1.0)
        everything = msgspec.structs.replace(ON, runaway=True, traces=traces)
        proxies = [
            Proxy("no proxy", WORKERS[0], None),
            stack.enter_context(ours("ours", "127.83.1.1:8080", [], WORKERS, folder)),
            stack.enter_context(sglang("127.83.1.2:8080", WORKERS, folder)),
            stack.enter_context(envoy("127.83.1.3:8080", WORKERS, folder)),
            stack.enter_context(ours("ours P/D", "127.83.1.4:8080", WORKERS[:2], WORKERS[2:], folder)),
            stack.enter_context(ours(EVERYTHING, "127.83.1.6:8080", [], WORKERS, folder, everything, tenants)),
            stack.enter_context(ours(EVERYTHING_PD, "127.83.1.7:8080", WORKERS[:2], WORKERS[2:], folder, everything, tenants)),
            stack.enter_context(vllm_router_pd("127.83.1.5:8080", WORKERS[:2], WORKERS[2:], folder)),
        ]
        for proxy in proxies:
            found.setdefault(proxy.name, Figures())
        for proxy in proxies:
            if proxy.pid:
                pin(proxy.pid, of_proxies)
        for number in range(rounds + 1):
            ran = one_round(proxies, before + number)
            for proxy in proxies:
                into = found[proxy.name] if number else Figures()
                note(proxy, ran[proxy.name], into)
                found[proxy.name].errors += into.errors if not number else []
        for proxy in (proxy for proxy in proxies if last and proxy.name.startswith("ours")):
            fill(proxy, found[proxy.name])


def main() -> int:
    """Print the table and the JSON line; 1 when a request went wrong."""
    uvloop.install()
    found = measure(STARTS, ROUNDS)
    median = statistics.median
    rows = [
        (
            name,
            median(f.request_us),
            median(f.short_us),
            median(f.long_us),
            median(f.chunk_us),
            median(f.paced_us),
            f.ttft_p99_ms,
            f.ttft_kept_p99_ms,
            f.rss_mb,
            len(f.errors),
        )
        for name, f in found.items()
    ]
    report(
        ("router", "µs/request", "0.2 KB", "16 KB", "µs/chunk flooded", "paced", "TTFT p99 ms", "kept", "RSS MB", "errors"),
        rows,
        summary(found),
    )
    for name, figures in found.items():
        for error in figures.errors[:3]:
            print(f"{name}: {error}", file=sys.stderr)
    return 1 if any(figures.errors for figures in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
