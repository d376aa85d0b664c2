"""`make bench-decision`: prefill remotely or on the decode worker? The cost of policy/cost.py against static thresholds.

Virtual time, the router's own code: prefix keys, index, candidates, costs and what it learns from the answers. What differs
between the rows is `remotePrefill.decide` and the threshold; no figure of the engines is told to the router. Three mixes:
chat (5k tokens that many share, 50 new, 250 out), code (30k of a session's own, 1,500 out, then 500 more, twice), and both.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from e2e.bench.decision_engine import SLOTS, Engine, Job, Time
from e2e.bench.table import report
from fleet_router.kvindex.pieces import bytes_of, key_chain, ring_key
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.routing import Routing
from fleet_router.policy.terms import CostAsk
from fleet_router.policy.trip import Trip

PREFILLS, DECODES = 2, 6
BYTES_PER_TOKEN = 4
BOUND = 1.25
FLOOR_TOKENS = 8
"""What the cost has as `minUncachedTokens`: the least of all thresholds, so that it decides alone."""
STATIC = (8, 16, 256, 2048)
COST = "cost"
ROUNDS = 5
SECONDS = 150.0
CHAT_PER_S = 40.0
SESSIONS_PER_S = 0.35
PREFIXES = 40
TICK_S = 0.5
WARM_S = 20.0
"""Requests before this do not count: no router had met its workers."""


@dataclass(frozen=True)
class Arrival:
    """A request, and what comes after it in its session."""

    at: float
    prompt: bytes
    output: int
    turns: int = 0


@dataclass
class Seen:
    """What the clients saw."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    remote: int = 0
    whole: int = 0


def text(rng: random.Random, tokens: int) -> bytes:
    return rng.randbytes(tokens * BYTES_PER_TOKEN)


def arrivals(mix: str, seed: int) -> list[Arrival]:
    """The same for every rule."""
    rng = random.Random(seed)
    shared = [text(random.Random(1000 + i), 5_000) for i in range(PREFIXES)]
    found, at = [], 0.0
    while mix != "code" and at < SECONDS:
        at += rng.expovariate(CHAT_PER_S if mix == "chat" else CHAT_PER_S / 2)
        prefix = shared[min(int(rng.paretovariate(0.8)) - 1, PREFIXES - 1)]
        found.append(Arrival(at, prefix + text(rng, 50), 1 + int(rng.expovariate(1 / 250))))
    at = 0.0
    while mix != "chat" and at < SECONDS:
        at += rng.expovariate(SESSIONS_PER_S if mix == "code" else SESSIONS_PER_S / 2)
        found.append(Arrival(at, text(rng, 30_000), 1_500, turns=2))
    return found


