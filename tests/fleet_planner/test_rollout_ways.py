"""Workers of two revisions that do not hand KV to each other: a rollout is Stuck only where no row of steps leads to its end."""

from __future__ import annotations

from itertools import product

import pytest

from fleet_api.quantities import Ratio
from fleet_planner.ratio import Pair, largest, within
from fleet_planner.rollout import Group, Limits, covers, devices, why_stuck
from fleet_planner.ways import SIZES_MOST, ways
from tests.fleet_planner.test_rollout import FIXED, NARROW, ORDERS, PREFILL_HEAVY, WIDE, Rolling, run

BROAD, THIRDS, SIXTHS = (Ratio(1, 8), Ratio(8, 1)), (Ratio(1, 3), Ratio(2, 3)), (Ratio(1, 6), Ratio(1, 2))
MANY, EVEN, NEAR = (Ratio(2, 1), Ratio(4, 1)), (Ratio(1, 1), Ratio(1, 1)), (Ratio(2, 3), Ratio(3, 2))
RATIOS = (WIDE, NARROW, FIXED, PREFILL_HEAVY, BROAD, THIRDS, SIXTHS, MANY, EVEN, NEAR)
Counts = tuple[Pair, Pair]
"""Workers of the old revision and of the new one."""


def some_way_leads_there(want: Pair, limits: Limits) -> bool:
    """By every row of single steps: one new worker more (it is ready then), or one old worker less."""
    most, floor = devices(want, limits.gpus) + (limits.surge_gpus or 0), [count - limits.unavailable for count in want]
    begin: Counts = (want, (0, 0))
    seen, todo = {begin}, [begin]
    while todo:
        old, new = todo.pop()
        if not any(old):
            return True
        steps = [
            (old, (new[0] + 1, new[1])),
            (old, (new[0], new[1] + 1)),
            ((old[0] - 1, old[1]), new),
            ((old[0], old[1] - 1), new),
        ]
        for step in steps:
            fits = covers(want, step[1]) and min(step[0]) >= 0 and sum(devices(one, limits.gpus) for one in step) <= most
            serving = [largest(one, *limits.ratio) for one in step] if fits else []
            if fits and all(a + b >= least for a, b, least in zip(*serving, floor, strict=True)) and step not in seen:
                seen.add(step)
                todo.append(step)
    return False


def tight(ratio: tuple[Ratio, Ratio], gpus: Pair, most: int = 8) -> list[Rolling]:
    """Every allowed pair of up to `most` workers, with hardly any surge, one or two that may be missing."""
    settings = product(product(range(1, most + 1), repeat=2), range(4), range(4))
    return [
        Rolling(w, Limits(*ratio, gpus, surge, missing), "together", w) for w, surge, missing in settings if within(*w, *ratio)
    ]


@pytest.mark.parametrize("gpus", [(1, 1), (1, 4), (2, 1)])
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_rollout_is_stuck_only_where_no_row_of_steps_leads_to_its_end(ratio: tuple[Ratio, Ratio], gpus: Pair):
    """Incident: without surge 2+5 and 6+4 ended Stuck one short, as did 1 of 100 others: they grew in a direction in which the
    last old pair served one worker that nothing else could."""
    for rolling in tight(ratio, gpus):
        want, limits = rolling.want, rolling.limits
        floor = max(0, want[0] - limits.unavailable), max(0, want[1] - limits.unavailable)
        run(rolling, floor, devices(want, gpus) + (limits.surge_gpus or 0))
        if any(rolling.old):
            assert not some_way_leads_there(want, limits), rolling
            assert rolling.stuck, rolling
            assert covers(rolling.serving(), want), rolling  # nothing was taken away in vain


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("want", "limits"),
    [
        ((2, 5), Limits(*WIDE, (1, 1), 0, 1)),
        ((6, 4), Limits(*PREFILL_HEAVY, (1, 4), 0, 1)),
        ((3, 7), Limits(*THIRDS, (1, 1), 1, 1)),
        ((2, 8), Limits(*SIXTHS, (1, 4), 0, 2)),
        ((16, 41), Limits(*WIDE, (1, 1), 0, 1)),
    ],
)
def test_the_rows_that_ended_one_short_end(order: str, want: Pair, limits: Limits):
    rolling, missing = Rolling(want, limits, order, want), limits.unavailable
    run(rolling, (want[0] - missing, want[1] - missing), devices(want, limits.gpus) + (limits.surge_gpus or 0))
    assert (rolling.old, rolling.new_ready, rolling.stuck) == ((0, 0), want, False)


@pytest.mark.parametrize("ratio", [WIDE, THIRDS, SIXTHS])
def test_what_a_stuck_rollout_asks_for_is_enough_and_no_less_is(ratio: tuple[Ratio, Ratio]):
    for rolling in tight(ratio, (1, 1), 6):
        run(rolling, (0, 0), 100)
        if not rolling.stuck:
            continue
        words = why_stuck(rolling.want, Group("new"), rolling.limits)
        needed = int(words.split("needs ")[1].split(" ")[0])
        for surge, enough in ((needed, True), (needed - 1, False)):
            limits = Limits(*ratio, (1, 1), surge, rolling.limits.unavailable)
            assert some_way_leads_there(rolling.want, limits) is enough, rolling


def test_very_many_sizes_are_not_looked_through():
    side = 10**4
    assert side * side > SIZES_MOST
    assert ways((side, side), (side, side), WIDE, (1, 1), 2 * side) is None
