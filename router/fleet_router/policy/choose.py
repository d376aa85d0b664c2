"""The policies that go by one rule alone: by the prompt's hash, by load, by turns. kvAware is in `cost.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fleet_router.config import Policy
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.chosen import Choice, Refusal, SimpleAsk
from fleet_router.policy.ring import Ring, load_cap
from fleet_router.policy.side import Steps

NO_DECODE: Final = Refusal("no decode worker is serving")


def choose(
    ask: SimpleAsk,
    candidates: Mapping[str, Sequence[Candidate]],
    steps: Steps,
    rings: Mapping[str, Ring],
    policy: Policy,
    bound: float,
) -> Choice | Refusal:
    """The pair for this request. `candidates` and `rings` are by role; workers that are not candidates are passed over."""
    decodes = candidates["decode"]
    if not decodes:
        return NO_DECODE
    decode = pick(ask, decodes, rings["decode"], policy, bound)
    prefills = [c for c in candidates["prefill"] if c.group == decode.group]
    if not prefills:
        return Choice(None, decode.uid, "no compatible prefill worker")
    if ask.tokens - next((held for held, mask in steps if mask & decode.bit), 0.0) < ask.min_uncached:
        return Choice(None, decode.uid, "few uncached tokens")
    prefill = pick(ask, prefills, rings["prefill"], policy, bound)
    return Choice(prefill.uid, decode.uid, "remote prefill")


def pick(ask: SimpleAsk, workers: Sequence[Candidate], ring: Ring, policy: Policy, bound: float) -> Candidate:
    """One worker of one role."""
    if policy == "roundRobin":
        return _in_turn(ask.turn, workers)
    if policy == "leastLoad":
        return _idlest(ask.turn, workers)
    cap = load_cap([w.inflight for w in workers], bound)
    best = [w for w in workers if w.inflight < cap * w.share]
    return best[0] if len(best) == 1 else _first_on(ring, ask.ring_key, best or workers)


def _idlest(turn: int, workers: Sequence[Candidate]) -> Candidate:
    """Of those with the least load each in its turn. Of one in its slow start a request counts for more, the one at hand too."""
    loads = [(worker.inflight + 1 - worker.share) / worker.share for worker in workers]
    least = min(loads)
    idle = [worker for i, worker in enumerate(workers) if loads[i] == least]
    return idle[turn % len(idle)]


def _in_turn(turn: int, workers: Sequence[Candidate]) -> Candidate:
    """Whose turn it is. One in its slow start takes that share of its turns; the others have the rest in turns of their own."""
    around, at = divmod(turn, len(workers))
    found = workers[at]
    if found.share >= 1.0 or int((around + 1) * found.share) > int(around * found.share):
        return found
    whole = [worker for worker in workers if worker.share >= 1.0]
    return whole[around % len(whole)] if whole else found


def _first_on(ring: Ring, key: int, workers: Sequence[Candidate]) -> Candidate:
    """The first of these clockwise from the key."""
    by_uid = {w.uid: w for w in workers}
    found = ring.first(key, by_uid)
    return workers[0] if found is None else by_uid[found]
