"""When a second prefill worker is asked, whom, and how often at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.policy.candidate import Candidate
from fleet_router.policy.hedge import SAVED_MOST, SAVED_TOKENS_MOST, HedgeBudget, second, wait_s
from fleet_router.policy.terms import FEW, Weighed, seconds_of
from fleet_router.policy.trip import Trip
from tests.fleet_router.policy.test_cost import GROUP, Offer, fleet, load

NOW = 100.0


LATE = st.tuples(st.floats(1, 200_000), st.booleans())


@given(st.floats(0.01, 0.5), st.lists(st.one_of(st.floats(1, 200_000), LATE), min_size=1, max_size=300))
def test_hedges_are_a_share_of_the_prompts_and_of_their_tokens(share: float, deeds: list[float | tuple[float, bool]]):
    """Whatever comes in whatever order: a float is a prompt that is asked, a tuple one that is late, and whether it was sent to
    somebody else: what was not is no part of the share."""
    budget, asked, tokens, taken, spent, refused = HedgeBudget(), 0, 0.0, 0, 0.0, 0
    for deed in deeds:
        if isinstance(deed, float):
            budget.asked(share, deed)
            asked, tokens = asked + 1, tokens + deed
        elif not budget.take(deed[0]):
            refused += 1
        elif deed[1]:
            taken, spent = taken + 1, spent + deed[0]
        else:
            before = budget.saved, budget.saved_tokens
            budget.give_back(deed[0])
            assert (budget.saved - before[0], budget.saved_tokens - before[1]) == pytest.approx((1.0, deed[0]))
    assert taken <= share * asked * (1 + 1e-9)
    assert spent <= share * tokens * (1 + 1e-9)
    assert budget.refused == refused


def test_what_is_saved_has_a_bound_and_a_long_prompt_is_not_one_among_many():
    budget = HedgeBudget()
    for _ in range(1_000):
        budget.asked(0.05, 1_000.0)
    assert budget.saved == SAVED_MOST
    assert budget.saved_tokens == pytest.approx(50_000)
    assert not budget.take(50_001.0)
    assert budget.take(49_000.0)
    assert not budget.take(2_000.0), "of nine hedges that are left none has the tokens"
    for _ in range(100):
        budget.asked(0.5, SAVED_TOKENS_MOST)
    assert budget.saved_tokens == SAVED_TOKENS_MOST


@pytest.mark.parametrize(("expected_s", "after", "least_s", "found"), [(0.2, 3.0, 0.1, 0.6), (0.01, 3.0, 0.1, 0.1)])
def test_a_leg_is_late_after_a_multiple_of_what_was_expected(expected_s: float, after: float, least_s: float, found: float):
    assert wait_s(expected_s, after, least_s) == pytest.approx(found)


def weighed(workers: dict[str, Candidate], held: dict[str, float]) -> Weighed:
    """Prefill workers as a decision saw them, with what each holds of 2,000 tokens."""
    sources = [worker for worker in workers.values() if worker.role == "prefill"]
    steps = tuple((tokens, workers[uid].bit) for uid, tokens in held.items())
    return Weighed(GROUP, sources, 2_000.0, (0.0, 0, 0.0, 0, steps), [0.0] * len(sources))


@pytest.mark.parametrize(
    ("busy", "queued", "held", "out", "found"),
    [
        ({}, {"p1": 1.0}, {}, "", ("p2", 2_000.0)),
        ({}, {}, {"p1": 1_500.0}, "", ("p1", 500.0)),
        ({}, {"p1": 1.0}, {"p1": 1_500.0}, "", ("p2", 2_000.0)),
        ({}, {"p1": 1.0}, {}, "p2", ("p1", 2_000.0)),
        ({"p0": 9, "p2": 9}, {"p1": 1.0}, {}, "", ("p1", 2_000.0)),
        ({"p1": 9, "p2": 9}, {}, {}, "", None),
    ],
    ids=[
        "the shorter queue",
        "what it has cached",
        "a longer queue",
        "not who is out",
        "not over the bound",
        "nobody",
    ],
)
def test_the_second_is_who_would_have_it_first(
    busy: dict[str, int], queued: dict[str, float], held: dict[str, float], out: str, found: tuple[str, float] | None
):
    _, workers = fleet(3, 1)
    for uid, requests in busy.items():
        load(workers[uid], requests)
    for uid, seconds in queued.items():
        workers[uid].free_at = NOW + seconds
    got = second(weighed(workers, held), workers["p0"], NOW, 1.25, lambda worker: worker.uid != out)
    assert (got and (got[0].uid, got[1])) == found


def test_one_that_left_is_nobody():
    _, workers = fleet(2, 1)
    seen = weighed(workers, {})
    workers["p1"].home = None
    assert second(seen, workers["p0"], NOW, 1.25, lambda _: True) is None
    workers["p0"].home = None
    assert second(seen, workers["p0"], NOW, 1.25, lambda _: True) is None


@pytest.mark.parametrize("won", [True, False])
def test_a_trip_learns_from_who_answered(won: bool):
    group, workers = fleet(2, 1)
    trip = Trip(group, Offer(0, workers["p0"], workers["d0"], 2_000, 2_000, "", 0), NOW, stream=True)
    assert trip.expected_s(NOW) == pytest.approx(workers["p0"].prefill.at(2_000))
    trip.hedged(workers["p1"], 2_000.0, NOW + 1)
    assert (workers["p0"].pending, workers["p1"].pending) == (1, 1)
    before = group.pairs.cost_s("p1", "d0", 2_000)
    trip.hedge_over(NOW + 2, won=won)
    trip.prefilled(NOW + 2)
    trip.first_token(NOW + 5)
    trip.over(NOW + 5)
    assert (workers["p0"].pending, workers["p1"].pending) == (0, 0)
    assert [workers[uid].prefill.weight > 0 for uid in ("p0", "p1")] == [not won, won]
    assert (group.pairs.cost_s("p1", "d0", 2_000) > before) is won


@pytest.mark.parametrize("count", [0, 1, 4, FEW - 1, FEW, 40])
def test_costs_are_packed_as_they_are(count: int):
    """As many as there are."""
    costs, local = [[float(i) / 3 + start for i in range(count)] for start in (0.0, 7.0)]
    (one, other) = made = [Weighed(GROUP, [], 1.0, (0.0, 0, 0.0, 0, ()), costs, local) for _ in range(2)]
    for side in made:
        side.pack()
    assert one.local is not None
    assert (list(seconds_of(one.costs)), list(seconds_of(one.local))) == (costs, local)
    assert len(one.costs) == 8 * count
    assert (other.costs, other.local) == (one.costs, one.local)
