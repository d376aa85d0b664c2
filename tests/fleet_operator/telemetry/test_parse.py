"""Prometheus text becomes numbers; what is no number is absent, never zero."""

from __future__ import annotations

import math

import pytest

from fleet_operator.telemetry.parse import MAX_LINES, buckets, parse_text, quantile, total


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("up 1", 1.0),
        ('up{a="b"} 2.5', 2.5),
        ("up 3 1700000000000", 3.0),
        ('up{a="quo\\"te } x",b="c"} 4e3', 4000.0),
        ("up NaN", None),
        ("up +Inf", None),
        ("up one", None),
        ("# TYPE up gauge", None),
        ("", None),
        ("up", None),
    ],
)
def test_a_line(line: str, value: float | None):
    assert total(parse_text(line), "up") == value


def test_totals_sum_over_the_labels_that_match():
    samples = parse_text('load{role="prefill",tier="a"} 1\nload{role="prefill",tier="b"} 2\nload{role="decode",tier="a"} 4')
    assert total(samples, "load") == 7
    assert total(samples, "load", role="prefill") == 3
    assert total(samples, "load", role="prefill", tier="b") == 2
    assert total(samples, "load", role="router") is None


def test_more_lines_than_the_bound_are_not_read():
    assert len(parse_text("up 1\n" * (MAX_LINES + 5))) == MAX_LINES


INF = math.inf


@pytest.mark.parametrize(
    ("before", "after", "q", "expected"),
    [
        (None, {}, 0.5, None),
        (None, {1.0: 0, INF: 0}, 0.5, None),
        (None, {1.0: 10, 2.0: 10, INF: 10}, 0.5, 0.5),
        (None, {1.0: 5, 2.0: 10, INF: 10}, 0.75, 1.5),
        ({1.0: 5, 2.0: 5, INF: 5}, {1.0: 5, 2.0: 15, INF: 15}, 0.5, 1.5),
        ({1.0: 9, 2.0: 9, INF: 9}, {1.0: 0, 2.0: 4, INF: 4}, 0.5, 1.5),
        (None, {1.0: 0, 2.0: 0, INF: 4}, 0.99, 2.0),
        ({1.0: 4, INF: 4}, {1.0: 4, INF: 4}, 0.99, None),
    ],
    ids=["nothing", "no-observation", "inside-the-first", "inside-the-second", "window", "restarted", "unbounded", "idle-window"],
)
def test_quantile(before: dict[float, float] | None, after: dict[float, float], q: float, expected: float | None):
    assert quantile(before, after, q) == expected


def test_a_long_line_is_read_once():
    """A worker may write what it wants: with a quadratic pattern this line takes a day."""
    assert parse_text("up{" + "a" * 4_000_000 + "} 1")[0].labels == {}


@pytest.mark.parametrize("bound", ['le="one"', 'le="NaN"', 'le=""', 'other="1"'])
def test_a_bound_that_is_no_number_is_left_out(bound: str):
    assert buckets(parse_text(f'ttft_bucket{{{bound}}} 2\nttft_bucket{{le="1"}} 3'), "ttft") == {1.0: 3.0}


def test_buckets_sum_over_label_sets():
    text = 'ttft_bucket{le="1",m="a"} 2\nttft_bucket{le="1",m="b"} 3\nttft_bucket{le="+Inf",m="a"} 4\nother_bucket{le="1"} 9'
    assert buckets(parse_text(text), "ttft") == {1.0: 5.0, INF: 4.0}
