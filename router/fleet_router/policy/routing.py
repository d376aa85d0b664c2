"""All that a router decides from: groups of workers, what they were sent, how a prompt comes to its pair. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from fleet_router.kvindex.approximate import ApproximateIndex
from fleet_router.kvindex.masks import Bits
from fleet_router.kvindex.pieces import BYTES_OF, Beginnings, piece_after
from fleet_router.kvindex.underway import Underway
from fleet_router.policy.candidate import CROWD_S, Candidate
from fleet_router.policy.cost import cheapest
from fleet_router.policy.estimate import Mean
from fleet_router.policy.group import Group
from fleet_router.policy.ring import SPACE, cap_of
from fleet_router.policy.side import HEAT_S, Steps, Usable
from fleet_router.policy.terms import CostAsk, Offer
from fleet_router.policy.trip import Trip

INDEX_ENTRIES: Final = 500_000
"""When it is full: 40 MB of prompts of 3 KB, 140 MB of such that have one key each."""
BYTES_PER_TOKEN: Final = 4.0
"""Prior of prompt bytes per token, JSON and chat template included."""
RELAX_KEEP: Final = 0.9
TICK_S: Final = 0.5
CROWD_KEEP: Final = 1.0 - TICK_S / CROWD_S
HEAT_KEEP: Final = 1.0 - TICK_S / HEAT_S
RELAX_PARTS: Final = 20
"""With a tick of half a second: a tenth is forgotten every ten seconds."""
LEAST_SHARE: Final = 0.05


class Routing:
    """State of one router process. Workers join and leave through `update`."""

    def __init__(self, entries: int = INDEX_ENTRIES) -> None:
        self.groups: dict[tuple[str, str], Group] = {}
        self.bits = Bits()
        self.index = ApproximateIndex(entries)
        self.underway = Underway()
        self.beginnings = Beginnings()
        self.bytes_per_token = Mean(BYTES_PER_TOKEN)
        self._members: dict[str, Candidate] = {}
        self._joined: dict[str, float] = {}
        """Workers in their slow start: when they joined."""
        self._part = 0

    def update(self, workers: Sequence[Candidate], now: float, slow_start_s: float) -> None:
        """These workers from now on. Those that join a running set begin slowly."""
        wanted = {worker.uid: worker for worker in workers}
        before = self._members
        for uid in [uid for uid, worker in before.items() if wanted.get(uid) is not worker]:
            self._leave(uid)
        self._members = wanted
        groups: dict[tuple[str, str], list[tuple[Candidate, int]]] = {worker.group: [] for worker in workers}
        for worker in workers:
            groups[worker.group].append((worker, self.bits.of(worker.uid)))
        self.groups = {key: self.groups.get(key) or Group(key) for key in groups}
        for worker in workers:
            if before.get(worker.uid) is not worker:
                self.index.join(worker.uid, self.bits.of(worker.uid))
                self.groups[worker.group].adopt(worker)
                if before and slow_start_s > 0:
                    self._joined[worker.uid] = now
                    worker.share = LEAST_SHARE
                    worker.heat = self.groups[worker.group].heat_of(worker.role)
        for key, members in groups.items():
            self.groups[key].update(members)

    def _leave(self, uid: str) -> None:
        worker = self._members[uid]
        worker.home = None
        self.index.remove(uid)
        self.underway.forget(self.bits.of(uid))
        self.bits.release(uid)
        self._joined.pop(uid, None)
        if (group := self.groups.get(worker.group)) is not None:
            group.pairs.forget(uid)

    def tick(self, now: float, slow_start_s: float) -> None:
        """Twice a second: slow starts go on, what was learnt long ago counts less."""
        for uid, since in list(self._joined.items()):
            worker = self._members[uid]
            worker.share = min(1.0, max(LEAST_SHARE, (now - since) / slow_start_s if slow_start_s > 0 else 1.0))
            if worker.share >= 1.0:
                del self._joined[uid]
            if worker.home is not None:
                worker.home.mark_ramping()
        for worker in self._members.values():
            worker.crowd *= CROWD_KEEP
        for group in self.groups.values():
            group.relax(RELAX_KEEP, self._part, RELAX_PARTS)
            group.prefill.cool(HEAT_KEEP)
            group.decode.cool(HEAT_KEEP)
        self._part = (self._part + 1) % RELAX_PARTS

    def known(self, keys: list[int], size: int, tokens: float, among: int = -1) -> list[tuple[float, int]]:
        """What the approximate index knows of a prompt of `size` bytes and about so many tokens: (tokens, workers as bits), most
        first. The tail behind the last full piece goes with the piece before it: less than a hundred tokens, of long prompts less
        than an eighth."""
        return _in_tokens(self.index.depths(keys, among), len(keys), size, tokens)

    def coming(self, keys: list[int], size: int, tokens: float, among: int) -> list[tuple[float, int]]:
        """The same of what these workers were sent and have not computed yet: KV events tell of it only then."""
        return _in_tokens(self.underway.depths(keys, among), len(keys), size, tokens)

    def depart(self, offer: Offer, now: float, adapter: str, stream: bool, whole: bool, keys: list[int], told: bool) -> Trip:
        """A prompt with these keys is sent to its first worker. `whole`: its answer's length and time will be told; `told`: KV
        events tell of it once it is computed."""
        group = self.groups[offer.decode.group]
        if offer.prefill is None and not group.prefill.members:
            self.index.add(keys, offer.decode.uid)  # who asks next would have it computed once more elsewhere
        underway = self.underway if told else None
        return Trip(group, offer, now, stream=stream, adapter=adapter, learns_whole=whole, underway=underway, keys=keys)

    def decide(self, ask: CostAsk, steps: Steps, *, tier: str = "", usable: Usable | None = None) -> Offer | None:
        """The cheapest offer of all groups, of this tier if it can serve at all; None when nobody decodes."""
        groups = self.groups.values()
        if len(groups) == 1:
            (group,) = groups
            return cheapest(ask, group, steps, usable)
        find = _of_session if ask.session else _best
        if tier:
            found = find([group for key, group in self.groups.items() if key[0] == tier], ask, steps, usable)
            if found is not None:
                return found
        return find(groups, ask, steps, usable)


def _in_tokens(depths: list[tuple[int, int]], count: int, size: int, tokens: float) -> list[tuple[float, int]]:
    whole = count if size - BYTES_OF[count] < piece_after(count) else 0
    share, found = tokens / size, []
    for pieces, mask in depths:
        found.append((tokens if pieces == whole else BYTES_OF[pieces] * share, mask))
    return found


def _of_session(groups: Collection[Group], ask: CostAsk, steps: Steps, usable: Usable | None) -> Offer | None:
    """Of the group of its own decode worker, as if all of them were one side: the first on the ring that is within the bound of
    its group and of all groups together, whatever it costs there."""
    there = [group for group in groups if group.decode.members]
    total = sum([group.decode.inflight for group in there])
    cap = cap_of(total, sum([len(group.decode.members) for group in there]), ask.bound)
    home: Group | None = None
    least = 2 * SPACE
    for group in there:
        side = group.decode
        found = side.look(steps, ask.ring_key, ask.bound, usable, ask.tokens)
        if not found:
            continue
        own = found[side.ring.nearest(ask.ring_key, [worker.uid for worker in found])]
        away = side.ring.away(ask.ring_key, own.uid) + (SPACE if own.inflight >= cap * own.share else 0)
        if away < least:
            home, least = group, away
    return None if home is None else cheapest(ask, home, steps, usable)


def _best(groups: Collection[Group], ask: CostAsk, steps: Steps, usable: Usable | None) -> Offer | None:
    best: Offer | None = None
    for group in groups:
        found = cheapest(ask, group, steps, usable)
        if found is not None and (best is None or found.cost_s < best.cost_s):
            best = found
    return best
