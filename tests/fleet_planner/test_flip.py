"""When a worker changes its role instead of being started, which one, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.v1alpha1.status import FleetStatus, FlipStatus, TierStatus
from fleet_planner.flip import ANEW_MOST_S, COLD_START_S, NOTICE_S, RETRY_S, cold_start_s, flip_s, remember
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.replicas import Replica
from fleet_planner.roles import Role
from fleet_planner.types import FlipReport, Observed, ObservedPod, RoleLoad, Template, TierTelemetry
from fleet_planner.wanted import FlipWanted
from tests.fleet_planner.test_reconcile import NOW, carry_out, fleet, pod, start

RATIO = {"prefill": 1, "decode": 3, "min": "1:3", "max": "1:1"}


def workers(prefill: int, decode: int, **more: Any) -> tuple[ObservedPod, ...]:
    """Ready, idle and serving; a cold start took them a minute."""
    known: dict[str, Any] = {"serving": True, "busy": 0.0, "created_at": 0.0, "ready_since": 60.0, **more}
    found: list[ObservedPod] = []
    roles: tuple[tuple[Role, int], ...] = (("prefill", prefill), ("decode", decode))
    for role, count in roles:
        found += [pod(f"f-t-{role}-aaaaaaaa-{n}", role, n, **known) for n in range(count)]
    return tuple(found)


def wish(prefill: int, decode: int, **tier: Any):
    """A fleet of exactly that size."""
    sizes = {"prefill": prefill, "decode": decode}
    return fleet(ratio=RATIO, **{role: {"minReplicas": size, "maxReplicas": size} for role, size in sizes.items()}, **tier)


def seen(pods: tuple[ObservedPod, ...], **more: Any) -> Observed:
    return replace(start(flippable=True), pods=pods, **more)


def did(plan: Plan) -> tuple[int, int, int]:
    """(flips, creations, deletions)."""
    return len(plan.flips), len(plan.create), len(plan.delete)


def after(plan: Plan, observed: Observed) -> Observed:
    """As carried out, role changes told and relabelled included."""
    told = {flip.uid: flip for flip in plan.flips}
    moved = {relabel.uid: relabel.role for relabel in plan.relabels}

    def changed(one: ObservedPod) -> ObservedPod:
        if one.uid in moved:
            return replace(one, role=moved[one.uid], flipping=None, flipped=True)
        return replace(one, flipping=told[one.uid].role, flip_since=told[one.uid].since) if one.uid in told else one

    done = carry_out(plan, observed)
    return replace(done, pods=tuple(map(changed, done.pods)))


def test_a_pair_of_a_creation_and_a_deletion_becomes_a_flip_and_is_planned_the_same_again():
    observed = seen(workers(1, 3))
    plan = reconcile(wish(2, 2), observed, NOW)
    assert did(plan) == (1, 0, 0)
    assert plan.flips[0].role == "prefill"
    assert plan.flips[0].since == NOW
    assert {t.name: t.state for t in plan.targets}[plan.flips[0].name] == "draining"
    assert {t.name: t.role for t in plan.targets}[plan.flips[0].name] == "decode", "as the routers know it"
    assert (plan.status.tiers[0].prefill.serving, plan.status.tiers[0].decode.serving) == (1, 2)
    assert (plan.status.tiers[0].prefill.flipping, plan.status.tiers[0].decode.flipping) == (1, 0)
    waiting = after(plan, observed)
    again = reconcile(wish(2, 2), waiting, NOW + 1)
    assert (did(again), again.relabels) == ((0, 0, 0), ())
    proven = {plan.flips[0].uid: FlipReport("prefill", "Serving", proof="equal tokens")}
    done = reconcile(wish(2, 2), replace(waiting, flips=proven), NOW + 4)
    assert [(r.uid, r.role, r.pool, r.took_s) for r in done.relabels] == [
        (plan.flips[0].uid, "prefill", "f-t-prefill-aaaaaaaa", 4.0)
    ]
    early = reconcile(wish(2, 2), replace(waiting, flips=proven), NOW - 4)
    assert [r.took_s for r in early.relabels] == [0.0], "the clock was set back"
    settled = after(done, replace(waiting, flips={}))
    rest = reconcile(wish(2, 2), settled, NOW + 5)
    assert (did(rest), rest.relabels) == ((0, 0, 0), ())
    assert (rest.status.tiers[0].prefill.serving, rest.status.tiers[0].decode.serving) == (2, 2)


def with_one(prefill: int, decode: int, **odd: Any) -> tuple[ObservedPod, ...]:
    """The last decode worker is another one."""
    found = workers(prefill, decode)
    return (*found[:-1], replace(found[-1], **odd))


@pytest.mark.parametrize(
    ("pods", "chosen"),
    [
        pytest.param(with_one(1, 3, busy=3.0), "0", id="the-idle-one"),
        pytest.param(with_one(1, 3, deletion_cost=-5), "2", id="the-cheap-one"),
    ],
)
def test_of_those_that_would_go_the_idle_and_cheap_one_is_chosen(pods: tuple[ObservedPod, ...], chosen: str):
    plan = reconcile(wish(2, 2), seen(pods), NOW)
    assert [flip.name for flip in plan.flips] == [f"f-t-decode-aaaaaaaa-{chosen}"]


@pytest.mark.parametrize("busy", [1.0, None])
def test_of_several_that_would_go_an_idle_one_is_chosen_before_a_busy_or_unknown_one(busy: float | None):
    loads = (0.0, busy, 0.0, 9.0, 9.0)
    pods = tuple(replace(p, busy=load) for p, load in zip(workers(1, 4), loads, strict=True))
    plan = reconcile(wish(2, 2), seen((*pods[:1], replace(pods[1], deletion_cost=-1), *pods[2:])), NOW)
    assert len(plan.flips) + len(plan.delete) == 2
    assert [flip.name for flip in plan.flips] == ["f-t-decode-aaaaaaaa-1"]


@pytest.mark.parametrize("odd", [{"ready": False}, {"sick": "xid"}])
def test_a_worker_that_cannot_serve_is_no_partner_that_spares_a_flip(odd: dict[str, Any]):
    """One prefill worker exists, but none serves well: a decode worker makes up for it sooner than a cold start."""
    first, *rest = workers(1, 3)
    plan = reconcile(wish(2, 3), seen((replace(first, **odd), *rest)), NOW)
    assert [flip.role for flip in plan.flips] == ["prefill"]


FAILED = FleetStatus(tiers=(TierStatus(name="t", flip=FlipStatus(failed_at="1970-01-01T00:16:30Z", message="x")),))
"""Ten seconds before NOW."""


@pytest.mark.parametrize(
    ("observed", "status"),
    [
        pytest.param(replace(seen(workers(1, 3)), templates={"t": Template("aaaaaaaa", "c")}), FleetStatus(), id="unequal-pods"),
        pytest.param(seen(workers(1, 3)), FAILED, id="one-failed-a-moment-ago"),
        pytest.param(seen(workers(1, 3, busy=1.0, drain_s=600.0)), FleetStatus(), id="long-streams"),
        pytest.param(seen(workers(1, 3, busy=None, drain_s=600.0)), FleetStatus(), id="unknown-load"),
        pytest.param(seen(workers(1, 3, ready_since=1.0)), FleetStatus(), id="cold-starts-are-quicker"),
        pytest.param(seen(workers(1, 3, sick="xid", leaving="xid")), FleetStatus(), id="failing-devices"),
    ],
)
def test_no_flip(observed: Observed, status: FleetStatus):
    plan = reconcile(wish(2, 2).model_copy(update={"status": status}), observed, NOW)
    assert plan.flips == ()
    assert sum(wanted.role == "prefill" for wanted in plan.create) >= 1


def test_no_flip_while_a_rollout_is_under_way():
    old = tuple(replace(p, revision="bbbbbbbb") for p in workers(1, 3))
    plan = reconcile(wish(2, 2), seen(old, stored={"t": {"bbbbbbbb": Template("bbbbbbbb", "c", flippable=True)}}), NOW)
    assert (plan.flips, bool(plan.create)) == ((), True)


def test_a_lost_role_is_repaired_by_a_flip_and_the_other_role_gets_the_cold_start():
    plan = reconcile(wish(1, 3), seen(workers(0, 3)), NOW)
    assert [flip.role for flip in plan.flips] == ["prefill"]
    assert [wanted.name for wanted in plan.create] == ["f-t-decode-aaaaaaaa-3"], "the name of the flipped one stays taken"
    assert plan.delete == ()
    assert sum(target.state == "serving" for target in plan.targets) == 2, "decode workers go on alone"


def test_workers_held_for_want_of_partners_are_flipped_first():
    pods = tuple(replace(p, serving=p.role == "prefill" or p.ordinal < 3) for p in workers(1, 6))
    plan = reconcile(wish(2, 6), seen(pods), NOW)
    assert [flip.name for flip in plan.flips] == ["f-t-decode-aaaaaaaa-3"]
    assert sorted(wanted.role for wanted in plan.create) == ["decode"]


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 2)])
def test_nothing_is_taken_from_a_role_that_has_none_to_spare(prefill: int, decode: int):
    plan = reconcile(wish(2, 3), seen(workers(prefill, decode)), NOW)
    assert plan.flips == ()
    assert plan.create


@pytest.mark.parametrize(
    ("cold_s", "created"),
    [pytest.param(60.0, 0, id="all-wait"), pytest.param(5.0, 1, id="one-waits"), pytest.param(3.0, 2, id="none-waits")],
)
def test_of_many_pairs_as_many_wait_for_the_next_flip_as_are_sooner_than_a_cold_start(cold_s: float, created: int):
    plan = reconcile(wish(4, 4), seen(workers(1, 7, ready_since=cold_s)), NOW)
    assert did(plan) == (1, created, created)
    done = Observed()
    observed = seen(workers(1, 7, ready_since=cold_s))
    assert reconcile(wish(4, 4), after(plan, observed), NOW + 1).flips == (), "one at a time"
    for step in range(20):
        plan = reconcile(wish(4, 4), observed, NOW + step)
        done = after(plan, observed)
        moving = {p.uid: FlipReport(p.flipping, "Serving", proof="ok") for p in done.pods if p.flipping}
        observed = replace(done, flips=moving)
    roles = [p.role for p in done.pods]
    assert (roles.count("prefill"), roles.count("decode")) == (4, 4)


def on_the_way(**more: Any) -> Observed:
    """(1, 3) → (2, 2), the last decode worker told."""
    return seen(with_one(1, 3, flipping="prefill", flip_since=NOW, drain_s=30.0), **more)


UID = "uid-f-t-decode-aaaaaaaa-2"


def test_a_worker_that_declines_goes_on_and_the_cold_start_follows():
    plan = reconcile(wish(2, 2), on_the_way(flips={UID: FlipReport("decode", "Draining", refused="409 Draining")}), NOW + 1)
    assert plan.flips == (FlipWanted("f-t-decode-aaaaaaaa-2", UID, None),)
    assert [wanted.role for wanted in plan.create] == ["prefill"]
    assert len(plan.delete) == 1
    assert plan.status.tiers[0].flip is not None
    assert "409 Draining" in plan.status.tiers[0].flip.message


@pytest.mark.parametrize(
    ("report", "seconds", "why"),
    [
        pytest.param(FlipReport("prefill", "Serving", problem="other tokens"), 1.0, "other tokens", id="a-liar"),
        pytest.param(FlipReport("decode", "FlippingRole"), 63.0, "says decode and FlippingRole", id="too-slow"),
        pytest.param(FlipReport(), 63.0, "does not answer", id="silent"),
    ],
)
def test_a_worker_that_cannot_be_trusted_is_deleted_and_made_cold(report: FlipReport, seconds: float, why: str):
    observed = on_the_way(flips={UID: report})
    plan = reconcile(wish(2, 2), observed, NOW + seconds)
    assert [gone.uid for gone in plan.delete] == [UID]
    assert why in plan.delete[0].reason
    assert [wanted.role for wanted in plan.create] == ["prefill"]
    assert (plan.flips, plan.relabels) == ((), ())
    assert plan.status.tiers[0].flip is not None
    next_one = wish(2, 2).model_copy(update={"status": plan.status})
    assert reconcile(next_one, seen(workers(1, 3)), NOW + seconds + 1).flips == (), "none is tried for a while"


def test_a_worker_on_its_way_has_its_time():
    plan = reconcile(wish(2, 2), on_the_way(flips={UID: FlipReport("decode", "FlippingRole")}), NOW + 61.0)
    assert (did(plan), plan.relabels) == ((0, 0, 0), ())


def test_words_without_a_proof_change_nothing():
    plan = reconcile(wish(2, 2), on_the_way(flips={UID: FlipReport("prefill", "Serving")}), NOW + 1)
    assert (did(plan), plan.relabels) == ((0, 0, 0), ())


def test_a_worker_that_goes_is_not_relabelled_though_it_proved_itself():
    """Somebody deleted it: as one of its new role it would be counted, and told to the routers, while it ends."""
    going = on_the_way(flips={UID: FlipReport("prefill", "Serving", proof="equal tokens")})
    observed = replace(going, pods=(*going.pods[:-1], replace(going.pods[-1], terminating=True)))
    plan = reconcile(wish(2, 2), observed, NOW + 1)
    assert (plan.relabels, [wanted.role for wanted in plan.create]) == ((), ["prefill"])


def test_a_worker_that_dies_on_its_way_is_made_anew_in_the_role_that_it_was_to_take():
    plan = reconcile(wish(2, 2), seen(with_one(1, 3, flipping="prefill", flip_since=NOW, phase="Failed", ready=False)), NOW + 1)
    assert [wanted.role for wanted in plan.create] == ["prefill"]
    assert [gone.uid for gone in plan.delete] == [UID]


def test_the_pool_of_its_old_role_stays_until_it_has_changed():
    """Garbage collection would take the pod with it."""
    plan = reconcile(wish(1, 3), seen(workers(1, 3)), NOW)
    pools = carry_out(plan, seen(())).pools
    only = replace(pod("x", "decode", 0), tier="old", flipping="prefill", flip_since=NOW)
    observed = seen((*workers(1, 3), only), pools=tuple(replace(p, tier="old", name=f"old-{p.role}") for p in pools))
    assert reconcile(wish(1, 3), observed, NOW).pools_gone == ()


def test_a_cold_start_is_the_median_of_those_that_were_one():
    assert cold_start_s(()) == COLD_START_S
    took = [10.0, 20.0, 900.0]
    pods = [replace(p, ready_since=t) for p, t in zip(workers(0, 3), took, strict=True)]
    odd = workers(3, 0)
    strangers = [replace(odd[0], flipped=True), replace(odd[1], restarts=1), replace(odd[2], ready_since=86_400.0)]
    assert cold_start_s([*strangers, *pods]) == 20.0


@pytest.mark.parametrize(
    ("role", "busy", "load", "lease_s", "expected"),
    [
        pytest.param("decode", 0.0, RoleLoad(), 30.0, NOTICE_S, id="idle"),
        pytest.param("decode", 2.0, RoleLoad(), 30.0, NOTICE_S + 90.0, id="unknown-latency-is-the-drain-timeout"),
        pytest.param("decode", None, RoleLoad(itl_p99_s=0.01), 30.0, NOTICE_S + 1.0, id="100-tokens-of-10-ms"),
        pytest.param("decode", 1.0, RoleLoad(itl_p99_s=10.0), 30.0, NOTICE_S + 90.0, id="never-above-the-drain-timeout"),
        pytest.param("prefill", 1.0, RoleLoad(ttft_p99_s=0.5), 0.0, NOTICE_S + 0.5, id="prefill"),
        pytest.param("prefill", 0.0, RoleLoad(), 30.0, 30.0, id="leases-that-nobody-counts"),
    ],
)
def test_how_long_a_flip_takes(role: Role, busy: float | None, load: RoleLoad, lease_s: float, expected: float):
    one = Replica((pod("x", role, 0, busy=busy, drain_s=90.0),))
    assert flip_s(one, TierTelemetry(prefill=load, decode=load), 100, lease_s) == expected


def test_a_failure_is_remembered_for_a_while_and_not_moved_by_being_seen_again():
    first = remember([None, None], "x", NOW)
    assert first == FlipStatus(failed_at="1970-01-01T00:16:40Z", message="x")
    assert remember([None, first], "x", NOW + 5) == first
    assert remember([None, first], "", NOW + RETRY_S - 1) == first
    assert remember([None, first], "", NOW + RETRY_S) is None
    assert remember([None, first], "y", NOW + 5) == FlipStatus(failed_at="1970-01-01T00:16:45Z", message="y")


# -- engines that are started anew ------------------------------------------------------------------------------------
def anew(pods: tuple[ObservedPod, ...], engine_s: float | None, **more: Any) -> Observed:
    """Workers whose engine is started once more for its other role, and takes that long."""
    known = TierTelemetry(engine_start_s=engine_s)
    return replace(start(flippable=True, starts_anew=True), pods=pods, telemetry={"t": known}, **more)


@pytest.mark.parametrize(
    ("engine_s", "flips"),
    [
        pytest.param(40.0, 1, id="sooner-than-a-cold-start"),
        pytest.param(57.9, 1, id="just-sooner"),
        pytest.param(58.0, 0, id="with-the-notice-as-long-as-a-cold-start"),
        pytest.param(None, 0, id="not-known"),
    ],
)
def test_an_engine_that_is_started_anew_must_be_known_to_be_sooner(engine_s: float | None, flips: int):
    plan = reconcile(wish(2, 2), anew(workers(1, 3), engine_s), NOW)
    assert (len(plan.flips), len(plan.create)) == (flips, 1 - flips)


@pytest.mark.parametrize(
    ("engine_s", "late_s"),
    [
        pytest.param(40.0, NOTICE_S + 30.0 + 30.0 + 2 * 60.0, id="twice-a-cold-start"),
        pytest.param(90.0, NOTICE_S + 30.0 + 30.0 + 2 * 90.0, id="twice-an-engine's-start"),
        pytest.param(None, NOTICE_S + 30.0 + 30.0 + 2 * 60.0, id="an-operator-that-has-read-nothing-yet"),
    ],
)
def test_an_engine_that_is_started_anew_has_its_time(engine_s: float | None, late_s: float):
    moving = with_one(1, 3, flipping="prefill", flip_since=NOW, drain_s=30.0)
    observed = anew(moving, engine_s, flips={UID: FlipReport("decode", "FlippingRole")})
    assert did(reconcile(wish(2, 2), observed, NOW + late_s)) == (0, 0, 0)
    plan = reconcile(wish(2, 2), observed, NOW + late_s + 1)
    assert [gone.uid for gone in plan.delete] == [UID]
    assert "says decode and FlippingRole" in plan.delete[0].reason


@pytest.mark.parametrize(
    ("engine_s", "shown"),
    [
        pytest.param(None, {"restarts": 1}, id="an-operator-that-began-anew-beside-workers-that-did"),
        pytest.param(None, {"flipped": True}, id="nobody-but-flipped-ones"),
        pytest.param(86_399.0, {}, id="a-worker-that-lies"),
        pytest.param(ANEW_MOST_S, {}, id="a-large-model"),
    ],
)
def test_an_engine_of_which_nothing_is_known_has_the_time_that_its_agent_gives_it_and_nobody_more(
    engine_s: float | None, shown: dict[str, Any]
):
    """Where no worker showed a start, two minutes were given, and a worker whose engine was on its way was deleted. And whoever
    said that its own took a day gave two to every one that hung."""
    moving = tuple(replace(one, **shown) for one in with_one(1, 3, flipping="prefill", flip_since=NOW, drain_s=30.0))
    observed = anew(moving, engine_s, flips={UID: FlipReport("decode", "FlippingRole")})
    late_s = NOTICE_S + 30.0 + 30.0 + ANEW_MOST_S
    assert did(reconcile(wish(2, 2), observed, NOW + late_s)) == (0, 0, 0)
    assert [gone.uid for gone in reconcile(wish(2, 2), observed, NOW + late_s + 1).delete] == [UID]


def test_a_flip_with_a_new_engine_takes_its_start_beside_the_rest():
    one = Replica((pod("x", "prefill", 0, busy=0.0, drain_s=90.0),))
    assert flip_s(one, TierTelemetry(engine_start_s=50.0), 100, 30.0, starts_anew=True) == 80.0
    assert flip_s(one, TierTelemetry(), 100, 30.0, starts_anew=True) == float("inf")
