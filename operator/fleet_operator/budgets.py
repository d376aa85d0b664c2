"""Which disruption budgets a fleet has to have now. Pure.

A role's budget is made when its first worker is ready: before, there is nothing that an eviction could take from anybody, and the
disruption controller writes a budget's status again for every pod that comes. One that is there stays, whatever becomes of its
workers, until its tier has left the spec and its last worker goes.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleet_operator.cluster.interface import PDB, POD, Object
from fleet_operator.names import ROLE, TIER
from fleet_planner.reconcile import Plan


def budgets_due(budgets: list[Object], plan: Plan, live: Mapping[tuple[str, str], Object]) -> list[Object]:
    """Of all that the fleet may have (`render_budgets`), those to be put now; `live` is (kind, name) → object."""
    ready = {(tier.name, role) for tier in plan.status.tiers for role in ("prefill", "decode") if getattr(tier, role).ready > 0}
    return [
        budget
        for budget in budgets
        if (PDB.kind, budget["metadata"]["name"]) in live or _guards(budget) is None or _guards(budget) in ready
    ]


def still_guards(budget: Object, live: Mapping[tuple[str, str], Object]) -> bool:
    """Whether workers that stay are under a budget that nothing of the spec asks for: those of a tier that left it serve on for a
    while. Its labels are ours, whatever its selector was edited to."""
    mine = budget["metadata"].get("labels") or {}
    if TIER not in mine or ROLE not in mine:
        return False
    pods = (obj["metadata"] for (kind, _), obj in live.items() if kind == POD.kind)
    return any(
        "deletionTimestamp" not in meta and all((meta.get("labels") or {}).get(key) == mine[key] for key in (TIER, ROLE))
        for meta in pods
    )


def _guards(budget: Object) -> tuple[str, str] | None:
    """Tier and role of workers; None for routers, which are there at once."""
    labels = budget["spec"]["selector"]["matchLabels"]
    return (labels[TIER], labels[ROLE]) if TIER in labels else None
