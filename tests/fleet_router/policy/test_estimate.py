"""Estimators: they start at the prior, find the truth, shrug at wild values, and forget."""

from __future__ import annotations

import random

import pytest

from fleet_router.policy.estimate import Line, Mean
from fleet_router.policy.pairs import PAIRS_MOST, Pairs


def line() -> Line:
    return Line(0.01, 1e-4, 1000.0)


def test_before_anything_is_seen_the_prior_holds():
    assert line().at(3000) == pytest.approx(0.31)


@pytest.mark.parametrize(("base", "slope"), [(0.02, 2e-5), (0.0, 1e-3), (0.3, 1e-5), (0.005, 2e-2)])
def test_it_finds_a_truth_far_from_the_prior(base: float, slope: float):
    found, rng = line(), random.Random(1)
    for _ in range(150):
        x = rng.expovariate(1 / 2000)
        found.observe(x, (base + slope * x) * rng.uniform(0.8, 1.2))
    for x in (500, 2000, 6000):
        assert found.at(x) == pytest.approx(base + slope * x, rel=0.2)


def test_what_takes_less_the_more_it_is_takes_what_it_takes_in_the_mean():
    """Small ones that waited, large ones that did not."""
    found = line()
    for _ in range(200):
        found.observe(1_000, 0.5)
        found.observe(3_000, 0.3)
    assert (found.at(0), found.at(4_000)) == (pytest.approx(0.4, rel=0.05), pytest.approx(0.4, rel=0.05))


def test_three_answers_are_enough_to_leave_a_wrong_prior():
    found = line()
    for x in (1000, 4000, 2000):
        found.observe(x, 0.001 + 1e-5 * x)
    assert found.at(3000) < 0.1


def test_one_wild_value_moves_it_little():
    found = line()
    for i in range(50):
        found.observe(1000 + 10 * i, 0.1)
    before = found.at(1200)
    found.observe(1200, 3600.0)
    assert found.at(1200) < 1.2 * before


def test_it_is_never_negative_nor_free():
    found = line()
    for x, y in ((5000, 0.0), (10, 1.0), (8000, 0.0), (20, 2.0), (0, 0.0)) * 20:
        found.observe(x, y)
        assert found.base >= 0.0
        assert found.slope > 0.0
    for _ in range(100):
        found.observe(1000, 0.0)
    assert found.slope > 0.0


def test_what_is_not_seen_again_is_forgotten_towards_its_like():
    slow, common = line(), line()
    for _ in range(60):
        slow.observe(1000, 5.0)
        common.observe(1000, 0.1)
    assert slow.at(1000) > 3
    for _ in range(200):
        slow.relax(0.9, common)
    assert slow.at(1000) == pytest.approx(common.at(1000), rel=0.01)
    assert slow.weight < 1e-3


def test_a_mean_moves_and_stays_robust():
    mean = Mean(100.0)
    for _ in range(100):
        mean.observe(500.0)
    assert mean.value == pytest.approx(500, rel=0.1)
    mean.observe(1e9)
    assert mean.value < 1000


def test_a_new_pair_pays_for_its_handshake_once():
    pairs = Pairs()
    assert pairs.cost_s("p", "d", 0) == pytest.approx(pairs.common.base + pairs.handshake.value)
    pairs.observe("p", "d", 1000, 2.0)
    assert pairs.handshake.value > 0.1
    assert pairs.cost_s("p", "d", 1000) == pytest.approx(pairs.common.at(1000))
    assert pairs.cost_s("p", "other", 1000) > pairs.cost_s("p", "d", 1000)
    for _ in range(60):
        pairs.observe("p", "d", 1000, 0.5)
        pairs.observe("q", "d", 1000, 0.005)
    assert pairs.cost_s("p", "d", 1000) > 0.4
    assert pairs.cost_s("q", "d", 1000) < 0.01


def test_of_a_first_transfer_only_what_it_took_longer_is_the_handshake():
    pairs = Pairs()
    for i in range(200):
        pairs.observe(f"p{i}", "d", 5_000, pairs.common.at(5_000) + 0.4)
    assert pairs.handshake.value == pytest.approx(0.4, rel=0.05)
    assert pairs.cost_s("new", "d", 0) == pytest.approx(pairs.common.base + 0.4, rel=0.05)


def test_what_all_pairs_have_in_common_fades_once_in_all_parts():
    pairs = Pairs()
    for pair in ("p0", "p1", "p2"):
        for _ in range(20):
            pairs.observe(pair, "d", 1_000, 0.3)
    before = pairs.common.weight
    for part in (1, 2):
        pairs.relax(0.5, part, 3)
        assert pairs.common.weight == before
    pairs.relax(0.5, 0, 3)
    assert pairs.common.weight == pytest.approx(before / 2)


def test_no_pair_is_cheaper_than_the_least():
    pairs, rng = Pairs(), random.Random(3)
    names = [(f"p{i}", f"d{j}") for i in range(4) for j in range(4)]
    for step in range(600):
        p, d = rng.choice(names)
        tokens = rng.expovariate(1 / 3000)
        pairs.observe(p, d, tokens, 0.002 + tokens * 1e-6 * (1 + int(p[1]) * 5) + rng.random() * 0.01)
        if step % 20 == 0:
            pairs.relax(0.9, step // 20 % 5, 5)
        for tokens in (0, 100, 50_000):
            assert all(pairs.cost_s(*name, tokens) >= pairs.least_s(tokens) - 1e-9 for name in names)


def test_pairs_are_bounded_and_leave_with_their_worker():
    pairs = Pairs()
    for i in range(PAIRS_MOST + 10):
        pairs.observe(f"p{i}", "d", 10, 0.1)
    assert len(pairs) == PAIRS_MOST
    pairs.forget("d")
    assert len(pairs) == 0
