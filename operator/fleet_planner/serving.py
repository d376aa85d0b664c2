"""Which ready workers the routers may use: the ratio as an invariant, not as a target.

Workers with equal compatibility hashes form a group, because only they hand KV to each other. Of each group the largest part
inside the ratio serves; a ready worker that has no partner yet is held. Sums of groups inside the ratio are inside it, so what
serves is always inside min and max, whoever gets ready or lost first.

Workers on failing devices are passed over while anything else can serve. One exception keeps a fleet alive: when losses leave
no allowed part at all, and something serves at this moment, everything that is ready goes on serving (a decode worker can
prefill by itself), and the status says that the ratio is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from fleet_api.quantities import Ratio
from fleet_planner.ratio import Pair, largest
from fleet_planner.replicas import Replica


def choose_serving(replicas: Sequence[Replica], low: Ratio, high: Ratio) -> frozenset[str]:
    """Uids of the leaders that serve, out of the `replicas` of one tier that stay."""
    ready = [replica for replica in replicas if replica.ready]
    chosen = _paired(ready, low, high)
    if not chosen and any(replica.serving for replica in ready):
        chosen = ready
    return frozenset(replica.leader.uid for replica in chosen)


def could_serve(replicas: Sequence[Replica], low: Ratio, high: Ratio) -> frozenset[str]:
    """Uids of the leaders that are ready, without those on failing devices as long as others can serve."""
    ready = [replica for replica in replicas if replica.ready]
    well = [replica for replica in ready if not replica.sick]
    able = well if len(well) < len(ready) and _grouped(well, low, high) else ready
    return frozenset(replica.leader.uid for replica in able)


def serves_without(replicas: Sequence[Replica], gone: Collection[str], ratio: tuple[Ratio, Ratio]) -> bool:
    """Whether the others serve inside the ratio when leaders of these uids go."""
    return bool(_grouped([replica for replica in replicas if replica.ready and replica.leader.uid not in gone], *ratio))


def still_needed(
    replicas: Sequence[Replica], gone: Collection[str], want: Pair, floor: Pair, ratio: tuple[Ratio, Ratio]
) -> frozenset[str]:
    """Uids of the pods among `gone` that must not go yet: without them fewer workers would serve than now and than `floor`. Those
    on nodes that go away stay even up to `want`: they hold devices that nobody counts, so that it costs nothing. One role of one
    revision goes as a whole or not at all. While some serve in pairs, who would be left without a partner counts for nothing:
    only losses may take the ratio away."""
    if not gone:
        return frozenset()
    classes: dict[tuple[bool, bool, str, str], list[Replica]] = defaultdict(list)
    for replica in replicas:
        if replica.ready and replica.leader.uid in gone:
            classes[bool(replica.leaving), not replica.sick, replica.leader.revision, replica.role].append(replica)
    staying = [replica for replica in replicas if replica.leader.uid not in gone]
    kept = dict(classes)
    pairs = bool(classes) and bool(_paired([replica for replica in replicas if replica.ready], *ratio))
    serves = _served(replicas, ratio, pairs=pairs) if classes else (0, 0)
    for key in sorted(classes):  # those on nodes that go away after the others, as these may leave less than `want`
        rest = [*staying, *(one for name, found in kept.items() if name != key for one in found)]
        without, enough = _served(rest, ratio, pairs=pairs), want if key[0] else floor
        if all(left >= min(now, least) for left, now, least in zip(without, serves, enough, strict=True)):
            kept.pop(key)
            serves = without
    return frozenset(pod.uid for found in kept.values() for one in found for pod in one.pods)


def _served(replicas: Sequence[Replica], ratio: tuple[Ratio, Ratio], *, pairs: bool) -> Pair:
    if pairs:
        roles = [replica.role for replica in _paired([replica for replica in replicas if replica.ready], *ratio)]
    else:
        chosen = choose_serving(replicas, *ratio)
        roles = [replica.role for replica in replicas if replica.leader.uid in chosen]
    return roles.count("prefill"), roles.count("decode")


def _paired(ready: Sequence[Replica], low: Ratio, high: Ratio) -> list[Replica]:
    """Those that serve inside the ratio, without those on failing devices as long as others can."""
    return _grouped([replica for replica in ready if not replica.sick], low, high) or _grouped(ready, low, high)


def _grouped(ready: Sequence[Replica], low: Ratio, high: Ratio) -> list[Replica]:
    groups: dict[str, list[Replica]] = defaultdict(list)
    for replica in ready:
        groups[replica.leader.compat].append(replica)
    return [replica for group in groups.values() for replica in _inside(group, low, high)]


def _inside(group: Sequence[Replica], low: Ratio, high: Ratio) -> Iterable[Replica]:
    by_role = {role: sorted((r for r in group if r.role == role), key=_rank) for role in ("prefill", "decode")}
    prefill, decode = largest((len(by_role["prefill"]), len(by_role["decode"])), low, high)
    return [*by_role["prefill"][:prefill], *by_role["decode"][:decode]]


def _rank(replica: Replica) -> tuple[bool, bool, float, str]:
    """What serves goes on serving, so that nothing changes places; then nodes that stay, then age."""
    return not replica.serving, bool(replica.leaving), replica.leader.ready_since or 0.0, replica.leader.name
