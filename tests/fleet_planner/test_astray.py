"""Workers whose agent says another role than their pod's label: who is asked, serves no more, is told, is replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.v1alpha1.status import FleetStatus, FlipStatus, TierStatus
from fleet_planner.astray import doubtful
from fleet_planner.flip import NOTICE_S, PROOF_MOST_S
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.types import FlipReport, FlipWanted, Observed, ObservedPod, Role, TierTelemetry
from tests.fleet_planner.test_flip import did, seen, wish, workers
from tests.fleet_planner.test_reconcile import NOW

D0, D1 = "f-t-decode-aaaaaaaa-0", "f-t-decode-aaaaaaaa-1"
SAYS_PREFILL = FlipReport("prefill", "Serving")


def one_as(pods: tuple[ObservedPod, ...], name: str, **odd: Any) -> tuple[ObservedPod, ...]:
    return tuple(replace(one, **odd) if one.name == name else one for one in pods)


def read(pods: tuple[ObservedPod, ...] = workers(1, 3), said: dict[str, Role] | None = None, **reports: FlipReport) -> Observed:
    """`said`: what telemetry has; `reports`: what agents said when asked, d0 for D0."""
    known = {"t": TierTelemetry(astray=said or {})}
    flips = {f"uid-f-t-decode-aaaaaaaa-{name.removeprefix('d')}": report for name, report in reports.items()}
    return seen(pods, telemetry=known, flips=flips)


def states(plan: Plan) -> dict[str, str]:
    return {target.name: target.state for target in plan.targets}


def ratio(plan: Plan) -> tuple[str, str, str]:
    found = plan.status.condition("WithinRatio")
    assert found is not None
    return found.status, found.reason, found.message


# -- who is asked ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("observed", "asked"),
    [
        pytest.param(read(), [], id="nobody-says-so"),
        pytest.param(read(said={D0: "prefill"}), [D0], id="another-role-than-the-label"),
        pytest.param(read(said={D0: "decode"}), [], id="the-label-was-changed-since"),
        pytest.param(read(said={"f-t-decode-aaaaaaaa-9": "prefill"}), [], id="it-is-gone"),
        pytest.param(read(one_as(workers(1, 3), D0, flipping="prefill"), {D0: "prefill"}), [], id="it-changes-its-role"),
        pytest.param(read(one_as(workers(1, 3), D0, flipping="decode"), {D0: "prefill"}), [], id="it-is-told-its-own"),
        pytest.param(read(one_as(workers(1, 3), D0, terminating=True), {D0: "prefill"}), [], id="it-goes"),
        pytest.param(read(one_as(workers(1, 3), D0, ip=None), {D0: "prefill"}), [], id="no-address"),
        pytest.param(read(d0=SAYS_PREFILL), [D0], id="its-word-holds-when-telemetry-says-nothing"),
        pytest.param(read(d0=FlipReport("decode", "Serving")), [], id="it-took-its-word-back"),
        pytest.param(read(said={D0: "prefill"}, d0=FlipReport("decode", "Serving")), [D0], id="telemetry-says-so-all-the-same"),
    ],
)
def test_who_is_asked_which_role_it_has(observed: Observed, asked: list[str]):
    assert doubtful(observed) == {f"uid-{name}" for name in asked}


# -- who serves no more, and who is told -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("observed", "astray"),
    [
        pytest.param(read(d0=SAYS_PREFILL), True, id="it-says-so"),
        pytest.param(read(said={D0: "prefill"}), False, id="only-telemetry-says-so"),
        pytest.param(read(d0=FlipReport("decode", "Serving")), False, id="its-own-role"),
        pytest.param(read(d0=FlipReport(None, "Serving")), False, id="an-agent-that-says-none"),
        pytest.param(read(d0=FlipReport("prefill", "FlippingRole")), False, id="it-may-still-change"),
        pytest.param(read(d0=FlipReport("prefill", "Warming")), False, id="it-does-not-work-yet"),
    ],
)
def test_a_worker_that_says_another_role_serves_no_more_and_is_told_its_own(observed: Observed, astray: bool):
    plan = reconcile(wish(1, 3), observed, NOW)
    assert states(plan)[D0] == ("draining" if astray else "serving")
    assert {target.role for target in plan.targets if target.name == D0} == {"decode"}, "as the routers know it"
    assert plan.flips == ((FlipWanted(D0, f"uid-{D0}", "decode", NOW),) if astray else ())
    assert (plan.create, plan.delete, plan.relabels) == ((), (), ()), "it counts for the role of its label"
    tier = plan.status.tiers[0]
    assert (tier.decode.ready, tier.decode.serving) == ((2, 2) if astray else (3, 3))
    told = "tier t: out of service: f-t-decode-aaaaaaaa-0: a decode worker whose agent says prefill"
    expected = ("True", "RoleMismatch", told) if astray else ("True", "InRatio", "every tier serves inside its ratio")
    assert ratio(plan) == expected


def told_at(seconds: float, report: FlipReport | None, **odd: Any) -> Plan:
    """So long after D0 was told its own role."""
    pods = one_as(workers(1, 3), D0, **{"flipping": "decode", "flip_since": NOW, "drain_s": 30.0, **odd})
    return reconcile(wish(1, 3), read(pods, **({"d0": report} if report is not None else {})), NOW + seconds)


TIME_S = NOTICE_S + 30.0 + PROOF_MOST_S


@pytest.mark.parametrize(
    ("report", "seconds"),
    [
        pytest.param(None, 1.0, id="an-operator-that-has-just-begun"),
        pytest.param(SAYS_PREFILL, TIME_S, id="it-has-its-time"),
        pytest.param(FlipReport("prefill", "FlippingRole"), TIME_S, id="it-empties-itself"),
        pytest.param(FlipReport("decode", "Serving"), 1.0, id="its-word-without-a-proof"),
    ],
)
def test_one_that_was_told_is_out_of_service_until_it_is_proven(report: FlipReport | None, seconds: float):
    plan = told_at(seconds, report)
    assert (did(plan), plan.relabels, states(plan)[D0]) == ((0, 0, 0), (), "draining")
    assert {target.role for target in plan.targets if target.name == D0} == {"decode"}, "as the routers know it"
    assert ratio(plan)[1] == "RoleMismatch"
    assert ratio(plan)[2].endswith("is told its role again")


def test_one_that_has_its_role_again_is_an_ordinary_worker():
    plan = told_at(3.0, FlipReport("decode", "Serving", proof="equal tokens"))
    (relabel,) = plan.relabels
    assert (relabel.name, relabel.role, relabel.pool, relabel.again) == (D0, "decode", "f-t-decode-aaaaaaaa", True)
    assert did(plan) == (0, 0, 0)


@pytest.mark.parametrize(
    ("report", "seconds", "why"),
    [
        pytest.param(SAYS_PREFILL, TIME_S + 1, "not done within 62 s: its agent says prefill and Serving", id="it-goes-on-lying"),
        pytest.param(FlipReport(), TIME_S + 1, "its agent does not answer", id="silent"),
        pytest.param(FlipReport("prefill", "Serving", refused="409 EngineKeepsRole"), 1.0, "409 EngineKeeps", id="it-declines"),
        pytest.param(FlipReport("decode", "Serving", problem="other tokens"), 1.0, "other tokens", id="its-proof-fails"),
    ],
)
def test_one_that_does_not_take_its_role_is_replaced_and_told_of(report: FlipReport, seconds: float, why: str):
    plan = told_at(seconds, report)
    assert [gone.name for gone in plan.delete] == [D0]
    assert why in plan.delete[0].reason
    assert "its role was told to it again" in plan.delete[0].reason
    assert [wanted.role for wanted in plan.create] == ["decode"]
    assert plan.flips == (), "it is not given back"
    flip = plan.status.tiers[0].flip
    assert flip is not None
    assert why in flip.message


def test_one_that_is_astray_again_after_it_was_told_is_replaced():
    plan = reconcile(wish(1, 3), read(one_as(workers(1, 3), D0, righted=True), d0=SAYS_PREFILL), NOW)
    assert [(gone.name, gone.reason) for gone in plan.delete] == [
        (D0, "a decode worker whose agent says prefill, again after it was told its role")
    ]
    assert [wanted.role for wanted in plan.create] == ["decode"]
    assert plan.flips == ()
    assert plan.status.tiers[0].flip is not None


FAILED = FleetStatus(tiers=(TierStatus(name="t", flip=FlipStatus(failed_at="1970-01-01T00:16:30Z", message="x")),))
"""Ten seconds before NOW."""


@pytest.mark.parametrize("righted", [False, True])
@pytest.mark.parametrize(
    ("pods", "size", "status"),
    [
        pytest.param(workers(1, 3), (1, 3), FAILED, id="one-failed-a-moment-ago"),
        pytest.param(one_as(workers(1, 3), D1, flipping="decode", flip_since=NOW), (1, 3), FleetStatus(), id="another-is-told"),
        pytest.param(one_as(workers(1, 3), D1, flipping="prefill", flip_since=NOW), (2, 2), FleetStatus(), id="another-flips"),
    ],
)
def test_one_at_a_time_and_none_for_a_while_after_one_that_failed(
    pods: tuple[ObservedPod, ...], size: tuple[int, int], status: FleetStatus, righted: bool
):
    """It does not serve meanwhile."""
    spec = wish(*size).model_copy(update={"status": status})
    plan = reconcile(spec, read(one_as(pods, D0, righted=righted), d0=SAYS_PREFILL), NOW + 1)
    assert (plan.flips, [gone.name for gone in plan.delete]) == ((), [])
    assert states(plan)[D0] == "draining"


def test_of_several_all_stop_serving_and_one_is_told():
    plan = reconcile(wish(1, 3), read(d0=SAYS_PREFILL, d1=SAYS_PREFILL), NOW)
    assert [flip.name for flip in plan.flips] == [D0]
    assert [name for name, state in states(plan).items() if state == "draining"] == [D0, D1]
    assert f"{D0}, {D1}: a decode worker whose agent says prefill" in ratio(plan)[2]


def test_it_is_the_first_to_go_and_no_other_worker_flips_meanwhile():
    plan = reconcile(wish(2, 2), read(workers(1, 4), d0=SAYS_PREFILL), NOW)
    assert plan.flips == ()
    assert D0 in [gone.name for gone in plan.delete]
    assert [wanted.role for wanted in plan.create] == ["prefill"]


def test_when_nothing_is_left_to_serve_the_conditions_say_why():
    plan = reconcile(wish(1, 3), read(d0=SAYS_PREFILL, d1=SAYS_PREFILL, d2=SAYS_PREFILL), NOW)
    available = plan.status.condition("Available")
    assert available is not None
    assert (available.status, "whose agent says prefill" in available.message) == ("False", True)
    assert "whose agent says prefill" in ratio(plan)[2]
