"""`make bench-frontier`: load against hits, where prompts begin with one of many prefixes and few of these are asked for often.

Virtual time and the router's own policies (policy/cost.py with both kinds of index, policy/choose.py), over 8 to 512 prefill
workers. Prefixes of 2k to 8k tokens by Zipf's law, and one that half of all prompts begin with; a question of its own behind
each. A worker computes one prompt after another and has a cache that evicts what was used least recently. All policies get the
same arrivals: LOAD of what workers could do that computed each prefix once, together. Nobody can: round robin and least load fall
behind at that, their TTFT grows with the run.

hit: share of the prompts' tokens that were in the cache, behind the warm-up, as times are. load: tokens that a worker computed,
the most over the mean, of the whole run, for whoever got more of the warm-up gets less later; `least`: what the same prompts come
to when each goes to whoever has the least work so far (nobody could know it). over cap: prompts sent to a worker that had then as
many requests as `bound` x mean, and as LOAD_FLOOR (policy/ring.py: with fewer requests than workers the bound alone would forbid
any).
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from e2e.bench.table import report
from fleet_router.config import Policy, RouterConfig
from fleet_router.kvindex.pieces import BYTES_OF, ring_key
from fleet_router.kvindex.precise import PreciseIndex
from fleet_router.kvindex.underway import united
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.choose import pick
from fleet_router.policy.chosen import SimpleAsk
from fleet_router.policy.ring import cap_of
from fleet_router.policy.routing import TICK_S, Routing
from fleet_router.policy.terms import CostAsk
from fleet_router.policy.trip import Trip
from fleet_wire.events import BlockRemoved, BlockStored

SIZES = (8, 32, 128, 512)
SKEWS = (0.8, 1.0, 1.2)
HOT = 0.5
"""Share of the prefix that is asked for far more than all others, which are Zipf(1)."""
SHAPES = (*map(str, SKEWS), "hot")
PER_WORKER = 8
"""Prefixes: so many times the workers."""
PREFIX_PIECES = (32, 40, 56)
"""2k, 4k and 8k tokens."""
QUESTION_PIECES = (1, 2, 3, 4)
"""256 tokens each."""
BYTES_PER_TOKEN = 4.0
CACHE_TOKENS = 80_000.0
"""About 16 prefixes: twice as many as there are per worker, less what the questions take."""
BASE_S = 0.02
TOKENS_PER_S = 4_000.0
LOAD = 0.7
ASKED = 100
"""Prompts per worker, at least LEAST_ASKED of all; the first quarter does not count."""
LEAST_ASKED = 6_000
GROUP = ("t", "c")
BOUND = RouterConfig(fleet="", served_name="").load_bound
BOUNDS = (1.1, BOUND, 1.5, 2.0)
NO_BOUND = 1e9
SEED = 1


def tokens_of(pieces: int) -> float:
    """Prompt tokens that so many keys stand for."""
    return BYTES_OF[pieces] / BYTES_PER_TOKEN


@dataclass(frozen=True)
class Arrival:
    """One prompt; its keys are all there is of it."""

    at: float
    keys: list[int]


def arrivals(workers: int, shape: str, load: float, seed: int, asked: int = 0) -> list[Arrival]:
    """The same for every policy."""
    rng, count = random.Random(seed), workers * PER_WORKER
    prefixes = [[rng.getrandbits(64) for _ in range(rng.choice(PREFIX_PIECES))] for _ in range(count)]
    skew = 1.0 if shape == "hot" else float(shape)
    weights = [(rank + 1) ** -skew for rank in range(count)]
    if shape == "hot":
        weights[0] = HOT / (1 - HOT) * sum(weights[1:])
    total = list(accumulate(weights))
    asked = asked or max(LEAST_ASKED, ASKED * workers)
    chosen = rng.choices(prefixes, cum_weights=total, k=asked)
    prompts = [prefix + [rng.getrandbits(64) for _ in range(rng.choice(QUESTION_PIECES))] for prefix in chosen]
    own = sum(tokens_of(len(prompt)) - tokens_of(len(prefix)) for prompt, prefix in zip(prompts, chosen, strict=True))
    once = sum(tokens_of(len(prefix)) for prefix in {id(prefix): prefix for prefix in chosen}.values())
    per_s = load * workers * asked / (asked * BASE_S + (own + once) / TOKENS_PER_S)
    at, found = 0.0, []
    for keys in prompts:
        at += rng.expovariate(per_s)
        found.append(Arrival(at, keys))
    return found


@dataclass(eq=False)
class Engine:
    """A prefill worker: one prompt after another, the least recently used blocks go."""

    queue: deque[Arrival] = field(default_factory=deque)
    cache: OrderedDict[int, float] = field(default_factory=OrderedDict)
    cached: float = 0.0
    computed: float = 0.0
    cold: float = 0.0
    """Computed in the warm-up."""
    hit: float = 0.0
    busy_s: float = 0.0
    doing: Arrival | None = None

    def begin(self, one: Arrival) -> float:
        """Seconds that it takes."""
        self.doing, held = one, 0
        for key in one.keys:
            if key not in self.cache:
                break
            held += 1
        known = tokens_of(held)
        lacks = max(1.0, tokens_of(len(one.keys)) - known)
        self.hit += known
        self.computed += lacks
        seconds = BASE_S + lacks / TOKENS_PER_S
        self.busy_s += seconds
        return seconds

    def store(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """(new, evicted): what its KV events tell."""
        fresh, gone = [], []
        for i in range(len(keys) - 1, -1, -1):
            if keys[i] in self.cache:
                self.cache.move_to_end(keys[i])
            else:
                self.cache[keys[i]] = tokens_of(i + 1) - tokens_of(i)
                self.cached += self.cache[keys[i]]
                fresh.append(keys[i])
        while self.cached > CACHE_TOKENS:
            key, size = self.cache.popitem(last=False)
            self.cached -= size
            gone.append(key)
        return fresh[::-1], gone


def name_of(key: int) -> bytes:
    """A block's name whose key in the precise index is this one."""
    return key.to_bytes(8, "little") + bytes(8)


