"""Breakers, panic, pairs, budget and silence on a clock of the test's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.health.breaker import FAILURES_MOST, FORGIVEN_S, OPEN_FIRST_S, OPEN_MOST_S, Breaker
from fleet_router.health.budget import FIRST, FREE, FREE_AGAIN_S, LONG_BYTES, SAVED_MOST, SHARE, RetryBudget
from fleet_router.health.pairs import PAIRS_MOST, PairHealth
from fleet_router.health.panic import askable
from fleet_router.health.silence import Waits, silent


@dataclass
class One:
    name: str
    breaker: Breaker = field(default_factory=Breaker)
    own: int = 0


def opened(at: float = 0.0, *, gone: bool = False) -> Breaker:
    breaker = Breaker()
    breaker.open(at, gone=gone)
    return breaker


def test_five_failures_in_a_row_or_one_refused_connect_open_it():
    breaker = Breaker()
    assert [breaker.failed(1.0) for _ in range(FAILURES_MOST)] == [False] * (FAILURES_MOST - 1) + [True]
    refused = Breaker()
    assert refused.failed(1.0, gone=True)
    assert (breaker.gone, refused.gone) == (False, True)
    assert not breaker.allows(1.0 + OPEN_FIRST_S - 0.1, 0)


def test_a_success_between_failures_begins_anew():
    breaker = Breaker()
    for _ in range(FAILURES_MOST - 1):
        breaker.failed(0.0)
    breaker.succeeded()
    assert not breaker.failed(0.0)


def test_a_worker_that_fails_every_second_request_is_an_outlier():
    """That others of its answers begin forgets nothing."""
    breaker, now = Breaker(), 0.0
    for i in range(64):
        now += 0.1
        if i % 2 and breaker.failed(now):
            break
        assert not breaker.answers(now), "it is closed, and closes by nothing"
        if i % 2 == 0:
            breaker.succeeded()
    else:
        pytest.fail("never put out")
    assert not breaker.closed


@pytest.mark.parametrize("every", [10, 4])
def test_one_in_so_many_is_no_outlier(every: int):
    breaker = Breaker()
    for i in range(1000):
        if i % every == 0:
            assert not breaker.failed(i)
        else:
            breaker.succeeded()


def test_on_trial_one_request_at_a_time_and_the_next_time_is_longer():
    breaker, now, times = Breaker(), 0.0, []
    for _ in range(6):
        assert breaker.failed(now, gone=True)
        times.append(breaker.until - now)
        now = breaker.until
        assert (breaker.allows(now - 0.1, 0), breaker.allows(now, 0), breaker.allows(now, 1)) == (False, True, False)
    assert times == [5.0, 10.0, 20.0, 40.0, OPEN_MOST_S, OPEN_MOST_S]


def test_a_worker_that_is_away_for_a_month_is_tried_each_minute():
    """After 17 hours two to the power of its openings was no float any more: OverflowError, and the request that had tried it
    ended with it."""
    breaker, now = Breaker(), 0.0
    while now < 30 * 86_400.0:
        assert breaker.failed(now, gone=True)
        assert 0.0 < breaker.until - now <= OPEN_MOST_S
        now = breaker.until
    assert breaker.answers(now)
    assert breaker.allows(now, 7)
    breaker.failed(now + 1, gone=True)  # it flaps: not forgiven yet
    assert breaker.until - now - 1 == OPEN_MOST_S
    breaker.answers(now + 2)
    breaker.failed(now + 1 + FORGIVEN_S, gone=True)
    assert breaker.until - now - 1 - FORGIVEN_S == OPEN_MOST_S
    breaker.answers(now + 2 + FORGIVEN_S)
    breaker.failed(now + 2 + 2 * FORGIVEN_S, gone=True)
    assert breaker.until - now - 2 - 2 * FORGIVEN_S == OPEN_FIRST_S


def test_an_answer_to_what_was_sent_before_it_opened_does_not_close_it():
    breaker = opened(10.0)
    assert not breaker.answers(9.9)
    assert not breaker.closed
    assert breaker.answers(10.1)


def test_heads_of_answers_that_never_end_forget_nothing():
    breaker = Breaker()
    for i in range(FAILURES_MOST):
        breaker.answers(i)
        assert breaker.failed(i) == (i == FAILURES_MOST - 1)
    assert breaker.answers(20.0)
    assert breaker.failed(20.0)  # on probation until an answer is whole


def test_what_was_under_way_when_it_opened_does_not_lengthen_it():
    breaker = opened(10.0)
    until = breaker.until
    assert not any(breaker.failed(10.5) for _ in range(20))
    assert breaker.until == until


def test_a_refused_connect_while_it_is_open_says_that_nobody_listens_and_later_failures_do_not_say_otherwise():
    breaker = opened(10.0)
    breaker.failed(10.5, gone=True)
    assert breaker.gone
    breaker.failed(10.6)
    assert breaker.gone


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("...", "abc"), ("x..", "bc"), ("xx.", "abc"), ("xxx", "abc"), ("g..", "bc"), ("gg.", "c"), ("ggg", "abc"), ("gx.", "bc"),
        ("gxx", "bc"), ("x.", "b"), ("g.", "b"), ("x", "a"), ("", ""),
    ],
)  # fmt: skip
def test_panic_asks_those_that_fail_but_not_those_that_are_gone(states: str, expected: str):
    """`x` fails, `g` does not listen."""
    workers = [
        One(name, Breaker() if state == "." else opened(gone=state == "g")) for name, state in zip("abc", states, strict=False)
    ]
    assert "".join(one.name for one in askable(workers, 1.0)) == expected


@pytest.mark.parametrize(
    ("gone", "others", "own", "expected"),
    [
        pytest.param(False, ".", 0, "ab", id="one-trial-at-a-time"),
        pytest.param(False, ".", 1, "b", id="its-trial-is-under-way"),
        pytest.param(True, "xx", 0, "abc", id="who-did-not-listen-has-its-trial-in-a-panic-too"),
        pytest.param(True, "xx", 1, "bc", id="and-only-one"),
    ],
)
def test_who_was_out_is_asked_once_its_time_is_over(gone: bool, others: str, own: int, expected: str):
    """`a` is that one; `x` fails just now."""
    rest = [One(name, Breaker() if state == "." else opened(9.0)) for name, state in zip("bc", others, strict=False)]
    workers = [One("a", opened(gone=gone), own), *rest]
    assert "".join(one.name for one in askable(workers, 10.0)) == expected


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), max_size=9), st.floats(0, 20))
def test_somebody_can_always_be_asked_and_never_less_than_half_in_good_health(made: list[tuple[bool, bool, int]], now: float):
    workers = [One(str(i), opened(gone=gone) if out else Breaker(), n) for i, (out, gone, n) in enumerate(made)]
    found = askable(workers, now)
    assert bool(found) == bool(workers)
    assert all(one in found for one in workers if one.breaker.closed)
    listening = [one for one in workers if not one.breaker.gone]
    assert not listening or 2 * len(found) >= len(listening)


def test_a_pair_is_put_out_before_its_workers():
    pairs = PairHealth()
    assert [pairs.failed("p1", "d1", 1.0) for _ in range(3)] == [False, False, True]
    assert pairs.blocks("p1", "d1", 2.0)
    assert not pairs.blocks("p1", "d2", 2.0)
    assert not pairs.blocks("p2", "d1", 2.0)
    assert not pairs.condemns("p1", 2, 2.0)
    for _ in range(3):
        pairs.failed("p1", "d2", 2.0)
    assert pairs.condemns("p1", 2, 2.5)
    assert pairs.condemns("p1", 4, 2.5)
    assert not pairs.condemns("p1", 5, 2.5)
    assert pairs.out(2.5) == [("p1", "d1"), ("p1", "d2")]
    assert pairs.opened == 2
    pairs.failed("p2", "d1", 2.0)
    assert not pairs.condemns("p2", 2, 2.5), "others' pairs are no word on it"
    assert not pairs.condemns("p1", 2, 60.0), "their time is over"


def test_a_pair_on_trial_is_forgotten_when_kv_moves_and_out_for_longer_when_not():
    pairs = PairHealth()
    for _ in range(3):
        pairs.failed("p", "d", 0.0)
    assert not pairs.blocks("p", "d", 5.0)
    pairs.failed("p", "d", 5.0)
    assert pairs.blocks("p", "d", 14.9)
    pairs.succeeded("p", "d", 1.0)  # that was sent before
    assert pairs.blocks("p", "d", 14.9)
    pairs.succeeded("p", "d", 16.0)
    assert not pairs.breakers
    pairs.succeeded("p", "d", 17.0)  # as nearly all do: nothing was wrong


def test_kv_that_moves_between_two_failures_of_a_pair_makes_it_begin_anew():
    pairs = PairHealth()
    for at in range(12):
        assert not pairs.failed("p", "d", at)
        if at % 2:
            pairs.succeeded("p", "d", at)


def test_pairs_are_bounded_and_leave_with_their_workers():
    pairs = PairHealth()
    for i in range(PAIRS_MOST + 10):
        pairs.failed(f"p{i}", "d", 0.0)
    assert len(pairs.breakers) == PAIRS_MOST
    pairs.keep(frozenset({"p20", "d"}))
    assert list(pairs.breakers) == [("p20", "d")]


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 0.5)), max_size=400))
def test_retries_are_a_share_of_requests(steps: list[tuple[bool, float]]):
    budget, now, requests, retries = RetryBudget(), 0.0, 0, 0
    for asks, dt in steps:
        now += dt
        if asks:
            budget.asked()
            requests += 1
        else:
            retries += budget.take(now)
    assert retries <= SHARE * requests + FIRST + now * FREE / FREE_AGAIN_S + 1e-6


def test_what_is_saved_is_bounded_and_a_quiet_router_has_a_few():
    budget = RetryBudget()
    for _ in range(10_000):
        budget.asked()
    assert budget.saved <= SAVED_MOST + SHARE
    while budget.take(0.0):
        pass
    assert budget.refused == 1
    assert not budget.take(1.0)
    assert budget.take(5.0)


def test_retries_in_numbers():
    """Ten at first; without requests three come back in ten seconds, and no more; five requests bring one."""
    budget = RetryBudget()
    assert [budget.take(100.0) for _ in range(11)] == [True] * 10 + [False]
    assert [budget.take(at) for at in (103.0, 104.0, 104.0)] == [False, True, False]
    assert [budget.take(200.0) for _ in range(4)] == [True] * 3 + [False]
    for _ in range(5):
        budget.asked()
    assert [budget.take(200.0) for _ in range(2)] == [True, False]
    assert budget.refused == 5


@pytest.mark.parametrize(
    ("legs", "before", "found"),
    [
        pytest.param([("a", 0, 0)], {"a": 0}, {"a"}, id="it never answered"),
        pytest.param([("a", 0, 0), ("a", 99, 99)], {"a": 0}, {"a"}, id="a new request is no sign of life"),
        pytest.param([("a", 0, 0), ("a", 50, 99)], {"a": 0}, set(), id="somebody hears it"),
        pytest.param([("a", 0, 0)], {"a": 95}, set(), id="it answered lately, or has much to do"),
        pytest.param([("a", 95, 95)], {"a": 0}, set(), id="nobody waited long"),
        pytest.param([("a", 0, 80), ("b", 0, 99)], {"a": 0, "b": 0}, {"a"}, id="a stream that stands still"),
        pytest.param([("a", 0, 0)], {}, set(), id="it has left"),
    ],
)
def test_silence(legs: list[tuple[str, float, float]], before: dict[str, float], found: set[str]):
    assert silent([Waits(*leg) for leg in legs], before, 100.0, 10.0) == found


def test_a_long_prompt_that_is_sent_again_is_not_one_retry_among_many():
    """A hundred requests of 40 bytes pay for a retry of theirs, and not for one of 100,000 tokens."""
    budget, long = RetryBudget(), int(LONG_BYTES)
    assert [budget.take(0.0, long) for _ in range(11)] == [True] * 10 + [False]
    for _ in range(100):
        budget.asked(40)
    assert budget.saved == pytest.approx(20.0)
    assert not budget.take(0.0, long)
    assert budget.take(0.0, 40)
    for _ in range(5):
        budget.asked(long)
    assert budget.take(0.0, long)


def test_one_that_is_longer_than_what_is_free_is_sent_again_and_paid_back():
    budget, long, none = RetryBudget(), int(LONG_BYTES), RetryBudget(saved=9.0, saved_bytes=0.0)
    assert budget.take(0.0, 40 * long)
    assert not budget.take(1.0, 40)
    assert not budget.take(90.0, 40), "thirty of them are owed, three come back in ten seconds"
    assert budget.take(101.0, 40)
    assert none.take(FREE_AGAIN_S, 40 * long), "a router with little traffic"


@given(st.lists(st.one_of(st.integers(1, 4_000_000), st.tuples(st.integers(1, 4_000_000))), max_size=200))
def test_what_is_sent_again_is_a_share_of_what_was_asked(deeds: list[int | tuple[int]]):
    """Bytes of prompts; beside what is there at first, and one prompt more. A tuple is a retry."""
    budget, asked, again = RetryBudget(), 0, 0
    for deed in deeds:
        if isinstance(deed, int):
            budget.asked(deed)
            asked += deed
        elif budget.take(0.0, deed[0]):
            again += deed[0]
    assert again <= FIRST * LONG_BYTES + SHARE * asked + 4_000_000
    assert budget.saved_bytes <= SAVED_MOST * LONG_BYTES + SHARE * 4_000_000
