"""Rollout arithmetic, proven by going through small fleets exhaustively: every state of every rollout keeps every rule.

LWS's planner, restated, breaks its surge bound in 1,308 of 44,100 two-role rollouts (its own 27 table tests show none): its
counterexample is a row here, and the enumeration is the reason that ours is believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest

from fleet_api.quantities import Ratio
from fleet_planner.ratio import Pair, grown, largest, smallest, within
from fleet_planner.rollout import Canary, Group, Limits, auto_surge, covers, devices, plan_step, smaller, why_stuck

WIDE, NARROW, FIXED = (Ratio(1, 4), Ratio(1, 1)), (Ratio(2, 5), Ratio(1, 2)), (Ratio(1, 2), Ratio(1, 2))
PREFILL_HEAVY = (Ratio(1, 2), Ratio(3, 1))
RATIOS = (WIDE, NARROW, FIXED, PREFILL_HEAVY)
ORDERS = ("together", "prefill first", "decode first", "one by one")


@dataclass
class Rolling:
    """A tier in mid-rollout; pods take one tick to be ready (in the order given) and one to be gone."""

    want: Pair
    limits: Limits
    order: str
    old: Pair
    new: Pair = (0, 0)
    new_ready: Pair = (0, 0)
    leaving: int = 0
    stuck: bool = False
    mates: bool = False
    """Both revisions hand KV to each other."""

    def serving(self) -> Pair:
        """What the router would be told: each group's largest allowed pair."""
        low, high = self.limits.low, self.limits.high
        if self.mates:
            new = smaller(self.new_ready, self.want)
            return largest((self.old[0] + new[0], self.old[1] + new[1]), low, high)
        one, other = largest(self.old, low, high), largest(smaller(self.new_ready, self.want), low, high)
        return one[0] + other[0], one[1] + other[1]

    def state(self) -> tuple[Pair, Pair, Pair, int]:
        """All that changes."""
        return self.old, self.new, self.new_ready, self.leaving

    def held(self) -> int:
        return devices(self.old, self.limits.gpus) + devices(self.new, self.limits.gpus) + self.leaving

    def tick(self) -> bool:
        """One pass of the operator, then one of the cluster; False when both changed nothing."""
        before = self.state()
        new = Group("new", self.new, self.new_ready, starting=self.new != self.new_ready)
        old = Group("old", self.old, self.old, mates=self.mates)
        step = plan_step(self.want, new, [old], self.limits, leaving_gpus=self.leaving)
        self.stuck = step.stuck
        left, grown_to = step.sizes.get("old", (0, 0)), step.sizes["new"]
        kept = smaller(self.new, grown_to)
        gone = max(0, devices(self.old, self.limits.gpus) - devices(left, self.limits.gpus))
        gone += devices(self.new, self.limits.gpus) - devices(kept, self.limits.gpus)
        self.leaving = gone
        self.old, self.new, self.new_ready = left, grown_to, smaller(self.new_ready, kept)
        self._become_ready(kept)
        return before != self.state()

    def _become_ready(self, started: Pair) -> None:
        missing = started[0] - self.new_ready[0], started[1] - self.new_ready[1]
        if self.order == "together":
            self.new_ready = started
        elif self.order == "one by one":
            role = 0 if missing[0] else 1
            self.new_ready = (self.new_ready[0] + (role == 0), self.new_ready[1] + (role == 1 and missing[1] > 0))
        else:
            first = 0 if self.order == "prefill first" else 1
            role = first if missing[first] else 1 - first
            self.new_ready = (started[0], self.new_ready[1]) if role == 0 else (self.new_ready[0], started[1])


def rollouts(ratio: tuple[Ratio, Ratio], gpus: Pair, *, mates: bool = False) -> Iterator[Rolling]:
    """Every allowed pair of 0-6 workers, every surge from 0 to 6 and the automatic one, 0-6 that may be missing, every order."""
    for want, surge, missing, order in product(product(range(7), repeat=2), (None, *range(7)), range(7), ORDERS):
        if within(*want, *ratio):
            yield Rolling(want, Limits(*ratio, gpus, surge, missing), order, want, mates=mates)


