"""Buckets and accounts: what is taken, given back and settled is exact; Retry-After is when it passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.admission.bucket import SECOND_NS, Bucket
from fleet_router.admission.quota import OUTCOMES, Account, Outcome
from tests.fleet_router.admission.made import parsed

NOW = 10**15


def account(**limits: object) -> Account:
    made = Account("a")
    made.follow(parsed(a=limits).tenants[0], NOW)
    return made


@given(st.floats(0.01, 1e6), st.integers(1, 10_000), st.lists(st.tuples(st.integers(1, 50), st.integers(0, 10**10)), max_size=50))
def test_a_bucket_never_gives_more_than_its_size_and_its_rate(per_s: float, size: int, asks: list[tuple[int, int]]):
    bucket, now, taken = Bucket(per_s, size), NOW, 0
    for units, pause_ns in asks:
        now += pause_ns
        wait_ns = bucket.wait_ns(units, now)
        if wait_ns <= 0:
            assert bucket.take_if(units, now)
            taken += units
        elif units <= size:
            assert not bucket.take_if(units, now)
            assert bucket.wait_ns(units, now + wait_ns) <= 0 < bucket.wait_ns(units, now + wait_ns - 1)
        assert 0 <= bucket.left(now) <= size
        assert taken <= size + (now - NOW) / SECOND_NS * per_s + 1e-6


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 1000), st.integers(1, 100))
def test_giving_back_leaves_exactly_what_was_there(before: list[int], units: int, later_ns: int):
    bucket = Bucket(1.0, 1_000_000)
    for one in before:
        bucket.take(one, NOW)
    was = bucket.full_at_ns
    bucket.take(units, NOW)
    bucket.give(units)
    assert max(bucket.full_at_ns, NOW) == max(was, NOW)
    bucket.take(units, NOW)
    bucket.exchange(units, 7, NOW + later_ns)
    assert bucket.full_at_ns == max(was, NOW + later_ns) + 7 * bucket.each_ns


def test_requests_per_second_and_when_it_passes():
    one = account(requestsPerSecond=2, requestsBurst=3)
    assert [one.charge(1, NOW) for _ in range(3)] == [None] * 3
    over = one.charge(1, NOW)
    assert over is not None
    assert (over.reason, over.retry_after_s) == ("requests_per_second", 1)
    assert one.charge(1, NOW + SECOND_NS // 2) is None
    slow = account(requestsPerSecond=0.1)
    assert slow.charge(1, NOW) is None
    over = slow.charge(1, NOW)
    assert over is not None
    assert over.retry_after_s == 10


def test_tokens_per_minute_are_charged_by_the_estimate_and_settled_by_use():
    one = account(tokensPerMinute=6000)
    assert one.charge(1000, NOW) is None
    one.settle(1000, "answered", (900, 300), NOW)
    assert one.tokens is not None
    assert one.tokens.left(NOW) == 4800
    over = one.charge(5000, NOW)
    assert over is not None
    assert (over.reason, over.retry_after_s) == ("tokens_per_minute", 2)
    assert one.inflight == 0
    assert one.charge(5000, NOW + 2 * SECOND_NS) is None


def test_what_can_never_pass_says_so():
    over = account(tokensPerMinute=100).charge(101, NOW)
    assert over is not None
    assert (over.reason, over.retry_after_s) == ("request_too_large", None)


def test_debt_is_waited_for():
    one = account(tokensPerMinute=600)
    assert one.charge(100, NOW) is None
    one.settle(100, "answered", (100, 1100), NOW)  # a long answer: 600 tokens of debt
    over = one.charge(10, NOW)
    assert over is not None
    assert over.retry_after_s == 61


def test_concurrency_counts_what_waits_and_runs():
    one = account(concurrency=1)
    assert one.charge(1, NOW) is None
    over = one.charge(1, NOW)
    assert over is not None
    assert over.reason == "concurrency"
    assert one.counts["concurrency"] == 1
    one.settle(1, "left", (0, 0), NOW)
    assert one.charge(1, NOW) is None


@pytest.mark.parametrize(
    ("outcome", "requests", "tokens"), [("answered", 9, 850), ("refused", 9, 1000), ("left", 9, 1000), ("failed", 10, 1000)]
)
def test_refunds(outcome: Outcome, requests: int, tokens: int):
    one = account(requestsPerSecond=10, tokensPerMinute=1000)
    assert one.charge(100, NOW) is None
    one.settle(100, outcome, (120, 30), NOW)
    assert one.requests is not None
    assert one.tokens is not None
    assert (one.requests.left(NOW), one.tokens.left(NOW)) == (requests, tokens)
    assert (one.requests.taken, one.tokens.taken) == (10 - requests, 1000 - tokens), "as other routers are told"


@given(st.lists(st.tuples(st.integers(1, 500), st.sampled_from(OUTCOMES), st.integers(0, 500)), max_size=60))
def test_every_charge_is_settled_once_and_exactly(requests: list[tuple[int, Outcome, int]]):
    """At one moment, so that nothing refills: what is missing at the end is what was used."""
    one = account(requestsPerSecond=1000, requestsBurst=100_000, tokensPerMinute=10**8, concurrency=1000)
    for tokens, _, _ in requests:
        assert one.charge(tokens, NOW) is None
    assert one.inflight == len(requests)
    for tokens, outcome, used in reversed(requests):
        one.settle(tokens, outcome, (used, 1), NOW)
    assert one.tokens is not None
    assert one.requests is not None
    answered = [used + 1 for _, outcome, used in requests if outcome == "answered"]
    assert 10**8 - one.tokens.left(NOW) == sum(answered) == one.input_tokens + one.output_tokens
    assert 100_000 - one.requests.left(NOW) == sum(outcome != "failed" for _, outcome, _ in requests)
    assert (one.inflight, sum(one.counts[outcome] for outcome in OUTCOMES)) == (0, len(requests))


def test_a_reload_is_no_way_to_a_full_bucket():
    one = account(requestsPerSecond=1, requestsBurst=5)
    for _ in range(5):
        one.charge(1, NOW)
    one.follow(parsed(a={"requestsPerSecond": 1, "requestsBurst": 10}).tenants[0], NOW)
    assert one.requests is not None
    assert one.requests.left(NOW) == 5
    one.follow(parsed(a={}).tenants[0], NOW)
    assert (one.requests, one.headers(NOW)) == (None, b"")


def test_a_reload_forgives_no_debt():
    """Any change of the file, for whichever tenant, gave everybody back what they owed."""
    mine = account(tokensPerMinute=600)
    assert mine.charge(100, NOW) is None
    mine.settle(100, "answered", (100, 5_900), NOW)
    owed = mine.charge(1, NOW)
    for limit in (600, 600, 1_200, 600):
        mine.follow(parsed(a={"tokensPerMinute": limit}).tenants[0], NOW)
    assert owed is not None
    assert (mine.charge(1, NOW), owed.retry_after_s) == (owed, 541)


def test_a_reload_that_changes_nothing_takes_no_time_back():
    """Each one rounded what was owed up to whole requests: with one in 100 s and a reload each minute none ever passed again."""
    one = account(requestsPerSecond=0.01)
    assert one.charge(1, NOW) is None
    for seconds in (60, 90):
        one.follow(parsed(a={"requestsPerSecond": 0.01}).tenants[0], NOW + seconds * SECOND_NS)
        assert one.charge(1, NOW + seconds * SECOND_NS) is not None
    assert one.charge(1, NOW + 100 * SECOND_NS) is None


def test_a_bucket_says_that_it_is_full_from_the_moment_on_at_which_it_is():
    bucket = Bucket(2.0, 4)
    assert bucket.take_if(1, NOW)
    assert bucket.taken == 1
    full_at = NOW + SECOND_NS // 2
    assert [bucket.left_and_reset(at) for at in (full_at - 1, full_at, full_at + 1)] == [(3, 1), (4, 0), (4, 0)]


def test_headers_are_openais():
    one = account(requestsPerSecond=2, requestsBurst=4, tokensPerMinute=60_000)
    one.charge(1500, NOW)
    lines = dict(line.split(": ") for line in one.headers(NOW + 1).decode().strip().split("\r\n"))
    assert lines == {
        "x-ratelimit-limit-requests": "4", "x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-tokens": "60000", "x-ratelimit-remaining-tokens": "58500", "x-ratelimit-reset-tokens": "1500ms",
    }  # fmt: skip
