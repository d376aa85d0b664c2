"""O18, the random part: a rollout that another one interrupts, so that three revisions have workers at once, and workers that
become ready in any order. There is no third role: what can be three here is the number of revisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from fleet_api.quantities import Ratio
from fleet_planner.ratio import Pair, largest, within
from fleet_planner.rollout import Group, Limits, auto_surge, covers, devices, plan_step, smaller

RATIOS = ((Ratio(1, 4), Ratio(1, 1)), (Ratio(2, 5), Ratio(1, 2)), (Ratio(1, 2), Ratio(1, 2)), (Ratio(1, 2), Ratio(3, 1)))
REVISIONS_MOST = 3
TICKS_MOST = 200


@dataclass
class Tier:
    """Workers of several revisions; the newest is the wanted one."""

    want: Pair
    limits: Limits
    groups: dict[str, Group] = field(default_factory=dict)
    wanted: str = "r0"
    leaving: int = 0
    begun: int = 0

    def serving(self) -> Pair:
        pairs = [largest(smaller(group.ready, self.want), self.limits.low, self.limits.high) for group in self.groups.values()]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

    def held(self) -> int:
        return sum(devices(group.alive, self.limits.gpus) for group in self.groups.values()) + self.leaving

    def another_revision(self) -> None:
        if sum(any(group.alive) for group in self.groups.values()) < REVISIONS_MOST:
            self.begun += 1
            self.wanted = f"r{self.begun}"

    def become_ready(self, role: int, which: int) -> None:
        """One worker of a role in one of the groups."""
        name = sorted(self.groups)[which % len(self.groups)]
        group = self.groups[name]
        ready = list(group.ready)
        ready[role] = min(group.alive[role], ready[role] + 1)
        self.groups[name] = Group(name, group.alive, (ready[0], ready[1]))

    def step(self) -> bool:
        """One pass of the operator; what it deletes holds its devices until the next one."""
        new = self.groups.get(self.wanted, Group(self.wanted))
        olds = [group for name, group in self.groups.items() if name != self.wanted]
        before = dict(self.groups), self.leaving
        step = plan_step(self.want, new, olds, self.limits, leaving_gpus=self.leaving)
        gone = 0
        for name in {*self.groups, self.wanted}:
            group, size = self.groups.get(name, Group(name)), step.sizes.get(name, (0, 0))
            kept = smaller(group.alive, size)
            gone += devices(group.alive, self.limits.gpus) - devices(kept, self.limits.gpus)
            self.groups[name] = Group(name, size, smaller(group.ready, kept))
        self.groups = {name: group for name, group in self.groups.items() if any(group.alive) or name == self.wanted}
        self.leaving = gone
        return before != (self.groups, self.leaving)


def check(tier: Tier, floor: Pair, most: int) -> None:
    serving = tier.serving()
    assert covers(serving, floor), (serving, tier)
    assert tier.held() <= most, tier
    assert serving == (0, 0) or within(*serving, tier.limits.low, tier.limits.high), (serving, tier)


EVENTS = st.one_of(st.just(("revision", 0, 0)), st.tuples(st.just("ready"), st.integers(0, 1), st.integers(0, 2)),
                   st.just(("pass", 0, 0)))  # fmt: skip


@given(
    st.sampled_from(RATIOS), st.integers(1, 6), st.integers(1, 6), st.sampled_from((None, 0, 1, 2, 3, 6)), st.integers(0, 2),
    st.sampled_from(((1, 1), (1, 4), (2, 1))), st.lists(EVENTS, max_size=60),
)  # fmt: skip
def test_o18_a_rollout_interrupted_by_others_keeps_every_rule_and_ends(
    ratio: tuple[Ratio, Ratio],
    prefill: int,
    decode: int,
    surge: int | None,
    unavailable: int,
    gpus: Pair,
    events: list[tuple[str, int, int]],
):
    want = largest((prefill, decode), *ratio)
    limits = Limits(*ratio, gpus, surge, unavailable)
    tier = Tier(want, limits, {"r0": Group("r0", want, want)})
    needed = auto_surge(want, limits, None)
    most = devices(want, gpus) + (needed if surge is None else surge)
    floor = max(0, want[0] - unavailable), max(0, want[1] - unavailable)
    for event, role, which in events:
        if event == "revision":
            tier.another_revision()
        elif event == "ready":
            tier.become_ready(role, which)
        tier.step()
        check(tier, floor, most)
    for tick in range(TICKS_MOST):
        for which in range(len(tier.groups)):
            tier.become_ready(tick % 2, which)
        moved = tier.step()
        check(tier, floor, most)
        if not moved and all(group.ready == group.alive for group in tier.groups.values()):
            break
    else:
        raise AssertionError(f"never ends: {tier}")
    if surge is None or surge >= needed:
        assert tier.groups == {tier.wanted: Group(tier.wanted, want, want)}, tier
