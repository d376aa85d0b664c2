"""Which of the workers: those of a tier, with an adapter, not excluded. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleet_router.policy.adapters import version_of
from fleet_router.policy.side import Steps, Usable

if TYPE_CHECKING:
    from fleet_router.workers import Worker


def other_than(uids: frozenset[str], usable: Usable | None) -> Usable:
    """Not these."""
    return lambda worker: worker.uid not in uids and (usable is None or usable(worker))


def within(tier: str, usable: Usable | None) -> Usable:
    """Of this tier."""
    return lambda worker: worker.group[0] == tier and (usable is None or usable(worker))


def only(sides: dict[str, list[Worker]]) -> Usable:
    """These alone."""
    uids = {worker.uid for workers in sides.values() for worker in workers}
    return lambda worker: worker.uid in uids


def of_tier(sides: dict[str, list[Worker]], tier: str, *, strict: bool) -> dict[str, list[Worker]]:
    """Of this tier, if it serves; `strict`: or nobody."""
    if not strict and not any(worker.endpoint.tier == tier for worker in sides["decode"]):
        return sides
    return {role: [worker for worker in workers if worker.endpoint.tier == tier] for role, workers in sides.items()}


def under(adapter: str, candidates: dict[str, list[Worker]]) -> tuple[dict[str, list[Worker]], str]:
    """Those that have one version of an adapter, and which; both legs run under the same one."""
    version = version_of(adapter, (worker.endpoint.adapters for worker in candidates["decode"]))
    found = {
        role: [worker for worker in workers if version and worker.endpoint.adapters.get(adapter) == version]
        for role, workers in candidates.items()
    }
    return found, f"{adapter}@{version}"


def bits_of(workers: Sequence[Worker]) -> int:
    """Of all of them."""
    found = 0
    for worker in workers:
        found |= worker.bit
    return found


def most_of(steps: Steps, among: int) -> float:
    """Most tokens that one of these holds."""
    return max((tokens for tokens, mask in steps if mask & among), default=0.0)
