"""A canary's share of the requests. Pure.

A conversation stays on the side that holds its KV, else the canary would be judged by cold caches that the split itself made;
new conversations go where the share is short. The share holds within half: stickiness yields where it would starve or flood
the canary.

A session (routing.sessionHeader) has its side by its name: on every router the same one, from its first request to the end of the
canary, but that a share that grows takes over some more. The share is one of the sessions, whatever number of requests each has;
what is missing of the requests comes from those without a session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import xxhash

from fleet_wire.endpoints import Split

STARVED: Final = 20
"""So many requests are due to the canary, and it had none of them."""
WIDER: Final = 1.05
SLACK: Final = 0.5
"""How far the share of one side may fall behind or run ahead before KV no longer decides."""


def to_canary(percent: int, seen: int, taken: int, canary_held: float, other_held: float) -> bool:
    """Whether the next request goes to the canary, after `taken` of `seen` requests did. `..._held`: the longest prefix of the
    prompt that some worker of that side holds."""
    due = (seen + 1) * percent / 100
    if taken < due * (1 - SLACK):
        return True
    if taken > due * (1 + SLACK) + 1:
        return False
    if canary_held != other_held:
        return canary_held > other_held
    return taken < due


def session_point(session: int, tier: str, revision: str) -> float:
    """Where a session stands among all, 0 to 1, by its ring key. In each revision's canary somewhere else."""
    return xxhash.xxh3_64_intdigest(f"{session:x} {tier} {revision}".encode()) / 2**64


def session_edge(percent: int, edge: float, passed: int) -> float:
    """Sessions that stand before it are the canary's; `edge`: it so far. Where so few sessions come that none of them is, and
    `passed` requests in a row were not, the canary would be judged by nothing and never end: the edge moves until one is."""
    edge = max(edge, percent / 100)
    return min(1.0, edge * WIDER) if passed * percent >= STARVED * 100 else edge


@dataclass
class Share:
    """Requests since a split began."""

    seen: int = 0
    taken: int = 0
    taken_at: int = 0
    """How many were seen when the last one was taken."""
    edge: float = 0.0
    """See `session_edge`."""

    def has_session(self, split: Split, session: int) -> bool:
        """The canary does."""
        self.edge = session_edge(split.percent, self.edge, self.seen - self.taken_at)
        return session_point(session, split.tier, split.revision) < self.edge

    def count(self, taken: bool) -> None:
        """One more."""
        self.seen += 1
        if taken:
            self.taken += 1
            self.taken_at = self.seen
