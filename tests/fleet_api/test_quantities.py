"""Durations, quantities and ratios: tables and round trips."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_api.quantities import Ratio, exact_quantity, format_ratio, parse_duration, parse_quantity, parse_ratio


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0ms", 0.0), ("1ms", 0.001), ("250ms", 0.25), ("30s", 30.0), ("2m", 120.0), ("1h", 3600.0), ("999999h", 3_599_996_400.0)],
)
def test_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "s", "1.5s", "-1s", "1s ", "1s\n", "1S", "1m30s", "1000000ms", "1d", "١s"])
def test_not_a_duration(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("1", 1), ("64Mi", 67_108_864), ("1.5Gi", 1_610_612_736), ("1k", 1000), ("2.5M", 2_500_000), ("3G", 3 * 10**9),
        ("1T", 10**12), ("16Ti", 2**44), ("1Ki", 1024), ("0.001Ki", 2), ("1.001", 2),
    ],
)  # fmt: skip
def test_quantity_rounds_up_as_kubernetes_does(text, size):
    assert parse_quantity(text) == size


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1500m", "1.5"), ("1m", "0.001"), ("1.25", "1.25"), ("0.001Ki", "1.024"), ("0.001k", "1"), ("2T", "2E12")],
)
def test_an_amount_is_exact(text, amount):
    assert exact_quantity(text) == Decimal(amount)


@pytest.mark.parametrize("text", ["", "64MB", "64 Mi", "-1", "1e3", ".5Gi", "1.Gi", "1.0001Gi", "Mi", "1mi", "1Mi\n"])
def test_not_a_quantity(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@given(prefill=st.integers(1, 99), decode=st.integers(1, 99))
def test_ratio_round_trip(prefill, decode):
    ratio = parse_ratio(f"{prefill}:{decode}")
    assert str(ratio) == f"{prefill}:{decode}"
    assert ratio.value == Fraction(prefill, decode)
    assert parse_ratio(format_ratio(prefill, decode)).value == ratio.value


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "0:1", "1:0", "01:2", "100:1", "1:2:3", "1/2", "1:2\n"])
def test_not_a_ratio(text):
    with pytest.raises(ValueError, match="is not a prefill:decode ratio"):
        parse_ratio(text)


def test_a_ratio_needs_both_sides():
    with pytest.raises(ValueError, match="at least 1"):
        Ratio(0, 1)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 99), st.integers(1, 99))
def test_allows_compares_exactly(prefill, decode, a, b):
    at_least, at_most = Ratio(a, b).allows(prefill, decode)
    assert at_least == (Fraction(prefill, decode) >= Fraction(a, b))
    assert at_most == (Fraction(prefill, decode) <= Fraction(a, b))


@pytest.mark.parametrize(
    ("prefill", "decode", "text"), [(2, 4, "1:2"), (3, 3, "1:1"), (0, 3, "0:3"), (3, 0, "3:0"), (0, 0, "0:0"), (2, 3, "2:3")]
)
def test_format_ratio(prefill, decode, text):
    assert format_ratio(prefill, decode) == text
