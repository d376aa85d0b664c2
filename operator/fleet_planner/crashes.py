"""Which revisions crash: their workers' containers end by themselves, again and again, whether or not a request runs. Pure.

Three times is what counts, and three times a day of a worker's life: a dependency that comes up late, or a node that was started
anew, costs one. What lies outside of the revision is none of its crashes, as far as it can be told: workers on nodes that go away
or whose devices fail; those of one node while others of their role are well elsewhere. And no revision is to blame while workers
of another one are down after a crash, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet_planner.replicas import Replica
from fleet_planner.roles import ROLES

CRASHES_LEAST = 3
"""Fewer, in a day, may be chance. The kubelet starts a container anew at once, after 10 s, after 20 s and so on."""
DAY_S = 86_400.0


def crashing(replicas: Mapping[str, Sequence[Replica]], now: float) -> dict[str, str]:
    """By revision, in words: which of its workers crash; those whose workers do not are absent. `replicas`: by revision."""
    if not any(pod.crashes >= CRASHES_LEAST for found in replicas.values() for one in found for pod in one.pods):
        return {}
    judged = {name: [one for one in found if one.alive and not one.leaving and not one.sick] for name, found in replicas.items()}
    down = {name for name, found in judged.items() if any(_crashes(one) and not one.ready for one in found)}
    words = {name: _words(found, now) for name, found in judged.items() if not down - {name}}
    return {name: text for name, text in words.items() if text}


def _crashes(worker: Replica) -> int:
    """Of its pods the most: one that ends takes the others of its group along."""
    return max(pod.crashes for pod in worker.pods)


def is_often(crashes: int, created_at: float, now: float) -> bool:
    """Whether so many are no chance in the life of a pod."""
    return crashes >= CRASHES_LEAST * max(1.0, (now - created_at) / DAY_S)


def _words(workers: Sequence[Replica], now: float) -> str:
    """Of the role that has any, the worker that crashed most often; empty when none does, or when a node may be why."""
    for role in ROLES:
        mine = [one for one in workers if one.role == role]
        bad = [one for one in mine if is_often(_crashes(one), one.leader.created_at, now)]
        if bad and not _may_be_a_node(bad, [one for one in mine if one.ready and not _crashes(one)]):
            pod = max((pod for one in bad for pod in one.pods), key=lambda pod: pod.crashes)
            return f"its workers crash: {pod.name} crashed {pod.crashes} times{': ' + pod.message if pod.message else ''}"
    return ""


def _may_be_a_node(bad: Sequence[Replica], well: Sequence[Replica]) -> bool:
    """All that crash share a node (one of several nodes shares all of its own with itself), and elsewhere one is `well`."""
    shared = _nodes(bad[0]).intersection(*map(_nodes, bad))
    return bool(shared) and any(shared.isdisjoint(_nodes(one)) for one in well)


def _nodes(worker: Replica) -> set[str | None]:
    return {pod.node for pod in worker.pods}
