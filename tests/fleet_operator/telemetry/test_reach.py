"""Targets that nobody answers at: how often and how many at once they are asked."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from fleet_operator.telemetry.reach import FIRST_PAUSE_S, FORGET_S, LONGEST_PAUSE_S, Reach
from fleet_operator.telemetry.scrape import ScrapeTelemetry
from tests.fleet_operator.telemetry.answers import fleet, pod


def test_a_target_is_asked_again_after_a_pause_that_grows_with_its_silence():
    reach, now, asked = Reach(), 0.0, []
    while now < 2_000:
        if reach.split(["x"], now) == ([], ["x"]):
            asked.append(now)
            reach.told("x", False, now)
        now += 1.0
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    assert pauses == [FIRST_PAUSE_S, 10, 20, 40, 80, 160, *[LONGEST_PAUSE_S] * 5]


def test_one_answer_ends_the_pauses():
    reach = Reach()
    for now in (0.0, 5.0, 15.0):
        reach.told("x", False, now)
    reach.told("x", True, 35.0)
    assert reach.split(["x"], 36.0) == (["x"], [])
    reach.told("x", False, 40.0)
    assert reach.split(["x"], 44.0) == ([], [])
    assert reach.split(["x"], 45.0) == ([], ["x"])


def test_targets_that_are_gone_are_forgotten():
    reach = Reach()
    for number in range(100):
        reach.told(f"gone-{number}", False, 0.0)
    for now in range(0, int(FORGET_S) + 200, 30):
        reach.split(["here"], float(now))
        reach.told("here", True, float(now))
    assert len(reach) == 1


class Silent(ScrapeTelemetry):
    """Nobody answers, except at some addresses."""

    def __init__(self, answering: set[str], clock: list[float]) -> None:
        super().__init__(monotonic=lambda: clock[0])
        self.answering = answering
        self.asked: list[str] = []

    async def _get(self, target: str, url: str) -> bytes | None:
        address = url.split("/")[2].split(":", maxsplit=1)[0]
        self.asked.append(address)
        self._reach.told(target, address in self.answering, self._monotonic())
        return b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n" if address in self.answering else None


def pods(count: int, ready_since: str = "2026-01-01T00:00:00Z") -> list[dict[str, Any]]:
    made = [pod(f"p{number}", "prefill", f"10.0.0.{number}") for number in range(count)]
    for one in made:
        one["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": ready_since}]
    return made


def rounds(telemetry: Silent, clock: list[float], count: int, found: list[dict[str, Any]]) -> list[int]:
    """Requests sent in each of some rounds, five seconds apart."""

    async def go() -> list[int]:
        sent = []
        for _ in range(count):
            before = len(telemetry.asked)
            await telemetry.collect(fleet(), found, [])
            sent.append(len(telemetry.asked) - before)
            clock[0] += 5.0
        await telemetry.close()
        return sent

    return asyncio.run(go())


def test_a_fleet_that_cannot_be_reached_costs_a_few_tries_and_then_ever_fewer():
    clock = [0.0]
    sent = rounds(Silent(set(), clock), clock, 120, pods(8))
    assert max(sent) <= 4
    assert sum(sent[:20]) <= 8 * 5
    assert sum(sent[60:]) <= 8 * 2


def test_a_fleet_that_can_be_reached_is_known_in_one_round_however_large():
    clock = [0.0]
    telemetry = Silent({f"10.0.0.{number}" for number in range(100)}, clock)
    assert rounds(telemetry, clock, 2, pods(100)) == [100, 100]


def test_a_pod_that_becomes_ready_is_asked_at_once():
    clock = [0.0]
    telemetry = Silent(set(), clock)

    async def go() -> None:
        for _ in range(20):
            await telemetry.collect(fleet(), pods(1), [])
            clock[0] += 5.0
        telemetry.answering, before = {"10.0.0.0"}, len(telemetry.asked)
        await telemetry.collect(fleet(), pods(1, "2026-01-01T00:01:40Z"), [])
        assert len(telemetry.asked) - before == 1
        await telemetry.close()

    asyncio.run(go())
