"""Which pairs of workers are made to meet before a request of a client's does it. Pure.

The first KV that moves between two workers pays for their handshake (NIXL: metadata, connections; tenths of a second to
seconds). A worker that joins is warmed with some of its partners: those that come first on their ring from its own place, so that
every router process finds the same. Each pair is one process's to warm, where several share a port. A pair between which
no KV moves is tried as often as it takes to put it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import xxhash

from fleet_router.health.breaker import PAIR_FAILURES_MOST
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.group import Group
from fleet_router.policy.ring import VIRTUAL_NODES
from fleet_router.policy.side import Side

Pair = tuple[str, str]
"""Uids: (prefill, decode)."""
LEFT_MOST: Final = 4_096
"""Pairs that wait; more are not warmed."""
LOOKED_MOST: Final = 512
"""At a time: of thousands that may not be used at the moment requests would feel it."""
PAUSE_S: Final = 0.5
"""Between two tries of a pair."""


def partners(side: Side, uid: str, most: int) -> list[str]:
    """The first `most` workers of this side on its ring from the place of `uid`, each once."""
    found: dict[str, None] = {}
    for name in side.ring.along(xxhash.xxh3_64_intdigest(uid.encode()), VIRTUAL_NODES * len(side.members)):
        if len(found) >= most:
            break
        found[name] = None
    return list(found)


def owner(pair: Pair, processes: int) -> int:
    """Which of so many processes warms it."""
    return xxhash.xxh3_64_intdigest("\0".join(pair).encode()) % processes


@dataclass
class Waits:
    """A pair that is still to be warmed."""

    tries: int = 0
    not_before: float = 0.0


@dataclass
class Plan:
    """What one process has to warm. `member`: which of `processes` it is."""

    member: int = 0
    processes: int = 1
    left: dict[Pair, Waits] = field(default_factory=dict)
    """In the order in which their workers joined; where more wait than are looked at, those that may not be used go behind."""
    running: set[Pair] = field(default_factory=set)
    _known: dict[str, tuple[Candidate, tuple[str, str]]] = field(default_factory=dict)
    """Workers, each with the group that it was in."""

    def follow(self, groups: Iterable[Group], most: int) -> None:
        """These workers from now on; `most`: pairs of each one that joins, 0: off; when it is on again, all of them join. What
        is under way goes on."""
        there = {worker.uid: (worker, group) for group in groups for worker in (*group.prefill.members, *group.decode.members)}

        def are_pair(prefill: str, decode: str) -> bool:
            giver, taker = there.get(prefill), there.get(decode)
            if giver is None or taker is None or giver[1] is not taker[1]:
                return False
            return (giver[0].role, taker[0].role) == ("prefill", "decode")

        self.left = {pair: waits for pair, waits in self.left.items() if most and are_pair(*pair)}
        for uid, (worker, group) in there.items():
            if self._known.get(uid) != (worker, group.key):  # an old uid at another place, or in another group, is another worker
                for pair in self._of(uid, group, most):
                    if len(self.left) < LEFT_MOST and owner(pair, self.processes) == self.member:
                        self.left.setdefault(pair, Waits())
        self._known = {uid: (worker, group.key) for uid, (worker, group) in there.items()} if most else {}

    @staticmethod
    def _of(uid: str, group: Group, most: int) -> list[Pair]:
        if any(worker.uid == uid for worker in group.prefill.members):
            return [(uid, decode) for decode in partners(group.decode, uid, most)]
        return [(prefill, uid) for prefill in partners(group.prefill, uid, most)]

    def due(self, now: float, parallel: int, met: Callable[[Pair], bool], usable: Callable[[Pair], bool]) -> list[Pair]:
        """Pairs that are to be warmed now: so many at a time together with those under way, each worker in one of them. Pairs
        that have met by themselves are done; those that may not be used at the moment (a worker, or they are put out) wait."""
        found: list[Pair] = []
        busy = {uid for pair in self.running for uid in pair}
        for pair, waits in list(islice(self.left.items(), LOOKED_MOST)):
            if len(self.running) + len(found) >= parallel:
                break  # this is asked whenever one has ended
            if met(pair):
                del self.left[pair]
            elif now >= waits.not_before and busy.isdisjoint(pair) and usable(pair):
                found.append(pair)
                busy.update(pair)
            elif len(self.left) > LOOKED_MOST:
                self.left[pair] = self.left.pop(pair)  # the others' turn
        self.running.update(found)
        return found

    def ended(self, pair: Pair, now: float, *, moved: bool | None) -> None:
        """It was tried. `moved` None: nothing can be told of the pair (a worker did not answer, or refused); it is left alone."""
        self.running.discard(pair)
        waits = self.left.get(pair)
        if waits is None:
            return
        waits.tries += 1
        waits.not_before = now + PAUSE_S
        if moved is not False or waits.tries >= PAIR_FAILURES_MOST:
            del self.left[pair]
