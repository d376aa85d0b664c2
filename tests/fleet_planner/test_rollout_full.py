"""Rollouts in a cluster that has no room, or hardly any, beside what runs: mates are replaced one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_api.quantities import Ratio
from fleet_planner.ratio import Pair, within
from fleet_planner.reconcile import Plan
from fleet_planner.roles import ROLES
from fleet_planner.rollout import auto_surge, covers, devices
from tests.fleet_planner.test_capacity_passes import NEW, OLD, STEP_S, Nodes, of
from tests.fleet_planner.test_reconcile import counts
from tests.fleet_planner.test_rollout import FIXED, NARROW, PREFILL_HEAVY, WIDE, rollouts, run

START_S = 30.0
RATIOS: dict[str, tuple[Pair, ...]] = {"1:4-1:1": ((1, 1), (1, 2), (1, 3), (2, 2), (2, 5), (3, 4)), "1:2-1:2": ((1, 2), (2, 4))}
CASES = [
    pytest.param(ratio, want, spare, missing, id=f"{want[0]}+{want[1]}-of-{ratio}-{spare}-spare-{missing}-missing")
    for ratio, wants in RATIOS.items()
    for want in wants
    for spare in (0, 1)
    for missing in (0, 1)
]


class Full(Nodes):
    """New workers serve START_S after they got a node; `compat`: what those of the new revision hand KV to."""

    compat, selector = "c", ""
    """`selector`: the role of which no new worker fits any node."""

    def step(self, seconds: float = STEP_S) -> Plan:
        plan = super().step(seconds)
        self.observed = replace(self.observed, pods=tuple(self._seen(pod) for pod in self.observed.pods))
        return plan

    def _seen(self, pod: Any) -> Any:
        if pod.revision != NEW:
            return pod
        nowhere = pod.role == self.selector
        at = pod.scheduled_at if pod.scheduled_at is not None else self.now
        placed = {"node": None, "unschedulable": True, "ready": False} if nowhere else {}
        ready = pod.ready and self.now - at >= START_S
        return replace(pod, compat=self.compat, **{"ready": ready, "scheduled_at": at if pod.node else None, **placed})

    def serving(self) -> Pair:
        roles = [target.role for target in self.plan.targets if target.state == "serving"]
        return roles.count("prefill"), roles.count("decode")


def rolled(ratio: str, want: Pair, spare: int, missing: int, **more: Any) -> Full:
    """To its end; at each step no fewer serve than may, inside the ratio."""
    low, _, high = ratio.partition("-")
    roles = {role: {"replicas": count, "minReplicas": 1, "maxReplicas": 9} for role, count in zip(ROLES, want, strict=True)}
    tier = {"ratio": {"prefill": want[0], "decode": want[1], "min": low, "max": high}, **roles}
    nodes = Full(of({"rollout": {"maxUnavailable": missing}, "scaling": {"mode": "manual"}}, **tier), sum(want) + spare)
    for name, value in more.items():
        setattr(nodes, name, value)
    nodes.run(300)
    nodes.rollout()
    bounds = nodes.fleet.spec.tiers[0].ratio
    for _ in range(200):
        nodes.step()
        found = nodes.serving()
        assert all(have >= whole - missing for have, whole in zip(found, want, strict=True)), found
        assert found == (0, 0) or within(*found, bounds.min_ratio, bounds.max_ratio), found
    return nodes


@pytest.mark.parametrize(("ratio", "want", "spare", "missing"), CASES)
def test_one_device_is_enough_for_workers_that_hand_kv_to_each_other(ratio: str, want: Pair, spare: int, missing: int):
    """Incident: with `maxUnavailable: 1` and no room, 1+2 was Stuck, and so was each rollout beside one free device: what gives
    way is a pair, and the half of a new one that found room served nobody, though the old ones took its KV."""
    nodes = rolled(ratio, want, spare, missing)
    if spare == 0 and (missing == 0 or ratio == "1:2-1:2"):  # of an exact ratio nothing may be missing alone
        assert nodes.verdict("RollingOut")[0] == "Stuck"
        assert nodes.serving() == want
    else:
        assert nodes.verdict("RollingOut")[0] == "Complete"
        assert (tuple(counts(nodes.observed).values()), counts(nodes.observed, OLD)) == (want, {"prefill": 0, "decode": 0})


@pytest.mark.parametrize("more", [{"compat": "other"}, {"selector": "prefill"}, {"selector": "decode"}])
@pytest.mark.parametrize("spare", [0, 1])
def test_what_cannot_end_serves_on_and_says_so(more: dict[str, str], spare: int):
    nodes = rolled("1:4-1:1", (1, 2), spare, 0, **more)
    assert nodes.verdict("RollingOut")[0] == "Stuck"
    assert nodes.serving()[0] >= 1
    assert nodes.serving()[1] >= 2


@pytest.mark.parametrize("ratio", [WIDE, NARROW, FIXED, PREFILL_HEAVY])
def test_every_small_rollout_of_mates_keeps_every_rule_and_is_never_stuck_one_short(ratio: tuple[Ratio, Ratio]):
    """2+5 and 6+4 without surge ended with a pair of the old revision that no step replaced, and a worker fewer than wanted."""
    for rolling in rollouts(ratio, (1, 4), mates=True):
        want, limits = rolling.want, rolling.limits
        if (limits.surge_gpus or 0) > 2 or limits.unavailable > 3:
            continue  # enough of each, and the enumeration without mates has them
        needed = auto_surge(want, limits, None)
        surge = needed if limits.surge_gpus is None else limits.surge_gpus
        floor = max(0, want[0] - limits.unavailable), max(0, want[1] - limits.unavailable)
        run(rolling, floor, devices(want, limits.gpus) + surge)
        if not any(rolling.old):
            assert (rolling.new_ready, rolling.stuck) == (want, False), rolling
        else:
            assert surge < needed, rolling
            assert rolling.stuck, rolling
            assert covers(rolling.serving(), want), rolling
