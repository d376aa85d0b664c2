"""Rollouts as the whole plan carries them out: paused in the middle, refused by a quota, rolled back while paused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.v1alpha1 import InferenceFleet
from fleet_planner.reconcile import Plan, reconcile
from fleet_planner.roles import Role
from fleet_planner.rollout import Group, Limits, hold_step
from fleet_planner.types import Observed, Problem, RevisionLoad, Template, TierTelemetry
from tests.fleet_planner.test_reconcile import NOW, carry_out, counts, fleet, start
from tests.fleet_planner.test_rollout import WIDE

OLD, NEW = "aaaaaaaa", "bbbbbbbb"
CANARY = {"steps": [25], "interval": "1m"}


class World:
    """A fleet of 2 prefill and 4 decode workers that is given a new template; `quota`: pods that may exist."""

    def __init__(self, **rollout: Any) -> None:
        self.fleet: InferenceFleet = fleet(
            ratio={"prefill": 2, "decode": 4}, prefill={"replicas": 2}, decode={"replicas": 4, "maxReplicas": 20}
        )
        self.observed: Observed = start()
        self.now, self.quota = NOW, 100
        self.configure(**rollout)
        self.steps(3)
        self.observed = replace(self.observed, templates={"t": Template(NEW, "c", number=2)})

    def configure(self, **rollout: Any) -> None:
        spec = self.fleet.spec.to_dict() | {"rollout": rollout}
        self.fleet = self.fleet.model_copy(update={"spec": self.fleet.spec.model_validate(spec)})

    def steps(self, count: int) -> Plan:
        for _ in range(count):
            self.now += 1
            plan = reconcile(self.fleet, self.observed, self.now)
            self.fleet = self.fleet.model_copy(update={"status": plan.status})
            gone = {one.uid for one in plan.delete}
            room = self.quota - sum(p.uid not in gone for p in self.observed.pods)
            made, refused = plan.create[: max(0, room)], plan.create[max(0, room) :]
            message = 'Pod {0}: pods "{0}" is forbidden: exceeded quota: gpus'
            problems = tuple(Problem("Forbidden", message.format(one.name)) for one in refused)
            self.observed = replace(carry_out(replace(plan, create=made), self.observed), problems=problems)
        return plan

    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(counts(self.observed, OLD).values()), tuple(counts(self.observed, NEW).values())

    def lose(self, revision: str, role: Role) -> None:
        victim = next(p for p in self.observed.pods if (p.revision, p.role) == (revision, role))
        self.observed = replace(self.observed, pods=tuple(p for p in self.observed.pods if p is not victim))

    def scale(self, decode: int) -> None:
        """Somebody's /scale on the pool of the new revision."""
        pools = [
            replace(p, replicas=p.replicas + decode) if (p.revision, p.role) == (NEW, "decode") else p
            for p in self.observed.pools
        ]
        self.observed = replace(self.observed, pools=tuple(pools))

    def rolling(self, plan: Plan) -> tuple[str, str]:
        condition = plan.status.condition("RollingOut")
        assert condition is not None
        return condition.reason, condition.message


def paused_in_the_middle(**rollout: Any) -> World:
    world = World(**rollout)
    world.steps(2)
    assert all(sum(size) > 1 for size in world.sizes())
    world.configure(**rollout, paused=True)
    return world


@pytest.mark.parametrize("canary", [None, {"steps": [25], "interval": "10m"}], ids=["plain", "canary"])
def test_an_undo_goes_back_though_the_rollout_is_paused(canary: dict[str, Any] | None):
    """3 am: who pauses a bad canary and then undoes it was told that it goes back. Its workers stayed until somebody resumed,
    with more requests than its share, because nobody judged it any more."""
    rollout = {"canary": canary} if canary else {}
    world = paused_in_the_middle(**rollout)
    world.observed = replace(world.observed, templates={"t": Template(OLD, "c")})
    world.steps(10)
    assert world.sizes() == ((2, 4), (0, 0))


