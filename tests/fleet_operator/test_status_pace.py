"""Words and counts of workers at once, counters rarely, the last of them always."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fleet_operator.status_pace import COUNTERS_S, StatusPace


def status(**kv: Any) -> dict[str, Any]:
    return {
        "tiers": [{"name": "t", "prefill": {"serving": 1}, "kv": {"transfers": 1, "failed": 0, "transport": "shm", **kv}}],
        "conditions": [
            {"type": "Disaggregating", "status": "True", "message": f"{kv} moved"},
            {"type": "Ready", "status": "True", "message": "the fleet serves"},
        ],
    }


@pytest.mark.parametrize(
    ("change", "at_once"),
    [
        (lambda s: s["tiers"][0]["kv"].update(transfers=9), False),
        (lambda s: s["conditions"][0].update(message="9 transfers"), False),
        (lambda s: s["tiers"][0]["kv"].update(failed=1), True),
        (lambda s: s["tiers"][0]["kv"].update(transport="tcp"), True),
        (lambda s: s["tiers"][0].pop("kv"), True),
        (lambda s: s["tiers"][0]["prefill"].update(serving=2), True),
        (lambda s: s["conditions"][0].update(status="False"), True),
        (lambda s: s["conditions"][1].update(message="another"), True),
        (lambda s: s.update(observedGeneration=2), True),
    ],
    ids=["transfers", "their-words", "first-failure", "transport", "no-counters", "workers", "verdict", "words", "generation"],
)
def test_what_is_written_at_once(change: Any, at_once: bool):
    pace, wish = StatusPace(lambda: 1_000.0), copy.deepcopy(status())
    pace.written("u")
    change(wish)
    assert pace.is_due("u", status(), wish) is at_once


def test_counters_are_written_when_their_time_is_over():
    clock = [1_000.0]
    pace = StatusPace(lambda: clock[0])
    assert pace.is_due("u", status(), status(transfers=2))  # never written by this process
    pace.written("u")
    clock[0] += COUNTERS_S - 1
    assert not pace.is_due("u", status(), status(transfers=2))
    clock[0] += 1
    assert pace.is_due("u", status(), status(transfers=2))
    assert not pace.is_due("u", status(), status())


def test_a_clock_that_was_set_back_holds_no_counters_up():
    clock = [10_000.0]
    pace = StatusPace(lambda: clock[0])
    pace.written("u")
    clock[0] -= 3_600
    assert pace.is_due("u", status(), status(transfers=2))
    pace.written("u")
    assert not pace.is_due("u", status(), status(transfers=2))


def test_a_status_that_somebody_took_away_is_written_at_once():
    pace = StatusPace(lambda: 1_000.0)
    pace.written("u")
    assert pace.is_due("u", None, status())


def test_a_fleet_that_is_gone_is_forgotten():
    pace = StatusPace(lambda: 1_000.0)
    pace.written("u")
    pace.forget("u")
    assert pace.is_due("u", status(), status(transfers=2))


def test_one_fleet_on_one_machine_is_told_at_once():
    pace = StatusPace(lambda: 1_000.0, counters_s=0.0)
    present, wish = status(), copy.deepcopy(status())
    wish["tiers"][0]["kv"]["transfers"] += 1
    pace.written("u")
    assert pace.is_due("u", present, wish)
