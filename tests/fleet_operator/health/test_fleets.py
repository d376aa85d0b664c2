"""What the statuses of fleets say, as figures: also what somebody wrote into one by hand."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet_operator.health.fleets import CONDITIONS_MOST, cost_per_hour, exposition, readiness

CONDITIONS = [
    {"type": "Ready", "status": "False", "reason": "WorkersFailing"},
    {"type": "WithinRatio", "status": "True", "reason": "InRatio"},
]
TIER = {"name": "gpu", "prefill": {"desired": 2, "ready": 1}, "decode": {"desired": 4, "ready": 4, "serving": 4}}


def fleet(status: Any = None, spec: Any = None, name: str = "f") -> dict[str, Any]:
    return {"metadata": {"namespace": "ml", "name": name}, "spec": spec, "status": status}


def lines(*fleets: dict[str, Any]) -> list[str]:
    """As Prometheus reads them: (name, labels in order, value)."""
    families = list(text_string_to_metric_families(exposition(fleets)))
    assert [family.type for family in families] == ["gauge"] * 3
    return [
        f"{one.name}{{{','.join(f'{label}={one.labels[label]}' for label in sorted(one.labels))}}} {one.value:g}"
        for family in families
        for one in family.samples
    ]


def test_conditions_workers_and_objectives_by_name():
    spec = {"slo": {"ttft": {"p99": "2s"}, "itl": {"p99": "50ms"}}}
    assert lines(fleet({"conditions": CONDITIONS, "tiers": [TIER]}, spec)) == [
        "fleet_operator_fleet_condition{condition=Ready,fleet=f,namespace=ml,reason=WorkersFailing,status=False} 1",
        "fleet_operator_fleet_condition{condition=WithinRatio,fleet=f,namespace=ml,reason=InRatio,status=True} 1",
        "fleet_operator_fleet_workers{fleet=f,namespace=ml,role=prefill,state=desired,tier=gpu} 2",
        "fleet_operator_fleet_workers{fleet=f,namespace=ml,role=prefill,state=ready,tier=gpu} 1",
        "fleet_operator_fleet_workers{fleet=f,namespace=ml,role=prefill,state=serving,tier=gpu} 0",
        "fleet_operator_fleet_workers{fleet=f,namespace=ml,role=decode,state=desired,tier=gpu} 4",
        "fleet_operator_fleet_workers{fleet=f,namespace=ml,role=decode,state=ready,tier=gpu} 4",
        "fleet_operator_fleet_workers{fleet=f,namespace=ml,role=decode,state=serving,tier=gpu} 4",
        "fleet_operator_fleet_slo_seconds{fleet=f,latency=ttft,namespace=ml} 2",
        "fleet_operator_fleet_slo_seconds{fleet=f,latency=itl,namespace=ml} 0.05",
    ]


def test_a_fleet_that_nobody_has_looked_at_is_not_ready():
    """It had no series, so that no alert told of it."""
    assert lines(fleet()) == ["fleet_operator_fleet_condition{condition=Ready,fleet=f,namespace=ml,reason=,status=Unknown} 1"]


@pytest.mark.parametrize(
    "status",
    [
        "x",
        {"conditions": "x", "tiers": "y"},
        {"conditions": [1, {"type": 'Ready"}\n# evil', "status": "True"}, {"type": "Ready", "status": "yes"}]},
        {"tiers": [1, {"name": "A b"}, {"name": "x" * 64}, {"prefill": {"desired": 1}}]},
        {"conditions": [{"type": f"C{n}", "status": "True"} for n in range(1_000)], "tiers": [TIER] * 1_000},
        {"tiers": [{"name": "t", "prefill": {"desired": "many", "ready": True}, "decode": 3}]},
    ],
    ids=["text", "texts", "strange-words", "strange-tiers", "too-many", "no-numbers"],
)
def test_what_somebody_wrote_into_a_status_breaks_nothing(status: Any):
    found = lines(fleet(status, {"slo": {"ttft": {"p99": "soon"}, "itl": 3}}), fleet(name="other"))
    assert not [line for line in found if "evil" in line]
    assert len(found) == len(set(found)) <= CONDITIONS_MOST + 16
    assert [line for line in found if "fleet=other" in line]


def test_readiness_and_cost_of_all():
    ready = fleet({"conditions": [{"type": "Ready", "status": "True", "reason": "AllGood"}], "costPerHour": 2.5})
    assert readiness([ready, fleet({"conditions": CONDITIONS}), fleet()]) == {"True": 1, "False": 1, "Unknown": 1}
    assert cost_per_hour([ready, ready, fleet()]) == 5.0
    assert cost_per_hour([fleet()]) is None