def test_a_paused_canary_stays_one_whatever_the_spec_asks_for_next():
    """Its workers went on serving without a share, and unjudged, so that errors of theirs rolled nothing back."""
    canary = {"steps": [25], "interval": "10m"}
    world = paused_in_the_middle(canary=canary)
    had = world.sizes()
    world.observed = replace(world.observed, templates={"t": Template("cccccccc", "c", number=3)})
    plan = world.steps(3)
    assert (world.sizes(), [(split.revision, split.percent) for split in plan.splits]) == (had, [(NEW, 25)])
    assert "revision cccccccc waits until rollout.paused is false" in world.rolling(plan)[1]
    bad = TierTelemetry(revisions={NEW: RevisionLoad(100, 50, 100, 50)})
    world.observed = replace(world.observed, telemetry={"t": bad})
    world.steps(4)
    assert world.sizes() == ((2, 4), (0, 0))
    world.configure(canary=canary)
    plan = world.steps(2)
    assert [split.revision for split in plan.splits] == ["cccccccc"]


def test_a_pause_in_the_middle_keeps_both_groups_and_resuming_goes_on():
    world = paused_in_the_middle()
    plan = world.steps(6)
    assert (world.sizes(), world.rolling(plan)[0]) == (((1, 3), (1, 1)), "Paused")
    assert (plan.create, plan.delete) == ((), ())
    world.configure()
    world.steps(10)
    assert world.sizes() == ((0, 0), (2, 4))


def test_a_template_that_changes_while_paused_is_told_as_waiting():
    """Incident: RollingOut said Complete, "every worker has the wanted revision", and `fleet rollout status` ended with 0."""
    world = World(paused=True)
    plan = world.steps(3)
    assert world.sizes() == ((2, 4), (0, 0))
    assert world.rolling(plan) == ("Paused", f"tier t: revision {NEW} waits until rollout.paused is false")
    world.configure()
    assert world.rolling(world.steps(1))[0] == "Progressing"


@pytest.mark.parametrize("unavailable", [0, 2])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("revision", [OLD, NEW])
def test_what_a_paused_rollout_loses_comes_back_where_it_was(revision: str, role: Role, unavailable: int):
    """Incident: a lost worker of the new group did not come back; its partner held a device and could never serve."""
    world = paused_in_the_middle(maxUnavailable=unavailable, maxSurgeGpus=2)
    world.steps(1)
    had = world.sizes()
    world.lose(revision, role)
    world.steps(4)
    assert world.sizes() == had == (((1, 1), (1, 1)) if unavailable else ((1, 3), (1, 1)))
    assert all(p.serving for p in world.observed.pods)


def test_a_paused_rollout_creates_nothing_and_says_so():
    """With maxUnavailable it is held with fewer workers than the tier's size: Provisioned said for hours that pods come."""
    world = World(maxUnavailable=1, maxSurgeGpus=0)
    world.steps(3)
    world.configure(maxUnavailable=1, maxSurgeGpus=0, paused=True)
    plan = world.steps(4)
    assert world.sizes() == ((1, 2), (1, 1))
    provisioned = plan.status.condition("Provisioned")
    assert (plan.create, provisioned.reason) == ((), "AllCreated")
    world.lose(OLD, "decode")
    lost = reconcile(world.fleet, world.observed, world.now + 1)
    assert (len(lost.create), lost.status.condition("Provisioned").reason) == (1, "Creating")


def test_workers_that_find_no_node_take_nothing_from_the_old_ones_while_paused():
    world = paused_in_the_middle()
    world.configure(paused=True, maxUnavailable=2)
    stuck = [replace(p, ready=False, unschedulable=True) if p.revision == NEW else p for p in world.observed.pods]
    world.observed = replace(world.observed, pods=tuple(stuck))
    world.steps(3)
    assert world.sizes() == ((1, 3), (1, 1))


def test_scaling_works_while_a_rollout_is_paused_and_the_new_revision_does_not_grow():
    world = paused_in_the_middle()
    world.steps(1)
    world.scale(4)
    world.steps(3)
    assert world.sizes() == ((2, 7), (1, 1))  # of 2 and 8; 7 decode workers need 2 prefill workers
    world.scale(-4)
    world.steps(3)
    assert world.sizes() == ((1, 3), (1, 1))


