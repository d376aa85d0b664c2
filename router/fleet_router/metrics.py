"""Counters of one router process: plain integers on the data path, text only when scraped."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from fleet_router.histogram import Histogram

TTFT_BUCKETS_S: Final[tuple[float, ...]] = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0,
    10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 450.0, 600.0, 900.0, 1800.0, 3600.0,
)  # fmt: skip
"""Usual objectives (spec.slo) are bounds, and any other is near to one: nobody knows where between two bounds a latency was, so
that all that took 1.2 s could pass for 2.4 s, and would miss an objective of 2 s."""
WAIT_BUCKETS_S: Final[tuple[float, ...]] = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WHOLE_BUCKETS_S: Final[tuple[float, ...]] = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ITL_BUCKETS_S: Final[tuple[float, ...]] = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5,
    1.0, 2.5, 5.0,
)  # fmt: skip
"""As those of TTFT."""


REVISIONS_MOST: Final = 32
"""Revisions that are counted apart; of those without workers the one that was first seen is forgotten for the next."""


RELEASED: Final = ("done", "refused", "lost", "late", "unreachable", "dropped")
HEDGED: Final = ("started", "won", "lost", "failed", "cut", "refused", "watched", "swallowed")
RESUMED: Final = ("done", "differs", "refused")
"""Labels of counters, which are there from the beginning: one that begins at 1 never grew to Prometheus."""


@dataclass
class Served:
    """What clients got from the workers of one revision of a tier: what a canary is judged by."""

    requests: int = 0
    """Times that its decode workers were chosen."""
    errors: int = 0
    """Legs, transfers and streams that failed on its workers, also where a retry saved the request."""
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    """Of streams alone."""
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    whole: Histogram = field(default_factory=lambda: Histogram(WHOLE_BUCKETS_S))
    """Answers that were not streamed: queue, prompt and all tokens."""


@dataclass
class Metrics:
    """Everything that is counted."""

    requests: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By status code; counted for every request, which a Counter makes of a Python call."""
    arrivals: int = 0
    """Requests for tokens that could be read, whatever became of them: one that does not grow means that nobody asks."""
    remote_prefills: int = 0
    local_prefills: int = 0
    handed_over: Counter[str] = field(default_factory=Counter)
    """Answers whose prompt was prefilled by another worker, by tier: as many times must KV have moved."""
    releases: Counter[str] = field(default_factory=Counter)
    """Of KV that nobody will read: done (200), refused, lost, late, unreachable, dropped (too many are unanswered)."""
    hedges: Counter[str] = field(default_factory=Counter)
    """Prefill legs that were sent to a second worker because the first was late: started, how they ended (won, lost, failed,
    cut), and those for which the budget had nothing left (refused). Legs that lost and run on, to see whether their worker
    answers at all (watched), and those that found one that does not (swallowed)."""
    hedge_tokens: int = 0
    """Uncached tokens that they were to compute."""
    retries: int = 0
    resends: int = 0
    """Requests that were sent again because the worker had just closed the pooled connection: nothing ran, nobody is to blame."""
    resumed: Counter[str] = field(default_factory=Counter)
    """Streams that broke: done (carried on to the end), differs, refused (not determined, or nothing left to try with)."""
    drafts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of a cascade, by tier and outcome: kept, or why the next tier was asked."""
    client_left: int = 0
    streams_broken: int = 0
    prefill_tokens: int = 0
    follow_errors: int = 0
    served: dict[tuple[str, str], Served] = field(default_factory=dict)
    """By (tier, revision)."""
    live: frozenset[tuple[str, str]] = frozenset()
    """Those that have workers now: their counters begin anew for nobody."""

    def of(self, tier: str, revision: str) -> Served:
        """The counts of one revision."""
        found = self.served.get((tier, revision))
        if found is None:
            if len(self.served) >= REVISIONS_MOST:
                self.served.pop(next((key for key in self.served if key not in self.live), next(iter(self.served))))
            found = self.served[tier, revision] = Served()
        return found

    def exposition(self, workers: Iterable[tuple[str, str, str, int]], endpoints_age_s: float, index_keys: int) -> str:
        """Prometheus text; `workers` are (name, role, tier, in flight)."""
        rows = list(workers)
        out = ["# TYPE fleet_router_requests_total counter"]
        out += [f'fleet_router_requests_total{{code="{code}"}} {count}' for code, count in sorted(self.requests.items())]
        for name, value in (
            ("arrivals", self.arrivals), ("remote_prefill", self.remote_prefills), ("local_prefill", self.local_prefills),
            ("retries", self.retries), ("client_left", self.client_left), ("streams_broken", self.streams_broken),
            ("prefill_tokens", self.prefill_tokens), ("follow_errors", self.follow_errors),
            ("resends", self.resends), ("hedge_tokens", self.hedge_tokens),
        ):  # fmt: skip
            out += [f"# TYPE fleet_router_{name}_total counter", f"fleet_router_{name}_total {value}"]
        out.append("# TYPE fleet_router_handed_over_total counter")
        tiers = {tier for _, _, tier, _ in rows} | set(self.handed_over)
        out += [f'fleet_router_handed_over_total{{tier="{tier}"}} {self.handed_over[tier]}' for tier in sorted(tiers)]
        out.append("# TYPE fleet_router_resumed_total counter")
        out += [f'fleet_router_resumed_total{{outcome="{name}"}} {self.resumed[name]}' for name in RESUMED]
        out.append("# TYPE fleet_router_kv_releases_total counter")
        out += [f'fleet_router_kv_releases_total{{outcome="{name}"}} {self.releases[name]}' for name in RELEASED]
        out.append("# TYPE fleet_router_hedges_total counter")
        out += [f'fleet_router_hedges_total{{event="{name}"}} {self.hedges[name]}' for name in HEDGED]
        out.append("# TYPE fleet_router_drafts_total counter")
        out += [
            f'fleet_router_drafts_total{{tier="{tier}",outcome="{name}"}} {count}'
            for (tier, name), count in sorted(self.drafts.items())
        ]
        out += self._loads(rows)
        out += self._revisions()
        out += ["# TYPE fleet_router_endpoints_age_seconds gauge", f"fleet_router_endpoints_age_seconds {endpoints_age_s:.3f}"]
        out += ["# TYPE fleet_router_prefix_keys gauge", f"fleet_router_prefix_keys {index_keys}", *process_lines()]
        return "\n".join(out) + "\n"

    def _revisions(self) -> list[str]:
        marks = {key: f'tier="{key[0]}",revision="{key[1]}"' for key in self.served}
        out = ["# TYPE fleet_router_revision_requests_total counter"]
        out += [f"fleet_router_revision_requests_total{{{marks[key]}}} {one.requests}" for key, one in self.served.items()]
        out += ["# TYPE fleet_router_revision_errors_total counter"]
        out += [f"fleet_router_revision_errors_total{{{marks[key]}}} {one.errors}" for key, one in self.served.items()]
        out += ["# TYPE fleet_router_ttft_seconds histogram"]
        out += [line for key, one in self.served.items() for line in one.ttft.lines("fleet_router_ttft_seconds", marks[key])]
        out += ["# TYPE fleet_router_whole_answer_seconds histogram"]
        out += [
            line for key, one in self.served.items() for line in one.whole.lines("fleet_router_whole_answer_seconds", marks[key])
        ]
        out += ["# TYPE fleet_router_itl_seconds histogram"]
        out += [line for key, one in self.served.items() for line in one.itl.lines("fleet_router_itl_seconds", marks[key])]
        return out

    @staticmethod
    def _loads(rows: list[tuple[str, str, str, int]]) -> list[str]:
        loads: Counter[tuple[str, str]] = Counter()
        counts: Counter[str] = Counter({"prefill": 0, "decode": 0})
        out = ["# TYPE fleet_router_worker_inflight gauge"]
        for name, role, tier, inflight in rows:
            loads[role, tier] += inflight
            counts[role] += 1
            out.append(f'fleet_router_worker_inflight{{worker="{name}",role="{role}"}} {inflight}')
        out.append("# TYPE fleet_router_inflight gauge")
        out += [f'fleet_router_inflight{{role="{role}",tier="{tier}"}} {n}' for (role, tier), n in sorted(loads.items())]
        out.append("# TYPE fleet_router_endpoints gauge")
        out += [f'fleet_router_endpoints{{role="{role}"}} {n}' for role, n in sorted(counts.items())]
        return out


_STARTED: Final = time.time()
_STATM: Final = os.open("/proc/self/statm", os.O_RDONLY)
"""Kept open: what becomes of a process without a file left is told most of all."""
COMPILED: Final = not __file__.endswith(".py")
"""The data path runs as an extension module (`router/compile.py`)."""


def process_lines() -> list[str]:
    """Standard process metrics."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(os.pread(_STATM, 256, 0).split()[1])
    return [
        "# TYPE process_cpu_seconds_total counter", f"process_cpu_seconds_total {usage.ru_utime + usage.ru_stime:.3f}",
        "# TYPE process_resident_memory_bytes gauge", f"process_resident_memory_bytes {pages * os.sysconf('SC_PAGE_SIZE')}",
        "# TYPE fleet_router_build_info gauge", f'fleet_router_build_info{{compiled="{str(COMPILED).lower()}"}} 1',
        "# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {_STARTED:.3f}",
    ]  # fmt: skip
