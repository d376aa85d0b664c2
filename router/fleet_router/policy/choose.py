"""One request → one (prefill, decode) pair, or a reason why not. Pure: the caller passes loads, matches and a turn counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fleet_router.config import Policy
from fleet_router.policy.ring import Ring, load_cap

PIECES_PER_REQUEST = 8
"""kvAware: one request in flight weighs as much as this many uncached 256-byte pieces (2 KiB of prompt)."""


@dataclass(slots=True)
class Candidate:
    """A worker as routing sees it; only read here."""

    uid: str
    role: str
    group: tuple[str, str]
    """(tier, compatibility hash): KV moves only inside a group."""
    inflight: int


class Ask(msgspec.Struct, frozen=True):
    """What routing needs to know about a request."""

    keys: Sequence[int]
    ring_key: int
    uncached_limit_pieces: float
    """Prompts with fewer uncached pieces than this are prefilled on the decode worker."""
    turn: int


class Choice(msgspec.Struct, frozen=True):
    """`prefill` None: the decode worker prefills itself."""

    prefill: str | None
    decode: str
    reason: str


class Refusal(msgspec.Struct, frozen=True):
    """No worker; `reason` is for the answer and the metric."""

    reason: str


def choose(
    ask: Ask,
    candidates: Mapping[str, Sequence[Candidate]],
    matched: Mapping[str, int],
    rings: Mapping[str, Ring],
    policy: Policy,
    bound: float,
) -> Choice | Refusal:
    """The pair for this request. `candidates` and `rings` are by role; workers that are not candidates are passed over."""
    decodes = candidates["decode"]
    if not decodes:
        return Refusal("no decode worker is serving")
    decode = pick(ask, decodes, matched, rings["decode"], policy, bound)
    prefills = [c for c in candidates["prefill"] if c.group == decode.group]
    if not prefills:
        return Choice(None, decode.uid, "no compatible prefill worker")
    uncached = len(ask.keys) - matched.get(decode.uid, 0)
    if uncached < ask.uncached_limit_pieces:
        return Choice(None, decode.uid, "few uncached tokens")
    prefill = pick(ask, prefills, matched, rings["prefill"], policy, bound)
    return Choice(prefill.uid, decode.uid, "remote prefill")


def pick(
    ask: Ask, workers: Sequence[Candidate], matched: Mapping[str, int], ring: Ring, policy: Policy, bound: float
) -> Candidate:
    """One worker of one role."""
    if policy == "roundRobin":
        return workers[ask.turn % len(workers)]
    if policy == "leastLoad":
        return min(workers, key=lambda w: (w.inflight, (ask.turn + hash_order(w.uid)) % 997))
    cap = load_cap([w.inflight for w in workers], bound)
    if policy != "kvAware" or not matched:
        best: list[Candidate] = [w for w in workers if w.inflight < cap]
    else:
        best = _nearest(workers, matched, cap)
    return best[0] if len(best) == 1 else _first_on(ring, ask.ring_key, best or workers)


def _nearest(workers: Sequence[Candidate], matched: Mapping[str, int], cap: int) -> list[Candidate]:
    """Those below their bound with the best of prefix and load; all of them when nobody knows anything of the prompt."""
    best: list[Candidate] = []
    least, anybody = 0, False
    for worker in workers:
        if worker.inflight < cap:
            known = matched.get(worker.uid, 0)
            score = PIECES_PER_REQUEST * worker.inflight - known
            anybody = anybody or known > 0
            if not best or score < least:
                best, least = [worker], score
            elif score == least:
                best.append(worker)
    return best if anybody else [w for w in workers if w.inflight < cap]


def _first_on(ring: Ring, key: int, workers: Sequence[Candidate]) -> Candidate:
    """The first of these clockwise from the key."""
    by_uid = {w.uid: w for w in workers}
    found = ring.first(key, by_uid)
    return workers[0] if found is None else by_uid[found]


def hash_order(uid: str) -> int:
    """Stable spread of equally loaded workers over turns."""
    return sum(uid.encode()) * 31
