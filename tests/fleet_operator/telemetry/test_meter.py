"""KV counters over the lives of engines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.telemetry.meter import KvMeter


@pytest.mark.parametrize(
    ("readings", "transfers"),
    [
        ([{"a": 5, "b": 7}], 12),
        ([{"a": 5, "b": 7}, {"a": 2, "b": 8}], 15),
        ([{"a": 5, "b": 7}, {"a": None, "b": 8}, {"a": 6, "b": 8}], 14),
        ([{"a": 5, "b": 7}, {"b": 8}, {"b": 8, "c": 1}], 14),
        ([{"a": 5, "b": 7}, {"b": 8}, {"a": 6, "b": 8}], 14),
        ([{f"p{n}": 1} for n in range(3000)], 3000),
        ([{"a": 5}, {}, {"b": 0}], 5),
        ([{"a": 5}, {"a": None}, {"a": 1}], 6),
    ],
    ids=[
        "sum",
        "one-started-again",
        "unreadable-once",
        "one-is-gone",
        "one-was-away",
        "many-come-and-go",
        "all-gone",
        "started-again-unseen",
    ],
)
def test_what_moved_stays_counted(readings: list[dict[str, Any]], transfers: int):
    meter = KvMeter()
    found = None
    for reading in readings:
        found = meter.read({uid: None if n is None else (n, 2 * n, 3 * n, 0) for uid, n in reading.items()}, 9.0)
    assert found is not None
    assert (found.transfers, found.blocks, found.bytes, found.failed, found.measured_at) == (
        transfers, 2 * transfers, 3 * transfers, 0, 9.0,
    )  # fmt: skip


def test_nothing_read_is_not_zero():
    assert KvMeter().read({"a": None}, 1.0) is None
    assert KvMeter().read({}, 1.0) is None


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(0, 9))))
def test_it_never_goes_down(readings: list[dict[str, int | None]]):
    meter, before = KvMeter(), 0
    for reading in readings:
        found = meter.read({uid: None if n is None else (n, 0, 0, 0) for uid, n in reading.items()}, 0.0)
        after = found.transfers if found is not None else 0
        assert after >= before
        before = after
