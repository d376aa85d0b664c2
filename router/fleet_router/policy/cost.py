"""One number per (prefill, decode) pair, in seconds, and the pair with the least of it.

    remote   queue_P + prefill_P(uncached by P)  +  pair(P, D)(tokens that D misses)  +  late_D
    local    queue_D + prefill_D(uncached by D) · (1 + STALL · streams of D)          +  late_D
    keep     queue_P + prefill_P(uncached by P)  +  what decoding there takes from P's prefills, when D is full

late_D is what D's streams and this one lose to each other, and the wait for a slot when D has none. A sum of a part of P and a
part of D has its minimum at the best P and the best D, found apart: O(P + D). Only the pair's own part is not a sum. It is never
less than `Pairs.least_s`, which is added to D's part; what the best two pay above that is compared with what it could save:
when it is within epsilon nothing can be better by more, else the three best of each are tried with each other.

Near-equal costs count as equal: there the ring decides, so that routers agree without talking. Near means within EPSILON_S of the
least, and for a prompt that nobody knows also within EPSILON_SHARE of it: prompts with the same beginning find each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from fleet_router.policy.candidate import Candidate
from fleet_router.policy.group import Group
from fleet_router.policy.ring import Ring
from fleet_router.policy.side import Steps, Usable

EPSILON_S = 0.0005
EPSILON_SHARE = 0.1
STALL = 0.01
"""How much a second of prefill on a decode worker counts for each of its streams: with chunked prefill a step grows longer, but
no stream stands still."""
KEEP_SHARE = 0.2
"""Part of a prefill worker's speed that one running decode takes."""
TRIED = 3
ADAPTER_S = 0.25
"""Loading an adapter that a worker was not sent lately."""


class Weighed(NamedTuple):
    """One side of one group, as a decision saw it: costs by worker, in seconds."""

    group: tuple[str, str]
    workers: Sequence[Candidate]
    missing: Sequence[float]
    """Tokens of the prompt that each has not cached."""
    costs: Sequence[float]
    """Prefill: queue and prefill. Decode: lateness and the least transfer, for a prefill elsewhere."""
    local: Sequence[float] | None = None
    """Decode: when it prefills itself; of prefill workers None."""


class CostAsk(msgspec.Struct, frozen=True):
    """What the cost depends on besides the workers."""

    tokens: float
    """Of the prompt."""
    ring_key: int
    now: float
    bound: float
    min_uncached: float
    """Prompts that miss fewer tokens on the decode worker are prefilled there."""
    by_cost: bool = True
    """False: all other prompts are prefilled by a prefill worker, whatever it costs."""
    local: bool = False
    """Prefill workers have failed this request: none takes part."""
    others: float = 1.0
    """How much the seconds of others count against one's own: above 1 for classes that can wait."""
    adapter: str = ""
    seen: list[Weighed] = msgspec.field(default_factory=list)
    """Whoever decides adds what was compared: references alone, so that a record of the decision costs next to nothing."""


class Offer(msgspec.Struct):
    """The best way in one group. `prefill` None: the decode worker prefills."""

    cost_s: float
    prefill: Candidate | None
    decode: Candidate
    missing: float
    """Tokens that whoever prefills has not cached."""
    moved: float
    """Tokens whose KV moves to the decode worker."""
    reason: str
    looked: int
    """Candidates and pairs that were compared."""


def cheapest(ask: CostAsk, group: Group, steps: Steps, usable: Usable | None) -> Offer | None:
    """The best offer of this group; None when nobody there decodes."""
    decodes = group.decode.look(steps, ask.ring_key, ask.bound, usable)
    if not decodes:
        return None
    prefills = [] if ask.local else group.prefill.look(steps, ask.ring_key, ask.bound, usable)
    looked = len(decodes) + len(prefills)
    late, remote, missing = _decode_parts(ask, group, decodes, steps)
    by_cost, share = ask.by_cost or not prefills, 0.0 if steps else EPSILON_SHARE
    local = _local_parts(ask, decodes, late, missing) if by_cost else late
    ask.seen.append(Weighed(group.key, decodes, missing, remote, local))
    at = _settle(local if by_cost else remote, decodes, group.decode.ring, ask.ring_key, share)
    if not prefills:
        why = "local after a failure" if ask.local else "no compatible prefill worker"
        return Offer(local[at], None, decodes[at], missing[at], 0.0, why, looked)
    if missing[at] < ask.min_uncached:
        return Offer(local[at], None, decodes[at], missing[at], 0.0, "few uncached tokens", looked)
    costs, lacks = _prefill_parts(ask, prefills, steps)
    ask.seen.append(Weighed(group.key, prefills, lacks, costs))
    i = _settle(costs, prefills, group.prefill.ring, ask.ring_key, share)
    if by_cost and local[at] <= costs[i] + min(remote):
        best = Offer(local[at], None, decodes[at], missing[at], 0.0, "local prefill costs less", looked)
    else:
        j = _settle(remote, decodes, group.decode.ring, ask.ring_key, share) if by_cost else at
        above = _above(group, prefills[i], decodes[j], missing[j])
        first = i
        if above > EPSILON_S + share * (costs[i] + remote[j]):
            i, j, above, tried = _try_pairs(group, prefills, decodes, costs, remote, missing)
            looked += tried
        cost = costs[i] + remote[j] + above
        if by_cost and local[at] <= cost:
            best = Offer(local[at], None, decodes[at], missing[at], 0.0, "local prefill costs less", looked)
        else:
            best = Offer(cost, prefills[i], decodes[j], lacks[i], missing[j], "remote prefill", looked)
        i = first
    if by_cost and 0 < best.decode.slots <= best.decode.inflight:
        kept = costs[i] + KEEP_SHARE * ask.others * group.output.value * group.gap.base
        if kept < best.cost_s:
            return Offer(kept, None, prefills[i], lacks[i], 0.0, "decode workers are full: kept on prefill", looked)
    return best


