"""One request → one (prefill, decode) pair, or a reason why not. Pure: the caller passes loads, matches and a turn counter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleet_router.config import Policy
from fleet_router.policy.ring import Ring, load_cap

PIECES_PER_REQUEST = 8
"""kvAware: one request in flight weighs as much as this many uncached 256-byte pieces (2 KiB of prompt)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as routing sees it."""

    uid: str
    role: str
    group: tuple[str, str]
    """(tier, compatibility hash): KV moves only inside a group."""
    inflight: int


@dataclass(frozen=True, slots=True)
class Ask:
    """What routing needs to know about a request."""

    keys: Sequence[int]
    ring_key: int
    uncached_limit_pieces: float
    """Prompts with fewer uncached pieces than this are prefilled on the decode worker."""
    turn: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`prefill` None: the decode worker prefills itself."""

    prefill: str | None
    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """No worker; `reason` is for the answer and the metric."""

    reason: str


def choose(
    ask: Ask,
    candidates: Collection[Candidate],
    matched: Mapping[str, int],
    rings: Mapping[str, Ring],
    policy: Policy,
    bound: float,
) -> Choice | Refusal:
    """The pair for this request. `rings` holds one ring per role; workers that are not candidates are passed over."""
    decodes = [c for c in candidates if c.role == "decode"]
    if not decodes:
        return Refusal("no decode worker is serving")
    decode = pick(ask, decodes, matched, rings["decode"], policy, bound)
    prefills = [c for c in candidates if c.role == "prefill" and c.group == decode.group]
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
    open_to = {w.uid: w for w in workers if w.inflight < cap}
    order = [open_to[uid] for uid in ring.walk(ask.ring_key) if uid in open_to]
    if not order:  # cannot be: the mean is below the cap; kept total for safety
        return min(workers, key=lambda w: w.inflight)
    if policy == "prefixHash" or not any(w.uid in matched for w in order):
        return order[0]
    return min(order, key=lambda w: len(ask.keys) - matched.get(w.uid, 0) + PIECES_PER_REQUEST * w.inflight)


def hash_order(uid: str) -> int:
    """Stable spread of equally loaded workers over turns."""
    return sum(uid.encode()) * 31
