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
from collections.abc import Iterable, Sequence

from fleet_api.quantities import Ratio
from fleet_planner.ratio import largest
from fleet_planner.replicas import Replica


def choose_serving(replicas: Sequence[Replica], low: Ratio, high: Ratio) -> frozenset[str]:
    """Uids of the leaders that serve, out of the `replicas` of one tier that stay."""
    ready = [replica for replica in replicas if replica.ready]
    chosen = _grouped([replica for replica in ready if not replica.sick], low, high) or _grouped(ready, low, high)
    if not chosen and any(replica.serving for replica in ready):
        chosen = ready
    return frozenset(replica.leader.uid for replica in chosen)


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
