"""Answers against transfers, reading by reading: told within N answers whatever their rate, never from what could not be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.telemetry.aggregate import Reading, WorkerReading, decode_counts, tier_telemetry, watch_tier
from fleet_operator.telemetry.kvwatch import LATE_TOLD_TRANSFERS, KvWatch, watched
from fleet_operator.telemetry.meter import KvMeter
from fleet_operator.telemetry.parse import parse_text
from fleet_planner.fabric import NOT_MOVING_ANSWERS, disaggregating

Step = tuple[float | None, float | None, float | None]
"""Counters of one router, and of one decode worker: answers, transfers, failures."""


def played(*steps: Step) -> KvWatch:
    watch = KvWatch()
    for answers, moved, failed in steps:
        watch = watched(watch, {"r": answers}, {"d": moved}, {"d": failed})
    return watch


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(5, 5, 0)], (None, None)),
        ([(5, 5, 0), (9, 5, 0)], (4, 0)),
        ([(5, 5, 0), (9, 5, 0), (15, 5, 2)], (10, 2)),
        ([(5, 5, 0), (9, 5, 0), (15, 6, 2)], (0, 0)),
        ([(5, 5, 0), (9, None, None), (12, 5, 0)], (3, 0)),
        ([(5, 5, 0), (None, 5, 0), (9, 5, 0)], (4, 0)),
        ([(5, 5, 0), (2, 5, 0)], (2, 0)),
        ([(5, 5, 0), (6, 0, 0)], (1, 0)),
        ([(5, 5, 0), (6, 1, 0)], (0, 0)),
        ([(100, 100, 0), *[(100 + n, 100, 0) for n in range(1, 11)]], (10, 0)),
    ],
    ids=[
        "one-reading", "not-moving", "adds-up", "moved", "unreadable-worker", "unreadable-router", "router-restarted",
        "worker-restarted", "worker-restarted-and-moved", "one-a-minute",
    ],
)  # fmt: skip
def test_since_the_last_transfer(steps: list[Step], expected: tuple[int | None, int | None]):
    found = played(*steps)
    assert (found.answers, found.failed) == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20))
def test_answers_since_is_their_sum_after_the_last_move(steps: list[tuple[int, bool]]):
    answers = moved = since = 0
    watch = watched(KvWatch(), {"r": 0}, {"d": 0}, {"d": 0})
    for more, moves in steps:
        answers, moved = answers + more, moved + moves
        since = 0 if moves else since + more
        watch = watched(watch, {"r": answers}, {"d": moved}, {"d": 0})
    assert (watch.answers or 0) == since


def test_with_one_unreadable_worker_nothing_is_concluded():
    first = watched(KvWatch(), {"r": 0}, {"a": 1, "b": 1}, {"a": 0, "b": 0})
    second = watched(first, {"r": 50}, {"a": 1, "b": None}, {"a": 0, "b": None})
    assert second.answers is None
    third = watched(second, {"r": 51}, {"a": 1, "b": 1}, {"a": 0, "b": 0})
    assert third.answers == 1


def test_a_worker_that_is_new_or_gone_is_not_held_against_anybody():
    first = watched(KvWatch(), {"r": 0}, {"a": 100}, {"a": 0})
    second = watched(first, {"r": 5}, {"b": 900}, {"b": 0})
    assert (second.answers, dict(second.moved)) == (None, {"b": 900})


AGENT_ALONE = 'fleet_agent_role_epoch{role="decode"} 3\nfleet_agent_transport_info{transport="tcp"} 1\n'
"""What a worker's agent answers while its engine starts, says nothing within three seconds, or answers with an error."""


