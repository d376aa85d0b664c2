"""Workers whose agent says another role than their pod's label: who is asked, serves no more, is told, is replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.conditions import rfc3339
from fleet_api.v1alpha1.status import FleetStatus, FlipStatus, TierStatus
from fleet_planner.astray import doubtful
from fleet_planner.flip import NOTICE_S, PROOF_MOST_S
from fleet_planner.memory import ScaleMemory
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.roles import Role
from fleet_planner.types import FlipReport, Observed, ObservedPod, Template, TierTelemetry
from fleet_planner.wanted import FlipWanted
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


def failed(role: str, seconds: float = 10.0) -> FleetStatus:
    """So long ago one was replaced that said another role than `role`, or, without one, changed its own in vain."""
    flip = FlipStatus(failed_at=rfc3339(NOW - seconds), message="x", role=role)
    return FleetStatus(tiers=(TierStatus(name="t", flip=flip),))


@pytest.mark.parametrize("righted", [False, True])
@pytest.mark.parametrize(
    ("pods", "size", "status"),
    [
        pytest.param(workers(1, 3), (1, 3), failed("decode"), id="one-was-told-in-vain-a-moment-ago"),
        pytest.param(workers(1, 3), (1, 3), failed("prefill"), id="one-of-the-other-role"),
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
    plan = reconcile(wish(3, 8), read(workers(3, 8), d0=SAYS_PREFILL, d1=SAYS_PREFILL), NOW)
    assert [flip.name for flip in plan.flips] == [D0]
    assert [name for name, state in states(plan).items() if state == "draining"] == [D0, D1]
    assert f"{D0}, {D1}: a decode worker whose agent says prefill" in ratio(plan)[2]


def test_it_is_the_first_to_go_and_no_other_worker_flips_meanwhile():
    plan = reconcile(wish(2, 2), read(workers(1, 4), d0=SAYS_PREFILL), NOW)
    assert plan.flips == ()
    assert D0 in [gone.name for gone in plan.delete]
    assert [wanted.role for wanted in plan.create] == ["prefill"]


def test_when_nothing_is_left_to_serve_the_conditions_say_why():
    plan = reconcile(wish(1, 1), read(workers(1, 1), d0=SAYS_PREFILL), NOW)
    available = plan.status.condition("Available")
    assert available is not None
    assert (available.status, "whose agent says prefill" in available.message) == ("False", True)
    assert "whose agent says prefill" in ratio(plan)[2]


# -- too many at once --------------------------------------------------------------------------------------------------
def saying(count: int) -> dict[str, FlipReport]:
    return {f"d{n}": SAYS_PREFILL for n in range(count)}


def excused(plan: Plan) -> tuple[str, ...]:
    """Names of those that the status says are left alone."""
    _, reason, message = ratio(plan)
    return tuple(message.split(": ")[1].split(", ")) if reason == "AgentsSuspected" else ()


@pytest.mark.parametrize(
    ("size", "liars", "out"),
    [
        pytest.param((1, 1), 1, 1, id="the-only-one-is-believed"),
        pytest.param((1, 2), 1, 1, id="one-of-two"),
        pytest.param((1, 2), 2, 0, id="both"),
        pytest.param((1, 3), 2, 0, id="two-of-three"),
        pytest.param((1, 3), 3, 0, id="all-of-three"),
        pytest.param((3, 8), 2, 2, id="a-quarter"),
        pytest.param((3, 8), 3, 0, id="more-than-a-quarter"),
        pytest.param((3, 8), 8, 0, id="all-of-eight"),
    ],
)
def test_of_more_than_a_quarter_of_a_role_nobody_is_taken_out_and_the_condition_says_so(
    size: tuple[int, int], liars: int, out: int
):
    plan = reconcile(wish(*size), read(workers(*size), **saying(liars)), NOW)
    assert list(states(plan).values()).count("draining") == out
    assert plan.status.tiers[0].decode.serving == size[1] - out
    assert (len(plan.flips), plan.delete, plan.create) == (int(out > 0), (), ())
    reason, message = ratio(plan)[1:]
    if out == 0:
        assert reason == "AgentsSuspected"
        assert f"a decode worker whose agent says prefill, and {liars} of {size[1]} say so at once" in message
        assert "they serve on, none is told its role or replaced" in message


def test_each_role_is_counted_by_itself_and_by_who_can_be_heard():
    pods = one_as(workers(3, 8), "f-t-decode-aaaaaaaa-7", ready=False)
    plan = reconcile(wish(3, 8), read(pods, **saying(2)), NOW)
    assert list(states(plan).values()).count("draining") == 0, "two of seven"
    swapped = {f"uid-f-t-prefill-aaaaaaaa-{n}": FlipReport("decode", "Serving") for n in range(3)}
    both = replace(read(workers(3, 8), d0=SAYS_PREFILL), flips=swapped | read(d0=SAYS_PREFILL).flips)
    plan = reconcile(wish(3, 8), both, NOW)
    assert [name for name, state in states(plan).items() if state == "draining"] == [D0]
    assert [flip.name for flip in plan.flips] == [D0]
    assert ratio(plan)[1] == "AgentsSuspected"
    assert f"; tier t: out of service: {D0}: a decode worker" in ratio(plan)[2]


@pytest.mark.parametrize("report", [SAYS_PREFILL, FlipReport("prefill", "Serving", refused="409 EngineKeepsRole")])
@pytest.mark.parametrize("seconds", [1.0, TIME_S + 1])
def test_one_that_was_told_when_the_others_say_so_as_well_serves_again_and_is_told_so(report: FlipReport, seconds: float):
    """It was the first that was heard. Neither its time nor what it answers deletes it."""
    pods = one_as(workers(1, 3), D0, flipping="decode", flip_since=NOW)
    plan = reconcile(wish(1, 3), read(pods, **saying(3) | {"d0": report}), NOW + seconds)
    assert plan.flips == (FlipWanted(D0, f"uid-{D0}", None),)
    assert (plan.create, plan.delete, plan.relabels, plan.status.tiers[0].flip) == ((), (), (), None)
    assert plan.status.tiers[0].decode.serving == 3
    again = reconcile(wish(1, 3), read(**saying(3)), NOW + seconds + 1)
    assert (again.flips, excused(again)) == ((), (D0, D1, "f-t-decode-aaaaaaaa-2"))


def test_one_that_takes_its_role_at_this_moment_is_no_witness():
    pods = one_as(workers(1, 3), D0, flipping="decode", flip_since=NOW)
    plan = reconcile(wish(1, 3), read(pods, d0=FlipReport("prefill", "FlippingRole"), d1=SAYS_PREFILL), NOW + 1)
    assert [name for name, state in states(plan).items() if state == "draining"] == [D0, D1]


@pytest.mark.parametrize("size", [(1, 2), (2, 3)])
def test_the_last_one_that_serves_goes_on_while_others_take_their_role(size: tuple[int, int]):
    """Heard one after the other they were never too many at once, and the role was gone until the first one had it again: on vLLM
    up to an hour."""
    told = {f"d{n}": FlipReport("prefill", "FlippingRole") for n in range(size[1] - 1)}
    last = f"f-t-decode-aaaaaaaa-{size[1] - 1}"
    pods = workers(*size)
    for name in told:
        pods = one_as(pods, f"f-t-decode-aaaaaaaa-{name[1]}", flipping="decode", flip_since=NOW, ready=False)
    plan = reconcile(wish(*size), read(pods, **told | {f"d{size[1] - 1}": SAYS_PREFILL}), NOW + 1)
    assert states(plan)[last] == "serving"
    assert (plan.flips, plan.delete, plan.create) == ((), (), ()), "those that were told are followed to their end"
    assert ratio(plan)[1] == "AgentsSuspected"
    assert f"{last}: a decode worker whose agent says prefill, and no other one serves" in ratio(plan)[2]
    there = reconcile(wish(*size), read(**{f"d{size[1] - 1}": SAYS_PREFILL}, pods=workers(*size)), NOW + 2)
    assert [flip.name for flip in there.flips] == [last], "it is told when another one serves"


def test_nobody_flips_where_agents_are_suspected():
    plan = reconcile(wish(2, 2), read(workers(1, 3), **saying(3)), NOW)
    assert plan.flips == ()
    assert [wanted.role for wanted in plan.create] == ["prefill"]


@pytest.mark.parametrize(
    ("size", "liars", "status", "out"),
    [
        pytest.param((1, 1), 1, failed("decode", 10), 0, id="the-only-one-and-the-one-before-it"),
        pytest.param((1, 1), 1, failed("decode", 3_000), 0, id="a-model-takes-its-time"),
        pytest.param((1, 1), 1, failed("decode", 90_000), 0, id="as-long-as-it-is-so"),
        pytest.param((1, 1), 1, failed("prefill", 10), 1, id="the-other-role"),
        pytest.param((1, 1), 1, failed("", 10), 1, id="a-flip-that-failed"),
        pytest.param((1, 2), 1, failed("decode", 10), 1, id="another-one-serves"),
    ],
)
def test_the_only_one_of_its_role_serves_on_when_one_was_replaced_for_it_already(
    size: tuple[int, int], liars: int, status: FleetStatus, out: int
):
    spec = wish(*size).model_copy(update={"status": status})
    plan = reconcile(spec, read(workers(*size), **saying(liars)), NOW)
    assert list(states(plan).values()).count("draining") == out
    assert plan.delete == ()
    if out == 0:
        assert plan.flips == ()
        assert "no other one is there, and one was replaced for it already" in ratio(plan)[2]
        assert plan.status.tiers[0].flip == status.tiers[0].flip, "still known"


@pytest.mark.parametrize(
    ("observed", "seconds", "kept"),
    [
        pytest.param(read(), 10, True, id="young"),
        pytest.param(read(), 3_000, True, id="who-is-made-in-its-place-may-still-start"),
        pytest.param(read(), 90_000, False, id="all-say-their-own"),
        pytest.param(read(said={D0: "prefill"}), 90_000, True, id="one-is-doubted"),
        pytest.param(replace(read(), telemetry_read=False), 90_000, True, id="nothing-was-read-yet"),
    ],
)
def test_how_long_it_is_known_that_one_was_replaced(observed: Observed, seconds: float, kept: bool):
    status = failed("decode", seconds)
    plan = reconcile(wish(1, 3).model_copy(update={"status": status}), observed, NOW)
    assert plan.status.tiers[0].flip == (status.tiers[0].flip if kept else None)


def test_what_is_known_longer_keeps_no_flip_and_no_telling_longer():
    spec = wish(2, 2).model_copy(update={"status": failed("decode", 700)})
    assert [flip.role for flip in reconcile(spec, read(workers(1, 3)), NOW).flips] == ["prefill"]
    spec = wish(1, 3).model_copy(update={"status": failed("decode", 700)})
    assert [flip.name for flip in reconcile(spec, read(d0=SAYS_PREFILL), NOW).flips] == [D0]


def test_the_status_says_of_which_role_one_was_replaced():
    flip = told_at(1.0, FlipReport("prefill", "Serving", refused="x")).status.tiers[0].flip
    assert flip is not None
    assert flip.role == "decode"
    flip = reconcile(wish(1, 3), read(one_as(workers(1, 3), D0, righted=True), d0=SAYS_PREFILL), NOW).status.tiers[0].flip
    assert flip is not None
    assert flip.role == "decode"


def test_a_flip_that_failed_keeps_nobody_from_being_told_its_own():
    """It stayed out of service for 10 min because another worker had declined to change its role."""
    plan = reconcile(wish(1, 3).model_copy(update={"status": failed("")}), read(d0=SAYS_PREFILL), NOW)
    assert [flip.name for flip in plan.flips] == [D0]


def test_the_memory_knows_the_role_that_an_older_crd_does_not_keep():
    kept, pruned = failed("decode").tiers[0].flip, failed("").tiers[0].flip
    observed = replace(read(workers(1, 1), d0=SAYS_PREFILL), memory={"t": ScaleMemory(flip=kept)})
    plan = reconcile(wish(1, 1).model_copy(update={"status": failed("")}), observed, NOW)
    assert (plan.flips, plan.status.tiers[0].flip) == ((), kept)
    assert pruned != kept


def test_one_that_goes_and_is_not_gone_yet_keeps_no_other_from_being_told():
    """Its node may be lost: then it is there for as long as that."""
    pods = one_as(workers(3, 8), D1, flipping="decode", flip_since=NOW, terminating=True)
    plan = reconcile(wish(3, 8), read(pods, d0=SAYS_PREFILL), NOW + 1)
    assert [flip.name for flip in plan.flips] == [D0]


def test_a_rollout_to_a_revision_whose_agents_are_suspected_takes_no_other_worker_out():
    """Ready, they would have been taken for good, and those of before were deleted."""
    new = tuple(replace(one, name=one.name.replace("a" * 8, "b" * 8), revision="b" * 8) for one in workers(1, 3))
    new = tuple(replace(one, uid=f"uid-{one.name}") for one in new)
    liars = {one.uid: SAYS_PREFILL for one in new if one.role == "decode"}
    start = replace(seen((*workers(1, 3), *new)), templates={"t": Template("b" * 8, "c")})
    start = replace(start, stored={"t": {"a" * 8: Template("a" * 8, "c"), "b" * 8: Template("b" * 8, "c")}})
    assert reconcile(wish(1, 3), start, NOW).delete != (), "else the old ones go"
    plan = reconcile(wish(1, 3), replace(start, flips=liars), NOW)
    assert plan.delete == ()
    assert ratio(plan)[1] == "AgentsSuspected"
