"""Policies that go by one rule: by hash, by load, by turns; the ring and the bound."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.policy.candidate import Candidate
from fleet_router.policy.choose import choose
from fleet_router.policy.chosen import Choice, Refusal, SimpleAsk
from fleet_router.policy.ring import LOAD_FLOOR, Ring, load_cap

GROUP = ("t", "c")


def workers(**inflight: int) -> list[Candidate]:
    return [
        Candidate(name, "prefill" if name.startswith("p") else "decode", GROUP, load, bit=1 << i)
        for i, (name, load) in enumerate(inflight.items())
    ]


def decide(candidates: list[Candidate], policy: str = "prefixHash", key: int = 100, steps=(), turn: int = 1, least: float = 64.0):
    by_role = {role: [c for c in candidates if c.role == role] for role in ("prefill", "decode")}
    rings = {role: Ring([c.uid for c in by_role[role]]) for role in by_role}
    return choose(SimpleAsk(key, 3000.0, least, turn), by_role, steps, rings, policy, 1.25)


def test_no_decode_worker_is_a_refusal():
    assert isinstance(decide(workers(p1=0)), Refusal)


def test_without_a_compatible_prefill_worker_the_decode_worker_prefills():
    stranger = Candidate("p1", "prefill", ("t", "other"), 0)
    found = decide([stranger, *workers(d1=0)])
    assert isinstance(found, Choice)
    assert (found.prefill, found.decode, found.reason) == (None, "d1", "no compatible prefill worker")


def test_k15_pairs_are_only_made_inside_a_group():
    other = [Candidate("p9", "prefill", ("t", "x"), 0), Candidate("d9", "decode", ("t", "x"), 9)]
    found = decide([*workers(p1=5, d1=0), *other], "leastLoad")
    assert (found.prefill, found.decode) == ("p1", "d1")


@pytest.mark.parametrize(("held", "least", "prefill"), [(2990, 64, None), (2900, 64, "p1"), (0, math.inf, None)])
def test_a_prompt_that_is_cached_is_prefilled_where_it_is(held: float, least: float, prefill: str | None):
    assert decide(workers(d1=0, p1=0), steps=[(held, 1)], least=least).prefill == prefill


def test_round_robin_takes_turns_and_least_load_the_idle_one():
    pool = workers(p1=3, p2=0, d1=0, d2=0)
    assert [decide(pool, "roundRobin", turn=t).prefill for t in range(4)] == ["p1", "p2", "p1", "p2"]
    assert {decide(pool, "leastLoad", turn=t).prefill for t in range(4)} == {"p2"}


def test_prefix_hash_ignores_what_is_cached_elsewhere():
    pool = workers(p1=0, p2=0, p3=0, d1=0)
    assert len({decide(pool, steps=[(900.0, bit)]).prefill for bit in (1, 2, 4)}) == 1


def test_what_another_worker_holds_is_not_cached_here():
    """`d1` has the first bit, `p1` the second."""
    assert decide(workers(d1=0, p1=0), steps=[(2990.0, 2)]).prefill == "p1"
    assert decide(workers(d1=0, p1=0), steps=[(2990.0, 2), (2950.0, 1)]).prefill is None


def test_prefix_hash_goes_by_the_prompt_alone():
    pool = workers(p1=1, p2=0, p3=2, d1=0)
    found = {key: {decide(pool, key=key, turn=turn).prefill for turn in range(5)} for key in range(0, 2**64, 2**59)}
    assert {len(names) for names in found.values()} == {1}
    assert set.union(*found.values()) == {"p1", "p2", "p3"}


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300), st.sampled_from([1.0, 1.25, 2.0]))
def test_bounded_load_holds_whatever_the_keys(keys: list[int], bound: float):
    loads = dict.fromkeys(("p1", "p2", "p3", "p4", "p5"), 0)
    for key in keys:
        found = decide([*workers(**loads), Candidate("d1", "decode", GROUP, 0)], key=key).prefill
        cap = load_cap(list(loads.values()), bound if bound == 1.25 else 1.25)
        loads[found] += 1
        assert loads[found] <= max(LOAD_FLOOR, cap)


def test_a_worker_that_joins_or_leaves_moves_only_its_own_keys():
    names = [f"w{i}" for i in range(8)]
    before, after = Ring(names), Ring(names[:-1])
    for key in range(0, 2**64, 2**64 // 500):
        owner = before.first(key, names)
        if owner != "w7":
            assert after.first(key, names) == owner


PLACES = [0, 2**64 - 1, *(point + by for point in Ring(list("abcde"))._points for by in (-1, 0, 1))]
"""Of a ring: where another worker is next. Drawn integers are mostly small, and all small ones are before the first point."""


@pytest.mark.parametrize("wanted", ["", "a", "be", "acdf", "abcde"])
def test_a_key_belongs_to_the_first_wanted_worker_clockwise(wanted: str):
    ring = Ring(list("abcde"))
    points = list(zip(ring._points, ring._names, strict=True))
    for key in PLACES:
        from_key = [name for point, name in points if point >= key] + [name for point, name in points if point < key]
        assert ring.first(key, set(wanted)) == next((name for name in from_key if name in wanted), None)


def test_an_empty_ring_has_nobody():
    assert Ring([]).first(1, {"a"}) is None


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1))
def test_a_ring_that_grew_from_another_is_the_ring_of_its_workers(before: list[str], now: list[str]):
    grown, built = Ring(now, Ring(before)), Ring(now)
    assert (grown._points, grown._names) == (built._points, built._names)


@pytest.mark.parametrize("wanted", ["a", "acd", "abcde", *map("".join, itertools.combinations("abcde", 2))])
def test_nearest_is_first(wanted: str):
    ring = Ring(list("abcde"))
    for key in PLACES:
        assert ring.owner(key) == ring.first(key, "abcde")
        assert wanted[ring.nearest(key, wanted)] == ring.first(key, wanted)
        assert next(name for name in ring.along(key, 320) if name in wanted) == ring.first(key, wanted)
    assert len(list(ring.along(key, 320))) == 320
    assert len(list(ring.along(key, 7))) == 7


@pytest.mark.parametrize(("loads", "cap"), [([], 0), ([0, 0], 4), ([10, 10], 14), ([0], 4), ([7], 10)])
def test_load_cap(loads: list[int], cap: int):
    assert load_cap(loads, 1.25) == cap


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
def test_who_joined_just_now_gets_less_by_turns_too(share: float):
    """slowStart counted for kvAware and prefixHash alone: a new worker had its full part of the turns at once."""
    pool = workers(d1=0, d2=0, d3=0, d4=0)
    pool[2].share = share
    turns = 4 * 400
    found = Counter(decide(pool, "roundRobin", turn=turn).decode for turn in range(turns))
    assert found["d3"] == pytest.approx(400 * share, abs=2)
    others = [found[name] for name in ("d1", "d2", "d4")]
    assert max(others) - min(others) <= 4
    assert sum(found.values()) == turns


def test_who_joined_just_now_gets_less_by_load_too():
    pool = workers(d1=0, d2=0, d3=0)
    pool[1].share = 0.25
    got = Counter[str]()
    by_name = {worker.uid: worker for worker in pool}
    for turn in range(90):  # nobody ends: as many as their shares, 1 to 1/4 to 1
        found = decide(pool, "leastLoad", turn=turn).decode
        by_name[found].inflight += 1
        got[found] += 1
    assert got["d2"] == pytest.approx(10, abs=1)
    assert abs(got["d1"] - got["d3"]) <= 1


@pytest.mark.parametrize("policy", ["roundRobin", "leastLoad", "prefixHash"])
def test_where_all_have_just_joined_they_share_all(policy: str):
    pool = workers(d1=0, d2=0)
    for worker in pool:
        worker.share = 0.05
    found = Counter(decide(pool, policy, turn=turn, key=turn * 2**59).decode for turn in range(40))
    assert set(found) == {"d1", "d2"}


def test_equal_load_is_spread_over_turns_that_follow_each_other():
    """One client alone had some hundred answers in a row from one worker, then as many from the next."""
    pool = workers(**dict.fromkeys(("d1", "d2", "d3", "d4"), 0))
    for worker, uid in zip(pool, ("5c0e1f3a", "b7d29944", "0a8811ce", "f3e0d1c2"), strict=True):
        worker.uid = uid
    for first in (0, 500, 5_000):
        found = Counter(decide(pool, "leastLoad", turn=first + turn).decode for turn in range(80))
        assert len(found) == 4
        assert max(found.values()) <= 48