def run(rolling: Rolling, floor: Pair, most: int) -> None:
    """To the end or to where it is stuck, every state checked."""
    low, high = rolling.limits.low, rolling.limits.high
    for _ in range(500):
        serving = rolling.serving()
        assert covers(serving, floor), (rolling, serving)
        assert rolling.held() <= most, rolling
        assert serving == (0, 0) or within(*serving, low, high), rolling
        if not rolling.tick():
            return
    raise AssertionError(f"never ends: {rolling}")


@pytest.mark.parametrize("gpus", [(1, 1), (1, 4), (0, 0)])
@pytest.mark.parametrize(("ratio", "count"), list(zip(RATIOS, (4_480, 1_120, 896, 6_272), strict=True)))
def test_o18_every_small_rollout_ends_and_keeps_every_rule(ratio: tuple[Ratio, Ratio], count: int, gpus: Pair):
    """38,304 in all; the 44,100 of LWS's planner have pairs among them that no ratio allows."""
    checked = 0
    for rolling in rollouts(ratio, gpus):
        want, limits = rolling.want, rolling.limits
        needed = auto_surge(want, limits, None)
        surge = needed if limits.surge_gpus is None else limits.surge_gpus
        floor = max(0, want[0] - limits.unavailable), max(0, want[1] - limits.unavailable)
        run(rolling, floor, devices(want, limits.gpus) + surge)
        checked += 1
        if limits.surge_gpus is None or limits.surge_gpus >= needed:
            assert (rolling.old, rolling.new, rolling.new_ready, rolling.stuck) == ((0, 0), want, want, False), rolling
        elif any(rolling.old):
            assert rolling.stuck, rolling
            # nothing is taken away for a step that there is no room for
            assert covers(rolling.serving(), want), rolling
    assert checked == count


@pytest.mark.parametrize("want", [(1, 2), (1, 3), (2, 4), (3, 6)])
def test_a_rollout_without_surge_ends_or_leaves_everything_as_it_was(want: Pair):
    """Incident: `maxSurgeGpus: 0` and `maxUnavailable: 1` took a decode worker away, and were Stuck one short for ever."""
    rolling = Rolling(want, Limits(*WIDE, surge_gpus=0, unavailable=1), "together", want)
    run(rolling, (want[0] - 1, want[1] - 1), sum(want))
    assert (rolling.old, rolling.new, rolling.stuck) in (((0, 0), want, False), (want, (0, 0), True))


def test_a_rollout_with_too_little_surge_says_so():
    limits = Limits(*WIDE, surge_gpus=1)
    rolling = Rolling((2, 4), limits, "together", (2, 4))
    run(rolling, (2, 4), 7)
    assert (rolling.stuck, rolling.old) == (True, (2, 4))


@dataclass(frozen=True, slots=True)
class Way:
    """What there is from one state to the end."""

    least: Pair
    """Of each role, the fewest that ever serve."""
    most: int
    """Devices, when most are held."""
    outside: Pair | None
    """What served outside of the ratio; None: nothing did."""
    end: tuple[Pair, Pair, Pair, int]


def way(rolling: Rolling, known: dict[tuple[Pair, Pair, Pair, int], Way]) -> Way:
    """From here on. A state that another rollout with the same settings came through is not gone on from again: what follows
    depends on nothing else."""
    passed = []
    while (at := rolling.state()) not in known:
        assert len(passed) < 500, f"never ends: {rolling}"
        serving = rolling.serving()
        passed.append((at, serving, rolling.held()))
        if not rolling.tick():
            known[at] = Way(serving, passed.pop()[2], _outside(serving, rolling.limits), at)
            break
    found = known[at]
    for state, serving, held in reversed(passed):
        outside = found.outside or _outside(serving, rolling.limits)
        found = known[state] = Way(smaller(serving, found.least), max(held, found.most), outside, found.end)
    return found


def _outside(serving: Pair, limits: Limits) -> Pair | None:
    return None if serving == (0, 0) or within(*serving, limits.low, limits.high) else serving


