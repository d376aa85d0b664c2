"""One number per (prefill, decode) pair, in seconds, and the pair with the least of it.

    remote   queue_P + prefill_P(uncached by P)  +  pair(P, D)(tokens that D misses)  +  late_D
    local    queue_D + prefill_D(uncached by D) · (1 + STALL · streams of D)          +  late_D
    keep     queue_P + prefill_P(uncached by P)  +  what decoding there takes from P's prefills, when D is full

A prefill counts for more where it keeps others waiting (work x arrivals), and where it meets heat: a worker that was sent much to
compute lately is spared, which spreads work and new blocks alike. That is a matter of degree up to `bound` x mean: nobody is sent
what would bring it above, as long as somebody is found for whom it would not. Workers that hold a prompt may go on with it up to
HEAT_LEAST times what they save by it: one conversation alone is no reason to leave its KV. Heat that is little to the prompt is
none. Sessions stay where they are: the bound of requests in flight alone moves them.

late_D is what D's streams and this one lose to each other, and the wait for a slot when D has none. A sum of a part of P and a
part of D has its minimum at the best P and the best D, found apart: O(P + D). Only the pair's own part is not a sum. It is never
less than `Pairs.least_s`, which is added to D's part; what the best two pay above that is compared with what it could save:
when it is within epsilon nothing can be better by more, else the three best of each are tried with each other.

A worker in its slow start counts as if it held what most others hold (`Side.with_common`): by the least cost of each prompt
alone it would never have that. What is expected of its answer, and learnt from it, goes by what it lacks.

Near-equal costs count as equal: there the ring decides, so that routers agree without talking. Near means within EPSILON_S of the
least. Of a prompt that nobody knows it means within EPSILON_SHARE as well, and heat up to the mean adds nothing to its costs:
prompts with the same beginning find each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from fleet_router.policy.candidate import Candidate
from fleet_router.policy.group import Group
from fleet_router.policy.side import HEAT_LEAST, HEAT_WORTH, Depths, Side, Steps, Usable
from fleet_router.policy.terms import CostAsk, Offer, Weighed

EPSILON_S: Final = 0.0005
EPSILON_SHARE: Final = 0.1
STALL: Final = 0.01
"""How much a second of prefill on a decode worker counts for each of its streams: with chunked prefill a step grows longer, but
no stream stands still."""
KEEP_SHARE: Final = 0.2
"""Part of a prefill worker's speed that one running decode takes."""
TRIED: Final = 3
COLD_LEAST: Final = 2.0
"""Below so many prompts of usual size per worker heat tells nothing of a prompt that nobody knows."""
ADAPTER_S: Final = 0.25
"""Loading an adapter that a worker was not sent lately."""


def missing_of(weighed: Weighed, at: int) -> float:
    """Tokens of the prompt that one of the workers has not cached."""
    return _lacks(weighed.tokens, weighed.workers[at], weighed.depths)


