"""Conditions keep the time of their last transition."""

from __future__ import annotations

from typing import get_args

from fleet_api.conditions import CONDITION_TYPES, ConditionType, set_condition, set_conditions


def test_time_moves_only_when_the_status_does():
    first = set_condition((), "Ready", "False", "NotAvailable", "no worker", generation=1, now=0)
    same = set_condition(first, "Ready", "False", "NotAccepted", "bad", generation=2, now=60)
    changed = set_condition(same, "Ready", "True", "AllGood", generation=2, now=120)
    assert [conditions[0].last_transition_time for conditions in (first, same, changed)] == [
        "1970-01-01T00:00:00Z",
        "1970-01-01T00:00:00Z",
        "1970-01-01T00:02:00Z",
    ]
    assert (same[0].reason, same[0].message, same[0].observed_generation) == ("NotAccepted", "bad", 2)


def test_setting_the_same_twice_changes_nothing():
    once = set_condition((), "Ready", "True", "AllGood", generation=1, now=0)
    assert set_condition(once, "Ready", "True", "AllGood", generation=1, now=500) == once


def test_known_types_come_in_their_order_and_others_stay():
    conditions = ()
    for kind in reversed(CONDITION_TYPES):
        conditions = set_condition(conditions, kind, "Unknown", "NoData", generation=1, now=0)
    assert tuple(condition.type for condition in conditions) == CONDITION_TYPES
    assert get_args(ConditionType) == CONDITION_TYPES


def test_a_long_message_is_cut_to_what_the_schema_allows():
    assert len(set_condition((), "Ready", "False", "NotAvailable", "x" * 9999, generation=1, now=0)[0].message) == 4096


def test_several_at_once_are_as_one_after_the_other():
    first = set_condition((), "Ready", "True", "AllGood", "well", generation=1, now=0)
    first = set_condition(first, "Available", "True", "Serving", "answers", generation=1, now=0)
    verdicts = {
        "Ready": ("True", "AllGood", "well"),
        "Accepted": ("True", "Valid", ""),
        "Available": ("False", "NoRouter", "x" * 9999),
    }
    apart = first
    for kind, (status, reason, message) in verdicts.items():
        apart = set_condition(apart, kind, status, reason, message, generation=1, now=60)
    found = set_conditions(first, verdicts, generation=1, now=60)
    assert found == apart
    assert [(one.type, one.status, one.last_transition_time) for one in found] == [
        ("Accepted", "True", "1970-01-01T00:01:00Z"),
        ("Available", "False", "1970-01-01T00:01:00Z"),
        ("Ready", "True", "1970-01-01T00:00:00Z"),
    ]
    assert found[2] is first[1]