@dataclass(frozen=True)
class Rule:
    """A policy as the router's configuration names it. `events`: kvAware knows the caches by KV events, else by what it sent."""

    title: str
    policy: Policy
    bound: float
    events: bool = False


RULES = (
    Rule("round robin", "roundRobin", NO_BOUND),
    Rule("least load", "leastLoad", NO_BOUND),
    Rule("consistent hash", "prefixHash", NO_BOUND),
    *(Rule(f"CHWBL {bound}", "prefixHash", bound) for bound in BOUNDS),
    *(Rule(f"ours {bound}", "kvAware", bound) for bound in BOUNDS),
    *(Rule(f"ours {bound}, KV events", "kvAware", bound, events=True) for bound in BOUNDS),
)


@dataclass
class Seen:
    """One run, behind its warm-up."""

    ttft_s: list[float] = field(default_factory=list)
    hit: float = 0.0
    load: float = 0.0
    least: float = 0.0
    """The load where each prompt goes to whoever has the least work."""
    busy: float = 0.0
    """Share of their time that workers were at work."""
    over_cap: int = 0


class World:
    """One run of one rule."""

    def __init__(self, rule: Rule, workers: int) -> None:
        self.rule, self.now, self.turn = rule, 0.0, 0
        self.routing = Routing()
        self.precise = PreciseIndex(10_000_000)
        self.workers = [Candidate(f"p{i}", "prefill", GROUP, 0) for i in range(workers)]
        self.decode = Candidate("d", "decode", GROUP, 0)
        self.engines = [Engine() for _ in range(workers)]
        self.at = {worker.uid: i for i, worker in enumerate(self.workers)}
        self.routing.update([*self.workers, self.decode], 0.0, 0.0)
        self.group = self.routing.groups[GROUP]
        for worker in self.workers:
            self.routing.index.resize(worker.uid, int(CACHE_TOKENS * BYTES_PER_TOKEN))
            self.precise.join(worker.uid, worker.bit, "c")
            self.group.pairs.observe(worker.uid, "d", 1000.0, self.group.pairs.common.at(1000.0))
        self.ends: list[tuple[float, int]] = []
        self.trips: dict[int, Trip] = {}
        self.seen = Seen()
        self.spent: list[float] = []
        self.counting = False

    def run(self, asked: Sequence[Arrival]) -> Seen:
        warm, next_tick = len(asked) // 4, TICK_S
        for number, one in enumerate(asked):
            if number == warm:
                self._forget()
            while self.ends and self.ends[0][0] <= one.at:
                self._end()
            while next_tick <= one.at:
                self.routing.tick(next_tick, 0.0)
                next_tick += TICK_S
            self.now = one.at
            self._send(one, self._choose(one))
        until = self.now
        busy = sum(engine.busy_s for engine in self.engines) - sum(end - until for end, _ in self.ends)
        while self.ends:
            self._end()
        return self._figures(busy / len(self.engines) / (until - asked[warm].at))

    def _forget(self) -> None:
        self.counting = True
        for engine in self.engines:
            engine.cold, engine.computed, engine.hit, engine.busy_s = engine.computed, 0.0, 0.0, 0.0

    def _figures(self, busy: float) -> Seen:
        seen, loads = self.seen, [engine.cold + engine.computed for engine in self.engines]
        hit = sum(engine.hit for engine in self.engines)
        seen.hit, seen.busy = hit / (hit + sum(engine.computed for engine in self.engines)), min(1.0, busy)
        seen.load = max(loads) / statistics.mean(loads)
        least = [0.0] * len(loads)
        for tokens in self.spent:
            heapq.heapreplace(least, least[0] + tokens)
        seen.least = max(least) / statistics.mean(least)
        return seen

    def _choose(self, one: Arrival) -> int:
        rule, side, tokens = self.rule, self.group.prefill, tokens_of(len(one.keys))
        if rule.policy != "kvAware":
            self.turn += 1
            ask = SimpleAsk(ring_key(one.keys), tokens, 0.0, self.turn)
            return self.at[pick(ask, side.members, side.ring, rule.policy, rule.bound).uid]
        index = self.precise if rule.events else self.routing.index
        steps = [(tokens_of(int(pieces)), mask) for pieces, mask in index.depths(one.keys)]
        if rule.events:
            steps = united([*steps, *self.routing.coming(one.keys, BYTES_OF[len(one.keys)], tokens, -1)])
        offer = self.routing.decide(CostAsk(tokens, ring_key(one.keys), self.now, rule.bound, 0.0, by_cost=False), steps)
        assert offer is not None
        assert offer.prefill is not None
        underway = self.routing.underway if rule.events else None
        self.trips[id(one)] = Trip(self.group, offer, self.now, stream=True, underway=underway, keys=one.keys)
        return self.at[offer.prefill.uid]

    def _send(self, one: Arrival, at: int) -> None:
        worker, side = self.workers[at], self.group.prefill
        if worker.inflight >= cap_of(side.inflight, len(self.workers), self.rule.bound):
            self.seen.over_cap += 1
        worker.began()
        self.routing.index.add(one.keys, worker.uid)
        engine = self.engines[at]
        if engine.doing is None:
            self._begin(one, at)
        else:
            engine.queue.append(one)

    def _begin(self, one: Arrival, at: int) -> None:
        engine, before = self.engines[at], self.engines[at].computed
        heapq.heappush(self.ends, (self.now + engine.begin(one), at))
        self.spent.append(engine.computed - before)

    def _end(self) -> None:
        self.now, at = heapq.heappop(self.ends)
        engine, worker = self.engines[at], self.workers[at]
        one, engine.doing = engine.doing, None
        assert one is not None
        fresh, gone = engine.store(one.keys)
        if self.rule.events:
            self.precise.apply(worker.uid, [BlockStored([*map(name_of, fresh)], None, [], 16, None, "GPU", None)])
            self.precise.apply(worker.uid, [BlockRemoved([*map(name_of, gone)], "GPU")])
        worker.ended()
        if (trip := self.trips.pop(id(one), None)) is not None:
            trip.prefilled(self.now)
            trip.over(self.now)
        if self.counting:
            self.seen.ttft_s.append(self.now - one.at)
        if engine.queue:
            self._begin(engine.queue.popleft(), at)