def cheapest(ask: CostAsk, group: Group, steps: Steps, usable: Usable | None) -> Offer | None:
    """The best offer of this group; None when nobody there decodes."""
    side, sources = group.decode, group.prefill
    alone = ask.local or not sources.members
    new = 0.0 if ask.session else ask.tokens - (steps[0][0] if steps else 0.0)  # a session stays, however long its prompts grow
    decodes = side.look(steps, ask.ring_key, ask.bound, usable, ask.tokens, new if alone else 0.0)
    if not decodes:
        return None
    prefills = sources.look(steps, ask.ring_key, ask.bound, usable, ask.tokens, new) if not alone else []
    if ask.session:
        decodes, prefills = _own(decodes, side, ask), _own(prefills, sources, ask)
    looked, share, depths = len(decodes) + len(prefills), 0.0 if steps else EPSILON_SHARE, _two_of(steps)
    missing = lacking = _missing(ask.tokens, decodes, depths)
    if side.ramping and steps:
        lacking = _missing(ask.tokens, decodes, _two_of(side.with_common(steps)))
    waits = _waits(ask, group, decodes)
    remote = _remote_costs(ask, group, decodes, lacking, waits) if prefills else []
    here = missing if prefills else lacking
    local = _local_costs(ask, group, decodes, here, waits, depths[0]) if ask.by_cost or not prefills else remote
    ask.seen.append(Weighed(group.key, decodes, ask.tokens, depths, remote or local, local))
    if not prefills or min(missing) < ask.min_uncached:
        at = _settle(local, decodes, side, ask, share)
        if not prefills or missing[at] < ask.min_uncached:
            why = "few uncached tokens" if prefills else _WHY_ALONE[ask.local]
            return Offer(local[at], None, decodes[at], missing[at], 0.0, why, looked)
    counted = _two_of(sources.with_common(steps)) if sources.ramping and steps else depths
    costs = _prefill_costs(ask, group.prefill, prefills, counted)
    ask.seen.append(Weighed(group.key, prefills, ask.tokens, depths, costs))
    best = None
    if not ask.by_cost or min(local) > min(costs) + min(remote):
        best = _remote(ask, group, prefills, decodes, costs, remote, missing, depths, counted)
        best.looked += looked
    if best is None or (ask.by_cost and min(local) <= best.cost_s):
        at = _settle(local, decodes, side, ask, share)
        best = Offer(local[at], None, decodes[at], missing[at], 0.0, "local prefill costs less", best.looked if best else looked)
    if ask.by_cost and ask.keeps and 0 < best.decode.slots <= best.decode.inflight:
        i = _settle(costs, prefills, group.prefill, ask, share)
        kept = costs[i] + KEEP_SHARE * ask.others * group.output.value * group.gap.base
        if kept < best.cost_s:
            lacks = _lacks(ask.tokens, prefills[i], depths)
            return Offer(kept, None, prefills[i], lacks, 0.0, "decode workers are full: kept on prefill", best.looked)
    return best


def _own(workers: list[Candidate], side: Side, ask: CostAsk) -> list[Candidate]:
    """The session's: the first of these on the ring, whatever it costs there."""
    if len(workers) < 2:
        return workers
    return [workers[side.ring.nearest(ask.ring_key, [worker.uid for worker in workers])]]


_WHY_ALONE: Final = {True: "local: nothing to hand over, or after a failure", False: "no compatible prefill worker"}


def _remote(
    ask: CostAsk, group: Group, prefills: Sequence[Candidate], decodes: Sequence[Candidate], costs: list[float],
    remote: list[float], missing: list[float], depths: Depths, counted: Depths,
) -> Offer:  # fmt: skip
    """The best pair; `looked`: those pairs that were compared. `counted`: the depths that costs go by."""
    share = 0.0 if depths[0] else EPSILON_SHARE
    i = _settle(costs, prefills, group.prefill, ask, share)
    j = _settle(remote, decodes, group.decode, ask, share)
    above, tried = _above(group, prefills[i], decodes[j], missing[j]), 0
    if above > EPSILON_S + share * (costs[i] + remote[j]):
        if inf in costs:
            costs = _prefill_costs(ask, group.prefill, prefills, counted, all_of_them=True)
            ask.seen[-1] = Weighed(group.key, prefills, ask.tokens, depths, costs)
        i, j, above, tried = _try_pairs(group, prefills, decodes, costs, remote, missing)
    lacks = _lacks(ask.tokens, prefills[i], depths)
    return Offer(costs[i] + remote[j] + above, prefills[i], decodes[j], lacks, missing[j], "remote prefill", tried)


def _missing(tokens: float, workers: Sequence[Candidate], depths: Depths) -> list[float]:
    """Tokens of the prompt that each of them has not cached."""
    held, mask, less, wider, more = depths
    if more:
        return [_lacks(tokens, worker, depths) for worker in workers]
    few, some, none = _lacking(tokens, held, less)
    return [few if (bit := worker.bit) & mask else some if bit & wider else none for worker in workers]


def _lacking(tokens: float, held: float, less: float) -> tuple[float, float, float]:
    """Tokens that somebody lacks who holds so much, less, nothing; at least one has to be computed."""
    return tokens - held if held < tokens else 1.0, tokens - less if less < tokens else 1.0, tokens if tokens > 0.0 else 1.0


