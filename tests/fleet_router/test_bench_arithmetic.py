"""The benchmark's arithmetic, so that its ratios mean what they say."""

from __future__ import annotations

import os

import pytest

from e2e.bench.cpu import cpu_s, rss_mb
from e2e.bench.router import p99, ratio, slope
from e2e.bench.table import table


def test_slope_is_the_cost_of_one_more_chunk():
    assert slope(100.0, 500.0, 4, 44) == 10.0


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_below_one_when_ours_is_cheaper():
    assert ratio([1.0, 2.0, 30.0], [2.0, 4.0, 10.0]) == 0.5


@pytest.mark.parametrize(("count", "expected"), [(1, 1.0), (100, 99.0), (200, 198.0)])
def test_p99_is_a_value_that_was_measured(count: int, expected: float):
    assert p99([float(i) for i in range(count, 0, -1)]) == expected


def test_cpu_time_grows_with_work_and_memory_is_ours():
    before = cpu_s(os.getpid())
    sum(range(3_000_000))
    assert cpu_s(os.getpid()) > before
    assert 5 < rss_mb(os.getpid()) < 5_000


def test_a_table_lines_up():
    assert table(("router", "µs"), [("ours", 5.634), ("envoy", 128.2)]) == "router    µs\nours    5.63\nenvoy    128"