def resizes(ratio: tuple[Ratio, Ratio], gpus: Pair) -> Iterator[tuple[Pair, Limits, str, list[Pair]]]:
    """1-6 wanted workers of each role, every surge from 0 to 6 and the automatic one, 0-6 that may be missing, every order, and
    all 0-6 old ones of each role that they may replace."""
    pairs = list(product(range(7), repeat=2))
    olds = [old for old in pairs if old == (0, 0) or inside(old, ratio)]
    for want, surge, missing, order in product(pairs, (None, *range(7)), range(7), ORDERS):
        if inside(want, ratio):
            yield want, Limits(*ratio, gpus, surge, missing), order, olds


def inside(pair: Pair, ratio: tuple[Ratio, Ratio]) -> bool:
    """A pair that can serve whole."""
    return 0 not in pair and within(*pair, *ratio)


RESIZES = {WIDE: 85_120, NARROW: 4_480, FIXED: 2_688, PREFILL_HEAVY: 169_344}


@pytest.mark.parametrize(
    ("ratio", "gpus"), [*((ratio, (1, 1)) for ratio in RATIOS), *((ratio, (1, 4)) for ratio in (WIDE, NARROW, FIXED))]
)
def test_rollout_and_resize_together_never_serve_less_than_both_sizes_allow(ratio: tuple[Ratio, Ratio], gpus: Pair):
    """A resize while a revision changes: all 261,632 where each worker has one device, none left out, and 92,288 where decode
    workers have four."""
    checked = 0
    for want, limits, order, olds in resizes(ratio, gpus):
        surge = auto_surge(want, limits, None) if limits.surge_gpus is None else limits.surge_gpus
        known: dict[tuple[Pair, Pair, Pair, int], Way] = {}
        for old in olds:
            both = smaller(old, want)
            floor = largest((max(0, both[0] - limits.unavailable), max(0, both[1] - limits.unavailable)), *ratio)
            found = way(Rolling(want, limits, order, old), known)
            where = want, limits, order, old, found
            assert covers(found.least, floor), where
            assert found.most <= max(devices(old, gpus), devices(want, gpus) + surge), where
            assert found.outside is None, where
            if limits.surge_gpus is None:
                assert (found.end[0], found.end[2]) == ((0, 0), want), where
            checked += 1
    assert checked == RESIZES[ratio]


def test_lws_counterexample_surge_zero_is_never_exceeded():
    """style.md section 3: old (1,2), target (1,2), surge 0 for prefill: LWS runs 2 prefill workers where 1 fit."""
    limits = Limits(*WIDE, surge_gpus=0, unavailable=1)
    rolling = Rolling((1, 2), limits, "prefill first", (1, 2))
    run(rolling, (0, 1), 3)
    assert rolling.stuck  # one worker at a time cannot replace a pair: it says so and touches nothing
    assert rolling.old == (1, 2)
    text = why_stuck((1, 2), Group("new"), limits)
    assert "rollout.maxSurgeGpus is 0" in text
    assert "needs 1 more devices" in text


def test_a_stuck_revision_stays_inside_its_surge_and_the_old_one_keeps_serving():
    limits = Limits(*WIDE)
    new, old = Group("new"), Group("old", (2, 4), (2, 4))
    step = plan_step((2, 4), new, [old], limits)
    assert step.sizes == {"new": (1, 1), "old": (2, 4)}
    waiting = plan_step((2, 4), Group("new", (1, 1), (0, 0)), [old], limits)
    assert waiting.sizes == step.sizes
    assert waiting.rolling
    assert not waiting.stuck


def test_lost_old_workers_come_back_while_the_new_revision_does_not_serve():
    step = plan_step((2, 4), Group("new", (1, 1)), [Group("old", (1, 3), (1, 3))], Limits(*WIDE))
    assert step.sizes["old"] == (2, 4)