def p99(values: Sequence[float]) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


def beaten(found: dict[Rule, Seen]) -> list[str]:
    """Rules of others that have more hits than ours at the bound that is the default, with a load that is no higher."""
    ours = [seen for rule, seen in found.items() if rule.policy == "kvAware" and rule.bound == BOUND]
    others = [(rule, seen) for rule, seen in found.items() if rule.policy != "kvAware"]
    return [rule.title for rule, seen in others if any(seen.hit > mine.hit and seen.load <= mine.load for mine in ours)]


def over_bound(found: dict[Rule, Seen]) -> list[str]:
    """Rules of ours whose workers got more work than the bound, and more than least work first would have given one. Not of a
    tighter bound than the default: where queues are long, requests in flight leave too few workers to choose from then, and that
    they are bounded comes first."""
    ours = [(rule, seen) for rule, seen in found.items() if rule.policy == "kvAware" and rule.bound >= BOUND]
    return [rule.title for rule, seen in ours if seen.load > max(rule.bound, seen.least)]


def figures(found: dict[Rule, Seen]) -> dict[str, object]:
    """Of one size and shape."""
    rows = {
        rule.title: {
            "hit": round(seen.hit, 3), "load": round(seen.load, 3), "least": round(seen.least, 3),
            "ttft_mean_s": round(statistics.mean(seen.ttft_s), 3), "ttft_p99_s": round(p99(seen.ttft_s), 3),
        }
        for rule, seen in found.items()
    }  # fmt: skip
    return {
        **rows,
        "over_cap": sum(seen.over_cap for seen in found.values()),
        "over_bound": over_bound(found),
        "beaten_by": beaten(found),
    }