def _remote_costs(
    ask: CostAsk, group: Group, workers: Sequence[Candidate], missing: list[float], waits: list[float] | None
) -> list[float]:
    """Waiting for KV from elsewhere on each decode worker, without the pair's own part."""
    others, base, slope = ask.others, group.pairs.least_base, group.pairs.least_slope
    costs = [w.inflight * w.drag_s * others + base for w in workers]
    for i in range(len(costs)):  # here and below: the compiler calls zip(strict=True) as Python does, a third of a microsecond
        costs[i] += missing[i] * slope
    return costs if waits is None else _sums(costs, waits)


def _sums(costs: list[float], more: list[float]) -> list[float]:
    return [costs[i] + more[i] for i in range(len(costs))]


def _local_costs(
    ask: CostAsk, group: Group, workers: Sequence[Candidate], missing: list[float], waits: list[float] | None, held: float,
    cap: float = 0.0,
) -> list[float]:  # fmt: skip
    """Prefilling on each decode worker itself; `inf` where that cannot be the least, or is above the cap of heat."""
    now, others, tokens, prune = ask.now, ask.others, ask.tokens, waits is None
    weight, spared, usual = _heat(ask, group.decode, held)
    costs: list[float] = []  # list[float]() would raise and swallow an AttributeError inside: 1 us
    cap, little, least, limit = cap or usual, EPSILON_SHARE * tokens, inf, inf
    for worker in workers:
        lacks = missing[len(costs)]
        work = lacks * worker.token_s
        cost, queue = worker.base_s + work, worker.free_at - now
        if queue > 0.0:
            cost += queue
        heat = worker.heat
        if cost > limit or (heat + lacks > cap and heat > HEAT_LEAST * (tokens - lacks) + little):
            costs.append(inf)
            continue
        streams = worker.inflight
        stalls = streams * STALL + work * worker.crowd
        if heat > spared:
            stalls += (heat - spared) * weight
        cost += (streams * worker.drag_s + work * stalls) * others
        costs.append(cost)
        if cost < least:
            least = cost
            if prune:
                limit = cost + EPSILON_S + EPSILON_SHARE * cost
    if least == inf:
        return _local_costs(ask, group, workers, missing, waits, held, _coolest(tokens, group.decode, workers))
    return costs if waits is None else _sums(costs, waits)


def _prefill_costs(
    ask: CostAsk, side: Side, workers: Sequence[Candidate], depths: Depths, *, all_of_them: bool = False, cap: float = 0.0
) -> list[float]:
    """Queue + prefill, and what others lose by it, of each prefill worker; `inf` behind a queue that is too long in any case, or
    above the cap of heat."""
    now, others, tokens, prune = ask.now, ask.others, ask.tokens, not (all_of_them or ask.adapter)
    held, mask, less, wider, more = depths
    few, some, none = _lacking(tokens, held, less)
    weight, spared, usual = _heat(ask, side, held)
    costs: list[float] = []
    cap, little, least, limit = cap or usual, EPSILON_SHARE * tokens, inf, inf
    for worker in workers:
        bit = worker.bit
        lacks = few if bit & mask else some if bit & wider else _lacks(tokens, worker, depths) if more else none
        work = lacks * worker.token_s
        cost, queue = worker.base_s + work, worker.free_at - now
        if queue > 0.0:
            cost += queue
        heat = worker.heat
        if cost > limit or (heat + lacks > cap and heat > HEAT_LEAST * (tokens - lacks) + little):
            costs.append(inf)
            continue
        stalls = work * worker.crowd
        if heat > spared:
            stalls += (heat - spared) * weight
        cost += work * stalls * others
        costs.append(cost)
        if cost < least:
            least = cost
            if prune:
                limit = cost + EPSILON_S + EPSILON_SHARE * cost
    if least == inf:
        return _prefill_costs(ask, side, workers, depths, all_of_them=all_of_them, cap=_coolest(tokens, side, workers))
    if ask.adapter:
        costs = [cost + (ask.adapter not in w.adapters) * ADAPTER_S for cost, w in zip(costs, workers, strict=True)]
    return costs