def test_a_node_that_goes_away_is_left_while_a_rollout_is_paused():
    world = paused_in_the_middle()
    world.steps(1)
    moved = next(p for p in world.observed.pods if (p.revision, p.role) == (NEW, "decode"))
    pods = [replace(p, leaving="node n is cordoned") if p is moved else p for p in world.observed.pods]
    world.observed = replace(world.observed, pods=tuple(pods))
    world.steps(3)
    assert world.sizes() == ((1, 3), (1, 1))
    assert moved.uid not in {p.uid for p in world.observed.pods}


def test_a_breach_rolls_back_while_paused():
    """Else the bad revision went on with an even share of the requests: the canary's own share ends with it."""
    world = World(canary=CANARY)
    world.steps(3)
    assert world.sizes() == ((2, 4), (1, 1))
    world.configure(canary=CANARY, paused=True)
    loads = {OLD: RevisionLoad(100, 0, 100, 0), NEW: RevisionLoad(100, 50, 100, 50)}
    world.observed = replace(world.observed, telemetry={"t": TierTelemetry(revisions=loads)})
    plan = world.steps(3)
    assert (world.sizes(), world.rolling(plan)[0]) == (((2, 4), (0, 0)), "RolledBack")


@pytest.mark.parametrize("more", [{}, {"maxUnavailable": 1, "maxSurgeGpus": 0}], ids=["room", "no-room"])
def test_a_breach_rolls_back_to_its_end_though_a_third_revision_waits_behind_the_pause(more: dict[str, Any]):
    """RolledBack was told in one pass only. Without room to surge the way back takes several: the pause held it from the second
    on, and the bad revision served on, with more than its share and judged by nobody, until somebody resumed."""
    canary = {"steps": [50], "interval": "10m"}
    world = World(canary=canary, **more)
    world.steps(4)
    world.configure(canary=canary, paused=True, **more)
    world.observed = replace(world.observed, templates={"t": Template("cccccccc", "c", number=3)})
    bad = TierTelemetry(revisions={NEW: RevisionLoad(100, 50, 100, 50)})
    world.observed = replace(world.observed, telemetry={"t": bad})
    told = [world.rolling(world.steps(1)) for _ in range(5)]
    assert world.sizes() == ((2, 4), (0, 0))
    assert set(told) == {
        (
            "RolledBack",
            f"tier t: revision {NEW} was rolled back: 50 of 100 requests failed, 1.00% may; the old revision serves; "
            "tier t: revision cccccccc waits until rollout.paused is false",
        )
    }
    world.observed = replace(world.observed, templates={"t": Template(NEW, "c", number=2)})
    assert world.rolling(world.steps(1))[1].endswith(f"; the old revision serves; {TRY_AGAIN}")  # it is not tried again
    world.observed = replace(world.observed, templates={"t": Template("cccccccc", "c", number=3)}, telemetry={})
    world.configure(canary=canary, **more)
    assert world.rolling(world.steps(1))[0] == "Progressing"


def test_sizes_of_a_held_rollout():
    limits, new = Limits(*WIDE, surge_gpus=2), Group(NEW, (1, 1), (1, 1))
    lost, kept = Group(OLD, (1, 2), (1, 2)), {OLD: (1, 3), NEW: (1, 1)}
    assert hold_step((2, 4), new, [lost], kept, limits, resized=False).sizes == kept
    unplanned = hold_step((2, 4), new, [lost], {}, limits, resized=False)
    assert unplanned.sizes == {OLD: (1, 2), NEW: (1, 1)}
    grown = hold_step((4, 8), new, [lost], kept, limits, resized=True).sizes
    assert grown == {OLD: (3, 7), NEW: (1, 1)}
    starting = replace(new, ready=(0, 0))
    assert hold_step((4, 8), starting, [lost], kept, limits, resized=True).sizes == {OLD: (4, 8), NEW: (1, 1)}
    tight = replace(limits, surge_gpus=0)
    assert hold_step((4, 8), starting, [lost], kept, tight, resized=True).sizes == {OLD: (4, 6), NEW: (1, 1)}
    assert hold_step((1, 1), new, [lost], kept, limits, resized=True).sizes == {OLD: (0, 0), NEW: (1, 1)}


