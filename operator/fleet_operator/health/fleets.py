"""What the status of each fleet says, as figures: the conditions, the workers of each role, and the objectives of the spec. Pure.

Alerts name a fleet by these (charts/inferencefleet/files/alerts.yaml). A status may be edited by whoever has the right to: what
does not look like one of ours becomes no label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fleet_api.quantities import parse_duration
from fleet_operator.cluster.interface import Object
from fleet_planner.roles import ROLES

STATUSES: Final = frozenset({"True", "False", "Unknown"})
CONDITIONS_MOST: Final = 32
"""Of one fleet, more than there are."""
TIERS_MOST: Final = 64
"""Of one fleet that are shown."""
COUNTS: Final = ("desired", "ready", "serving")
LATENCIES: Final = ("ttft", "itl")
CONDITION: Final = "fleet_operator_fleet_condition"
WORKERS: Final = "fleet_operator_fleet_workers"
GOAL: Final = "fleet_operator_fleet_slo_seconds"
TOLD_WORDS: Final = "1 for each condition of a fleet's status, as it is now."
WORKERS_WORDS: Final = "Workers of a fleet: desired, ready, serving."
GOAL_WORDS: Final = "spec.slo: what 99 of 100 such times are to keep."
_WORD: Final = re.compile(r"[A-Z][A-Za-z0-9]{0,62}")
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def readiness(fleets: Iterable[Object]) -> dict[str, int]:
    """Fleets by the status of their Ready condition; one that has none is Unknown."""
    counts = dict.fromkeys(("True", "False", "Unknown"), 0)
    for raw in fleets:
        told = next((status for kind, status, _ in conditions(raw) if kind == "Ready"), "Unknown")
        counts[told] += 1
    return counts


def cost_per_hour(fleets: Iterable[Object]) -> float | None:
    """Of those that say what they cost; None: none does."""
    costs = [cost for raw in fleets if (cost := _number(_part(raw, "status").get("costPerHour"))) is not None]
    return sum(costs) if costs else None


def exposition(fleets: Iterable[Object]) -> str:
    """Of each fleet, as Prometheus text: eighteen lines of most, a fifth of the time that prometheus_client's own objects took. A
    fleet without a status yet has a condition Ready that is Unknown. No value here needs an escape."""
    told, workers, goals = (
        [f"# HELP {name} {words}", f"# TYPE {name} gauge"]
        for name, words in ((CONDITION, TOLD_WORDS), (WORKERS, WORKERS_WORDS), (GOAL, GOAL_WORDS))
    )
    for raw in fleets:
        who = f'namespace="{raw["metadata"]["namespace"]}",fleet="{raw["metadata"]["name"]}"'
        for kind, status, reason in conditions(raw) or [("Ready", "Unknown", "")]:
            told.append(f'{CONDITION}{{{who},condition="{kind}",status="{status}",reason="{reason}"}} 1')
        for tier, role, state, count in _workers(raw):
            workers.append(f'{WORKERS}{{{who},tier="{tier}",role="{role}",state="{state}"}} {count:g}')
        for latency, seconds in _objectives(raw):
            goals.append(f'{GOAL}{{{who},latency="{latency}"}} {seconds:g}')
    return "\n".join([*told, *workers, *goals, ""])


def conditions(raw: Object) -> list[tuple[str, str, str]]:
    """(type, status, reason), each type once."""
    found: dict[str, tuple[str, str, str]] = {}
    for one in _list(_part(raw, "status").get("conditions"))[:CONDITIONS_MOST]:
        kind, status, reason = (one.get(name) if isinstance(one, dict) else None for name in ("type", "status", "reason"))
        if _is(_WORD, kind) and status in STATUSES:
            found.setdefault(str(kind), (str(kind), str(status), str(reason) if _is(_WORD, reason) else ""))
    return list(found.values())


def _workers(raw: Object) -> Iterator[tuple[str, str, str, float]]:
    seen = set[str]()
    for tier in _list(_part(raw, "status").get("tiers"))[:TIERS_MOST]:
        name = tier.get("name") if isinstance(tier, dict) else None
        if not _is(_NAME, name) or name in seen:
            continue
        seen.add(str(name))
        for role in ROLES:
            counts = _part(tier, role)  # what is 0 is left out
            for state in COUNTS:
                if (count := _number(counts.get(state, 0))) is not None:
                    yield str(name), role, state, count


def _objectives(raw: Object) -> Iterator[tuple[str, float]]:
    objectives = _part(_part(raw, "spec"), "slo")
    for latency in LATENCIES:
        told = _part(objectives, latency).get("p99")
        try:
            yield latency, parse_duration(told)
        except (TypeError, ValueError):  # none, or a spec that was refused
            continue


def _part(obj: Any, name: str) -> dict[str, Any]:
    found = obj.get(name) if isinstance(obj, dict) else None
    return found if isinstance(found, dict) else {}


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _number(found: Any) -> float | None:
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _is(pattern: re.Pattern[str], found: Any) -> bool:
    return isinstance(found, str) and pattern.fullmatch(found) is not None