def _lacks(tokens: float, worker: Candidate, depths: Depths) -> float:
    """Tokens of the prompt that it has not cached."""
    held, mask, less, wider, more = depths
    known = held if worker.bit & mask else less if worker.bit & wider else 0.0
    known = known or next((fewer for fewer, holders in more if worker.bit & holders), 0.0)
    return tokens - known if known < tokens else 1.0


def _heat(ask: CostAsk, side: Side, held: float) -> tuple[float, float, float]:
    """(what a token of heat adds to each second of work, tokens of it that add nothing, tokens that nobody is brought above)."""
    if ask.session:
        return 0.0, inf, inf
    tokens, lump, mean = ask.tokens, side.lump, side.heat / len(side.members)
    floor = COLD_LEAST * lump if lump else HEAT_LEAST * tokens
    cap = ask.bound * mean
    cap = cap if cap > floor else floor  # a call of max costs more than the rest of the line
    usual = HEAT_LEAST * tokens if held else floor
    usual = mean if mean > usual else usual
    return HEAT_WORTH / usual, 0.0 if held else usual, cap


def _coolest(tokens: float, side: Side, workers: Sequence[Candidate]) -> float:
    """The cap where nobody is below the usual one: about the mean, or the least of these."""
    return max(side.heat / len(side.members), min([worker.heat for worker in workers])) + tokens * (1.0 + EPSILON_SHARE) + 1.0


def _two_of(steps: Steps) -> Depths:
    """The first two steps apart: one or two depths are what most prompts have."""
    if len(steps) == 2:
        (held, mask), (less, wider) = steps
        return held, mask, less, wider, ()
    if len(steps) < 2:
        held, mask = steps[0] if steps else (0.0, 0)
        return held, mask, 0.0, 0, ()
    return *steps[0], *steps[1], steps[2:]


def _waits(ask: CostAsk, group: Group, workers: Sequence[Candidate]) -> list[float] | None:
    """What a stream waits on each decode worker for a slot and for its adapter. None: nothing."""
    found = None
    if workers[0].slots > 0 and group.decode.reaches(workers[0].slots):
        turn_s = group.answer.value
        found = [max(0, w.inflight - w.slots + 1) * turn_s / max(1, w.slots) for w in workers]
    if ask.adapter:
        loads = [(ask.adapter not in w.adapters) * ADAPTER_S for w in workers]
        found = loads if found is None else _sums(found, loads)
    return found


def _above(group: Group, prefill: Candidate, decode: Candidate, tokens: float) -> float:
    """What this pair costs above the least of all pairs."""
    return group.pairs.above_s(prefill.uid, decode.uid, tokens)


def _try_pairs(
    group: Group, prefills: Sequence[Candidate], decodes: Sequence[Candidate], costs: list[float], remote: list[float],
    missing: list[float],
) -> tuple[int, int, float, int]:  # fmt: skip
    """(prefill, decode, above, pairs tried) of the few best of each. A pair that cannot win any more is not tried."""
    few_p, few_d = _few_best(costs), _few_best(remote)
    above_s = group.pairs.above_s
    found, least, tried = (few_p[0], few_d[0], 0.0), float("inf"), 0
    for i in few_p:
        for j in few_d:
            at_least = costs[i] + remote[j]
            if at_least >= least:
                break  # the next ones of this row cost more
            tried += 1
            above = above_s(prefills[i].uid, decodes[j].uid, missing[j])
            if at_least + above < least:
                found, least = (i, j, above), at_least + above
    return (*found, tried)


def _few_best(costs: list[float]) -> Sequence[int]:
    if len(costs) == 2:  # the smallest fleet that has a choice is the most common one
        return (0, 1) if costs[0] <= costs[1] else (1, 0)
    return sorted(range(len(costs)), key=costs.__getitem__)[:TRIED]


def _settle(costs: list[float], workers: Sequence[Candidate], side: Side, ask: CostAsk, share: float) -> int:
    """Which of the near-equal cheapest: the one that comes first on the ring."""
    least = inf
    for cost in costs:  # `min` of the list takes 900 instructions for four of them
        least = min(least, cost)
    most = least + EPSILON_S + share * least
    near = [i for i in range(len(costs)) if costs[i] <= most]
    return near[0] if len(near) == 1 else near[side.ring.nearest(ask.ring_key, [workers[i].uid for i in near])]
