"""What the status says: a fleet that serves stays Ready while it changes, and every condition depends on its own subject only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_planner.reconcile import reconcile
from fleet_planner.types import KvProof, Observed, Problem, RoleLoad, RouterView, TierTelemetry
from tests.fleet_planner.test_reconcile import NOW, carry_out, fleet, start

KNOWN = TierTelemetry(RoleLoad(0.0, measured_at=NOW), RoleLoad(0.0, measured_at=NOW), KvProof(3, 12, 4096, 0, NOW), "shm")

OLD = RoleLoad(1.0, measured_at=NOW - 99)


def condition(kind: str, observed: Observed, now: float = NOW) -> tuple[str, str, str]:
    found = next(c for c in reconcile(fleet(), observed, now).status.conditions if c.type == kind)
    return found.status, found.reason, found.message


@pytest.fixture
def serving() -> Observed:
    return replace(carry_out(reconcile(fleet(), start(), NOW), start()), telemetry={"t": KNOWN})


def scaled(observed: Observed, decode: int) -> Observed:
    """Somebody ran kubectl scale; nothing has happened yet."""
    return replace(observed, pools=tuple(replace(p, replicas=decode) if p.role == "decode" else p for p in observed.pools))


def test_ready_while_a_tier_grows(serving: Observed):
    assert condition("Ready", serving)[0] == "True"
    growing = scaled(serving, 4)
    assert condition("Provisioned", growing)[:2] == ("False", "Creating")
    assert condition("Ready", growing)[0] == "True"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pods": ()}, "WorkersStarting"),
        ({"router": None}, "NoRouter"),
        ({"router": RouterView(1, 0)}, "NoRouter"),
        ({"problems": (Problem("Forbidden", "Forbidden: pods"),)}, "NotProvisioned"),
    ],
    ids=["no-workers", "no-router", "router-not-ready", "cannot-apply"],
)
def test_not_ready_when_nothing_answers_or_nothing_can_be_applied(serving: Observed, change: dict[str, object], reason: str):
    assert condition("Ready", replace(serving, **change))[:2] == ("False", reason)  # type: ignore[arg-type]


@pytest.mark.parametrize("decode", [None, 4], ids=["at-rest", "while-a-user-scales"])
@pytest.mark.parametrize(
    ("telemetry", "expected"),
    [
        ({"t": KNOWN}, ("True", "Fresh", "load and latency are known")),
        ({}, ("Unknown", "NoData", "load is unknown, sizes are held; tier t: no telemetry")),
        ({"t": TierTelemetry(problem="Prometheus is away")}, ("Unknown", "SourceFailed", "Prometheus is away")),
        ({"t": replace(KNOWN, decode=RoleLoad())}, ("Unknown", "NoData", "tier t: no decode load")),
        ({"t": replace(KNOWN, prefill=OLD)}, ("Unknown", "NoData", "prefill telemetry is 99 s old")),
    ],
    ids=["known", "none", "source-failed", "half", "stale"],
)  # fmt: skip
def test_telemetry_is_fresh_or_not_whatever_decides_the_sizes(
    serving: Observed, decode: int | None, telemetry: dict[str, TierTelemetry], expected: tuple[str, str, str]
):
    observed = replace(serving if decode is None else scaled(serving, decode), telemetry=telemetry)
    status, reason, message = condition("TelemetryFresh", observed)
    assert (status, reason) == expected[:2]
    assert message.endswith(expected[2])


@pytest.mark.parametrize(
    ("proof", "expected"),
    [
        (None, ("Unknown", "NoData")),
        (KvProof(0, 0, 0, 0, NOW), ("Unknown", "NoTransferYet")),
        (KvProof(2, 8, 10, 1, NOW), ("True", "KvMoved")),
        (KvProof(0, 0, 0, 3, NOW), ("False", "KvFailing")),
    ],
)
def test_disaggregating_is_what_the_engines_counted(serving: Observed, proof: KvProof | None, expected: tuple[str, str]):
    assert condition("Disaggregating", replace(serving, telemetry={"t": replace(KNOWN, kv=proof)}))[:2] == expected


def test_a_condition_keeps_the_time_of_its_last_change(serving: Observed):
    first = reconcile(fleet(), serving, NOW).status.conditions
    again = reconcile(fleet().model_copy(update={"status": reconcile(fleet(), serving, NOW).status}), serving, NOW + 500).status
    assert {c.type: c.last_transition_time for c in again.conditions if c.type == "Ready"} == {
        c.type: c.last_transition_time for c in first if c.type == "Ready"
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("WorkersFailing", ": f-t-decode: exit 1")),
        ({"terminating": True}, ("WorkersStarting", "are serving")),  # what goes starts no more
        ({"tier": "left"}, ("WorkersStarting", "are serving")),
        ({"restarts": 0}, ("WorkersStarting", ": f-t-decode: exit 1")),
    ],
    ids=["failing", "on-its-way-out", "of-another-tier", "not-yet"],
)
def test_who_fails_is_one_of_the_tier_that_does_not_serve_and_stays(
    serving: Observed, change: dict[str, Any], expected: tuple[str, str]
):
    """One container that had started again anywhere in the fleet, or that ended because it was told to, made WorkersFailing (and
    Degraded in Argo CD) of workers that only began."""
    pods = tuple(replace(pod, ready=False) for pod in serving.pods)
    failing = replace(pods[0], **({"name": "f-t-decode", "restarts": 1, "message": "exit 1"} | change))
    status, reason, message = condition("Available", replace(serving, pods=(failing, *pods[1:])))
    assert (status, reason) == ("False", expected[0])
    assert message.endswith(expected[1])