@pytest.mark.parametrize("starting", [[], [WorkerReading("t", "decode", Reading(parse_text(AGENT_ALONE), 1.0), "d-1")]])
def test_a_fleet_that_answers_without_kv_is_told_within_n_answers(starting: list[WorkerReading]):
    """From exposition to condition, 200s flowing all the time, also while a worker starts."""
    watch, verdict, answered = KvWatch(), ("", "", ""), 0
    decode = Reading(parse_text("vllm:nixl_xfer_time_seconds_count 7\nvllm:nixl_bytes_transferred_sum 70"), 1.0)
    workers = [WorkerReading("t", "decode", decode, "d-0"), *starting]
    for answered in range(40, 61):
        text = f'fleet_router_handed_over_total{{tier="t"}} {answered}\nfleet_router_handed_over_total{{tier="u"}} 5'
        routers = {"r": Reading(parse_text(text), 1.0)}
        watch = watch_tier("t", watch, workers, routers)
        verdict = disaggregating({"t": tier_telemetry("t", workers, list(routers.values()), [None], 1.0, watch)})
        if verdict[1] == "KvNotMoving":
            break
        assert verdict[1] == "KvMoved"
    assert answered - 40 == NOT_MOVING_ANSWERS
    assert verdict[0] == "False"


@pytest.mark.parametrize(
    ("steps", "late"),
    [
        ([(5, 1), (6, 1)], 0),
        ([(5, 1), (6, 3)], 2),
        ([(5, 1), (6, 3), (6 + LATE_TOLD_TRANSFERS - 1, 3)], 2),
        ([(5, 1), (6, 3), (6 + LATE_TOLD_TRANSFERS - 1, 3), (9 + LATE_TOLD_TRANSFERS, 3)], 0),
        ([(5, 1), (6, 3), (900, 4), (1_100, 4)], 3),
        ([(5, 1), (6, None), (7, 3)], 2),
        ([(5, 7), (6, 1)], 1),
        ([(5, None), (6, 4)], 0),
    ],
    ids=["none", "two", "not-yet-over", "over", "again", "unreadable", "restarted", "of-before-we-looked"],
)
def test_kv_that_was_read_after_its_leases_end(steps: list[tuple[float, float | None]], late: int):
    watch = KvWatch()
    for moved, ended in steps:
        watch = watched(watch, {"r": 0}, {"d": moved}, {"d": 0}, {"p": ended})
    assert watch.late == late


def test_a_fleet_whose_kv_is_read_too_late_is_told():
    """vLLM 0.32's decode worker answers 200 from it, and only the prefill worker's log said so."""
    watch, verdict = KvWatch(), ("", "", "")
    decode = Reading(parse_text("vllm:nixl_xfer_time_seconds_count 7\nvllm:nixl_bytes_transferred_sum 70"), 1.0)
    for ended in (2, 3):
        told = Reading(parse_text(f'vllm:nixl_num_notifications_after_expiry_total{{engine="0",model_name="m"}} {ended}.0'), 1.0)
        workers = [WorkerReading("t", "decode", decode, "d-0"), WorkerReading("t", "prefill", told, "p-0")]
        watch = watch_tier("t", watch, workers, {})
        verdict = disaggregating({"t": tier_telemetry("t", workers, [], [], 1.0, watch)})
    assert verdict[:2] == ("False", "KvReadLate")


def test_an_engine_that_said_nothing_once_has_not_counted_from_zero():
    """All that it had ever counted was taken for new when it spoke again: transfers that failed a week ago were KvFailing, late
    reads of then KvReadLate, answers without KV were forgotten, and the counters of the status were twice what had moved."""
    engine = "vllm:num_requests_running 1\nvllm:nixl_xfer_time_seconds_count 7\nvllm:nixl_num_failed_transfers_total 4\n"
    engine += "vllm:nixl_num_notifications_after_expiry_total 2\n"
    watch, meter = KvWatch(), KvMeter()
    for answered, said in enumerate((engine + AGENT_ALONE, AGENT_ALONE, engine + AGENT_ALONE)):
        told = Reading(parse_text(said), 1.0)
        workers = [WorkerReading("t", "decode", told, "d-0"), WorkerReading("t", "prefill", told, "p-0")]
        routers = {"r": Reading(parse_text(f'fleet_router_handed_over_total{{tier="t"}} {answered}'), 1.0)}
        watch = watch_tier("t", watch, workers, routers)
        counted = meter.read(decode_counts("t", workers), 1.0)
        proof = tier_telemetry("t", workers, [], [], 1.0, watch).kv
        assert (proof is None) == (said == AGENT_ALONE)
    assert (watch.answers, watch.failed, watch.late) == (1, 0, 0)
    assert counted is not None
    assert (counted.transfers, counted.failed) == (7, 4)