def row(title: str, rule: Rule, seen: Seen) -> tuple[object, ...]:
    """Of the table."""
    return (
        f"{title}: {rule.title}", f"{seen.hit:.3f}", f"{seen.load:.2f}", f"{seen.least:.2f}", f"{seen.busy:.2f}",
        statistics.mean(seen.ttft_s), p99(seen.ttft_s), seen.over_cap if rule.bound < NO_BOUND else "-",
    )  # fmt: skip


def main() -> int:
    """The table and the JSON line; 1 when the bound was broken, or somebody had more hits than ours at no more load."""
    parser = argparse.ArgumentParser(description="load against hits on Zipf prefixes")
    parser.add_argument("--workers", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--load", type=float, default=LOAD)
    given = parser.parse_args()
    rows, result, wrong = [], dict[str, object](), 0
    for workers in given.workers:
        for shape in given.shapes:
            asked = arrivals(workers, shape, given.load, SEED)
            found = {rule: World(rule, workers).run(asked) for rule in RULES}
            rows += [row(f"{workers} workers, {shape}", rule, seen) for rule, seen in found.items()]
            told = result[f"{workers}_{shape}"] = figures(found)
            wrong += bool(told["over_cap"] or told["over_bound"] or told["beaten_by"])
    headers = ("", "hit", "load max/mean", "least", "busy", "TTFT mean s", "p99 s", "over cap")
    report(headers, rows, {**result, "bound": BOUND, "wrong": wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