def _decode_parts(
    ask: CostAsk, group: Group, workers: Sequence[Candidate], steps: Steps
) -> tuple[list[float], list[float], list[float]]:
    """(late, late + least transfer, missing tokens) of each decode worker."""
    tokens, others = ask.tokens, ask.others
    missing = [tokens - held if held < tokens else 1.0 for held in _held(workers, steps)]
    late = [worker.inflight * worker.drag_s * others for worker in workers]
    if 0 < workers[0].slots < len(group.decode.levels):  # somebody is full
        turn_s = group.answer.value
        late = [
            cost + max(0, worker.inflight - worker.slots + 1) * turn_s / max(1, worker.slots)
            for cost, worker in zip(late, workers, strict=True)
        ]
    if ask.adapter:
        late = [cost + (ask.adapter not in w.adapters) * ADAPTER_S for cost, w in zip(late, workers, strict=True)]
    base, slope = group.pairs.least_base, group.pairs.least_slope
    return late, [cost + base + lacks * slope for cost, lacks in zip(late, missing, strict=True)], missing


def _local_parts(ask: CostAsk, workers: Sequence[Candidate], late: list[float], missing: list[float]) -> list[float]:
    """Late + queue + prefill of each decode worker, and what others lose by it."""
    now, others, stall = ask.now, ask.others, STALL * ask.others
    return [
        cost
        + worker.base_s
        + (work := lacks * worker.token_s) * (1.0 + stall * worker.inflight + work * worker.crowd * others)
        + (worker.free_at - now if worker.free_at > now else 0.0)
        for cost, worker, lacks in zip(late, workers, missing, strict=True)
    ]


def _prefill_parts(ask: CostAsk, workers: Sequence[Candidate], steps: Steps) -> tuple[list[float], list[float]]:
    """(queue + prefill, missing tokens) of each prefill worker."""
    tokens, now, others = ask.tokens, ask.now, ask.others
    missing = [tokens - held if held < tokens else 1.0 for held in _held(workers, steps)]
    costs = [
        worker.base_s
        + (work := lacks * worker.token_s) * (1.0 + work * worker.crowd * others)
        + (worker.free_at - now if worker.free_at > now else 0.0)
        for worker, lacks in zip(workers, missing, strict=True)
    ]
    if ask.adapter:
        costs = [cost + (ask.adapter not in w.adapters) * ADAPTER_S for cost, w in zip(costs, workers, strict=True)]
    return costs, missing


def _held(workers: Sequence[Candidate], steps: Steps) -> list[float]:
    """Tokens of the prompt that each worker holds. One or two depths are what most prompts have."""
    if len(steps) == 1:
        ((held, mask),) = steps
        return [held if worker.bit & mask else 0.0 for worker in workers]
    if len(steps) == 2:
        (held, mask), (less, others) = steps
        return [held if (bit := worker.bit) & mask else less if bit & others else 0.0 for worker in workers]
    return (
        [next((held for held, mask in steps if worker.bit & mask), 0.0) for worker in workers] if steps else [0.0] * len(workers)
    )


def _above(group: Group, prefill: Candidate, decode: Candidate, tokens: float) -> float:
    """What this pair costs above the least of all pairs."""
    pairs = group.pairs
    return pairs.cost_s(prefill.uid, decode.uid, tokens) - pairs.least_s(tokens)


def _try_pairs(
    group: Group, prefills: Sequence[Candidate], decodes: Sequence[Candidate], costs: list[float], remote: list[float],
    missing: list[float],
) -> tuple[int, int, float, int]:  # fmt: skip
    """(prefill, decode, above, pairs tried) of the few best of each. A pair that cannot win any more is not tried."""
    few_p, few_d = _few_best(costs), _few_best(remote)
    found, least, tried = (few_p[0], few_d[0], 0.0), float("inf"), 0
    for i in few_p:
        for j in few_d:
            at_least = costs[i] + remote[j]
            if at_least >= least:
                break  # the next ones of this row cost more
            tried += 1
            above = _above(group, prefills[i], decodes[j], missing[j])
            if at_least + above < least:
                found, least = (i, j, above), at_least + above
    return (*found, tried)


def _few_best(costs: list[float]) -> list[int]:
    return sorted(range(len(costs)), key=costs.__getitem__)[:TRIED]


def _settle(costs: list[float], workers: Sequence[Candidate], ring: Ring, key: int, share: float) -> int:
    """Which of the near-equal cheapest: the one that comes first on the ring."""
    if len(costs) == 1:
        return 0
    least = min(costs)
    most = least + EPSILON_S + share * least
    near = [i for i, cost in enumerate(costs) if cost <= most]
    return near[0] if len(near) == 1 else near[ring.nearest(key, [workers[i].uid for i in near])]