def test_a_quota_without_room_for_surge_lets_old_workers_go_first_when_they_may_be_missing():
    """Incident: with 6 pods of quota and `maxUnavailable: 2` the rollout of 2 and 4 workers never began."""
    world = World(maxUnavailable=2, maxSurgeGpus=3)
    world.quota = 6
    for _ in range(12):
        plan = world.steps(1)
        served = [target.role for target in plan.targets if target.state == "serving"]
        assert served.count("decode") >= 2
    assert world.sizes() == ((0, 0), (2, 4))


def test_a_quota_that_blocks_a_rollout_is_named():
    world = World(maxSurgeGpus=3)
    world.quota = 6
    plan = world.steps(5)
    assert world.sizes() == ((2, 4), (0, 0))
    assert world.rolling(plan) == (
        "Stuck",
        "tier t: a quota refuses the new workers, and rollout.maxUnavailable lets no old one go first; "
        "give it room, raise that limit, or go back: fleet rollout undo f -n n",
    )
    world.quota = 9
    world.steps(10)
    assert world.sizes() == ((0, 0), (2, 4))


def test_what_a_quota_refuses_to_others_is_not_this_rollouts():
    """The message names the pod."""
    world = World(maxUnavailable=2, maxSurgeGpus=3)
    foreign = (Problem("Forbidden", 'Pod f-other-decode-bbbbbbbb-0: pods "x" is forbidden: exceeded quota: gpus'),)
    world.observed = replace(world.observed, problems=foreign)
    world.steps(1)
    assert world.sizes()[0] == (2, 4)


def test_a_canary_that_does_not_fit_asks_for_more_than_there_is():
    """It said that the next step needed 0 more devices: a rollout without a canary needs none."""
    world = World(canary={"steps": [75], "interval": "1m"}, maxSurgeGpus=0, maxUnavailable=1)
    told = world.rolling(world.steps(12))
    assert told[0] == "Stuck"
    assert "rollout.maxSurgeGpus is 0, but inside the ratio the next step needs 1 more devices" in told[1]


NO_IMAGE = 'Back-off pulling image "w:9": not found'


def cannot_start(world: World) -> None:
    """No new worker gets its image; the old ones are as they were."""
    changed = [
        replace(p, ready=False, blocked=True, message=NO_IMAGE) if p.revision == NEW else p for p in world.observed.pods
    ]  # fmt: skip
    world.observed = replace(world.observed, pods=tuple(changed))


TRY_AGAIN = "mend the spec to try another one, or have this one tried again: fleet rollout restart f -n n"


@pytest.mark.parametrize(
    ("rollout", "reason", "next_step"),
    [
        ({}, "ProgressDeadlineExceeded", "; mend the spec, or go back: fleet rollout undo f -n n"),
        ({"canary": CANARY}, "RolledBack", f"; the old revision serves; {TRY_AGAIN}"),
    ],
    ids=["plain", "canary"],
)
def test_a_revision_that_does_not_come_says_why_and_what_to_do(rollout: dict[str, Any], reason: str, next_step: str):
    """3 am: the new revision's image could not be pulled. "did not move for 20s: new 0+0 ready of 1+1, old 1+1" was all that the
    status had: Available is True while the old workers serve, and CapacityLimited is about nodes."""
    world = World(progressDeadline="1m", **rollout)
    world.steps(1)
    for _ in range(2):
        world.now += 61
        cannot_start(world)
        plan = world.steps(1)
    told = world.rolling(plan)
    assert told[0] == reason
    assert NO_IMAGE in told[1]
    assert told[1].endswith(next_step)


def test_what_ails_an_old_worker_is_not_what_the_new_revision_waits_for():
    world = World(progressDeadline="1m")
    world.steps(1)
    for _ in range(2):
        world.now += 61
        cannot_start(world)
        ill = next(p for p in world.observed.pods if (p.revision, p.role) == (OLD, "decode"))
        hung = replace(ill, ready=False, message="its disk is full")
        world.observed = replace(world.observed, pods=tuple(hung if p is ill else p for p in world.observed.pods))
        plan = world.steps(1)
    reason, words = world.rolling(plan)
    assert reason == "ProgressDeadlineExceeded"
    assert NO_IMAGE in words
    assert "disk" not in words