def test_what_finds_no_node_takes_room_from_the_old_revision_only_when_allowed():
    new, old = Group("new", (1, 1), (0, 0), unschedulable=True), Group("old", (2, 4), (2, 4))
    assert plan_step((2, 4), new, [old], Limits(*WIDE)).stuck
    limits = Limits(*WIDE, unavailable=1)
    step = plan_step((2, 4), new, [old], limits)
    assert step.sizes["old"] == (1, 3)
    assert not step.stuck
    # one did go, and that was not enough: to say that none may would send nobody to the right field
    assert plan_step((2, 4), new, [Group("old", (1, 3), (1, 3))], limits).stuck
    assert why_stuck((2, 4), new, limits).endswith("rollout.maxUnavailable lets no further old one go first")


def test_a_canary_stays_small_and_the_old_revision_whole():
    canary, limits = Canary((1, 2)), Limits(*WIDE)
    old = Group("old", (4, 8), (4, 8))
    first = plan_step((4, 8), Group("new"), [old], limits, canary=canary)
    assert first.sizes == {"new": (1, 2), "old": (4, 8)}
    judged = plan_step((4, 8), Group("new", (1, 2), (1, 2)), [old], limits, canary=canary)
    assert judged.sizes == first.sizes
    assert judged.rolling
    assert not judged.stuck


def test_a_canary_without_room_replaces_old_workers_when_they_may_be_missing():
    canary, limits = Canary((1, 1)), Limits(*WIDE, surge_gpus=0, unavailable=1)
    step = plan_step((4, 4), Group("new"), [Group("old", (4, 4), (4, 4))], limits, canary=canary)
    assert step.sizes["old"] == (3, 3)


@pytest.mark.parametrize(
    ("want", "limits", "new", "kept"),
    [
        ((2, 2), Limits(*WIDE, unavailable=2), Group("new", (1, 1), unschedulable=True), (1, 1)),
        ((2, 4), Limits(*WIDE, unavailable=4), Group("new", (1, 1), refused=True), (1, 1)),
        ((2, 2), Limits(*WIDE, surge_gpus=0, unavailable=2), Group("new"), (1, 1)),
        ((2, 2), Limits(*WIDE, surge_gpus=0, unavailable=2), Group("new", (1, 0), (1, 0)), (1, 1)),
        ((1, 1), Limits(*WIDE, unavailable=1), Group("new", (1, 1), unschedulable=True), (1, 1)),
        ((1, 1), Limits(*WIDE, surge_gpus=0, unavailable=1), Group("new"), (0, 0)),  # both at once are more than it may have
    ],
)
def test_a_canary_without_room_leaves_a_pair_of_the_old_revision(want: Pair, limits: Limits, new: Group, kept: Pair):
    """Where all workers may be missing the whole old revision was deleted for a canary that found no node: nothing answered, and
    nothing was there to go back to."""
    step = plan_step(want, new, [Group("old", want, want)], limits, canary=Canary((1, 1)))
    assert step.sizes["old"] == kept
    left = Group("old", kept, kept, returns=True)
    assert plan_step(want, new, [left], limits, canary=Canary((1, 1))).sizes["old"] == kept


def test_two_old_revisions_give_way_before_a_third():
    olds = [Group("worse", (1, 1), (0, 0)), Group("better", (2, 2), (2, 2))]
    step = plan_step((2, 2), Group("new", (0, 0)), olds, Limits(*WIDE))
    assert step.sizes["better"] == (2, 2)
    assert step.sizes["worse"] == (0, 0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_largest_smallest_and_grown_against_all_pairs(ratio: tuple[Ratio, Ratio]):
    low, high = ratio
    for box in product(range(9), repeat=2):
        inside = [
            p for p in product(range(box[0] + 1), range(box[1] + 1)) if p == (0, 0) or (0 not in p and within(*p, low, high))
        ]
        best = largest(box, low, high)
        assert best in inside
        assert all(covers(best, other) for other in inside)
        above = [p for p in product(range(box[0], 40), range(box[1], 80)) if 0 not in p and within(*p, low, high)]
        if any(box):
            least = smallest(box, low, high)
            assert least in above
            assert all(covers(other, least) for other in above)
        for room in range(12):
            fits = grown((0, 0), box, (1, 2), room, low, high)
            assert fits in inside
            assert fits[0] + 2 * fits[1] <= room
            assert fits != (0, 0) or not any(any(p) and p[0] + 2 * p[1] <= room for p in inside)
