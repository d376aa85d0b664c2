"""How long the queue may be, and the rate that it goes by."""

from __future__ import annotations

import pytest

from fleet_router.admission.bound import LEAST, RateMeter, queue_bound, retry_after_s


@pytest.mark.parametrize(
    ("rate", "budget_s", "slots", "bound"),
    [
        (10.0, 2.0, 100, 17),  # 0.85 x 2 s x 10/s
        (10.0, 0.1, 100, LEAST),
        (1000.0, 60.0, 100, 400),  # four per slot
        (None, 60.0, 100, 400),
        (0.0, 60.0, 100, LEAST),
        (0.0, 60.0, 1, 4),  # the upper bound wins
    ],
)
def test_littles_law_bounded_both_ways(rate: float | None, budget_s: float, slots: int, bound: int):
    assert queue_bound(rate, budget_s, slots, 4) == bound


@pytest.mark.parametrize(
    ("waiting", "rate", "seconds"),
    [(0, 5.0, 1), (20, 5.0, 4), (21, 5.0, 5), (9999, 1.0, 60), (9, None, 1), (9, 0.0, 60), (2, 0.0, 20), (0, 0.0, 1)],
)
def test_retry_after_is_when_the_queue_will_have_moved(waiting: int, rate: float | None, seconds: int):
    assert retry_after_s(waiting, rate) == seconds


def test_the_meter_knows_nothing_at_first_and_forgets_the_past():
    meter = RateMeter()
    assert meter.per_s(0, 100.0) is None
    for tenth in range(100):
        meter.sample(tenth, 100.0 + tenth / 10)
    assert meter.per_s(20, 102.0 + 8) is not None
    assert meter.per_s(100, 110.0) == pytest.approx(10.0)
    for tenth in range(100):
        meter.sample(100, 110.0 + tenth / 10)  # nobody comes any more
    assert meter.per_s(100, 120.0) == 0.0
    meter.sample(100, 1000.0)
    assert meter.per_s(100, 1001.0) is None  # a pause says nothing of now


def test_the_meter_goes_on_from_window_to_window():
    """Samples do not come at a window's very end; only after a longer pause nothing is known."""
    meter = RateMeter()
    for i in range(100):
        now = 100.0 + 0.3 * i
        meter.sample(3 * i, now)
        assert meter.per_s(3 * i, now) == (None if now < 102.5 else pytest.approx(10.0)), now
    meter.sample(400, now + 10.5)
    assert meter.per_s(400, now + 12.9) is None