class World:
    """One run."""

    def __init__(self, rule: str | int, seed: int, *, stream: bool = True) -> None:
        """`stream` False: the router sees whole answers, and learns from these."""
        self.time, self.stream = Time(), stream
        self.rng = random.Random(seed)
        self.by_cost, self.least = rule == COST, float(FLOOR_TOKENS if rule == COST else rule)
        self.routing = Routing()
        names = [("prefill", i) for i in range(PREFILLS)] + [("decode", PREFILLS + i) for i in range(DECODES)]
        self.workers = [Candidate(str(i), role, ("t", "c"), 0, SLOTS) for role, i in names]
        self.engines = [Engine(self.time, lambda keys: bytes_of(keys) / BYTES_PER_TOKEN) for _ in names]
        self.routing.update(self.workers, 0.0, 60.0)
        self.seen = Seen()
        self.left = 0

    def run(self, asked: Sequence[Arrival]) -> Seen:
        for one in asked:
            self.left += 1 + one.turns
            self.time.at(one.at, lambda one=one: self.arrive(one))
        self.time.at(TICK_S, self.tick)
        self.time.run()
        self.seen.gaps_s = [gap for engine in self.engines for gap in engine.gaps_s]
        return self.seen

    def tick(self) -> None:
        self.routing.tick(self.time.now, 60.0)
        if self.left:
            self.time.at(self.time.now + TICK_S, self.tick)

    def arrive(self, one: Arrival) -> None:
        began, routing = self.time.now, self.routing
        keys = key_chain(one.prompt)
        tokens = len(one.prompt) / BYTES_PER_TOKEN
        ask = CostAsk(tokens, ring_key(keys), began, BOUND, self.least, self.by_cost)
        # the tail behind the last piece counts as new, as with the precise index: thresholds of 8 and 16 are to mean something
        steps = [(bytes_of(pieces) / BYTES_PER_TOKEN, mask) for pieces, mask in routing.index.depths(keys)]
        offer = routing.decide(ask, steps)
        assert offer is not None
        trip = Trip(routing.groups["t", "c"], offer, began, stream=self.stream, learns_whole=True)
        decode = self.engines[int(offer.decode.uid)]

        def first() -> None:
            if self.stream:
                trip.first_token(self.time.now)
            routing.index.add(keys, offer.decode.uid)
            if began >= WARM_S:
                self.seen.ttft_s.append(self.time.now - began)
                self.seen.remote += offer.prefill is not None

        def ended() -> None:
            if self.stream:
                trip.ended(self.time.now, one.output)
            else:
                trip.first_token(self.time.now)
                trip.whole(self.time.now, one.output, offer.decode)
            trip.over(self.time.now)
            offer.decode.ended()
            self.seen.whole += 1
            self.left -= 1
            if one.turns:
                prompt = one.prompt + text(self.rng, one.output + 500)
                decode.store(key_chain(prompt[: len(one.prompt) + one.output * BYTES_PER_TOKEN]))
                more = Arrival(0.0, prompt, one.output, one.turns - 1)
                self.time.at(self.time.now + 2.0, lambda: self.arrive(more))

        job = Job(keys, tokens, one.output, first, ended)
        if offer.prefill is None:
            offer.decode.began()
            decode.compute(job)
            return
        prefill = offer.prefill
        prefill.began()
        routing.index.add(keys, prefill.uid)

        def prefilled() -> None:
            prefill.ended()
            trip.prefilled(self.time.now)
            offer.decode.began()
            decode.pull(job, int(prefill.uid))

        self.engines[int(prefill.uid)].compute(Job(keys, tokens, 1, lambda: None, prefilled))


def p99(values: Sequence[float]) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


def main() -> int:
    """The table and the JSON line; 1 when a request was lost."""
    rows, result, errors = [], {}, 0
    for mix in ("chat", "code", "both"):
        means: dict[str | int, list[float]] = {}
        for rule in (COST, *STATIC):
            runs = []
            for seed in range(ROUNDS):
                asked = arrivals(mix, seed)
                runs.append(World(rule, seed).run(asked))
                errors += sum(1 + one.turns for one in asked) - runs[-1].whole
            means[rule] = [statistics.mean(run.ttft_s) for run in runs]
            median = statistics.median
            rows.append(
                (
                    mix, str(rule), round(median(means[rule]) * 1e3, 1), round(median([p99(r.ttft_s) for r in runs]) * 1e3, 1),
                    round(median([statistics.mean(r.gaps_s) for r in runs]) * 1e3, 2),
                    round(median([p99(r.gaps_s) for r in runs]) * 1e3, 1),
                    round(median([r.remote / len(r.ttft_s) for r in runs]) * 100),
                )
            )  # fmt: skip
        best = min(STATIC, key=lambda rule: statistics.median(means[rule]))
        ratios = [ours / theirs for ours, theirs in zip(means[COST], means[best], strict=True)]
        result[mix] = {
            "ttft_mean_s": round(statistics.median(means[COST]), 4), "best_static": best,
            "best_static_ttft_mean_s": round(statistics.median(means[best]), 4),
            "vs_best_static": round(statistics.median(ratios), 3),
        }  # fmt: skip
    headers = ("mix", "rule", "TTFT mean ms", "TTFT p99 ms", "ITL mean ms", "ITL p99 ms", "% remote")
    report(headers, rows, {**result, "rounds": ROUNDS, "errors": errors})
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
