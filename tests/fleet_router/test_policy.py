"""Where requests go: ring, bounded load, prefix index, pair choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.policy.choose import Ask, Candidate, Choice, Refusal, choose
from fleet_router.policy.prefix import PrefixIndex, key_chain, ring_key
from fleet_router.policy.ring import LOAD_FLOOR, Ring, load_cap

GROUP = ("t", "c")


def workers(**inflight: int) -> list[Candidate]:
    return [Candidate(name, "prefill" if name.startswith("p") else "decode", GROUP, load) for name, load in inflight.items()]


def decide(candidates: list[Candidate], policy: str = "kvAware", keys: list[int] | None = None, matched=None, turn: int = 1):
    keys = keys if keys is not None else list(range(100, 140))
    rings = {role: Ring([c.uid for c in candidates if c.role == role]) for role in ("prefill", "decode")}
    by_role = {role: [c for c in candidates if c.role == role] for role in ("prefill", "decode")}
    return choose(Ask(keys, ring_key(keys), 1.0, turn), by_role, matched or {}, rings, policy, 1.25)


def test_no_decode_worker_is_a_refusal():
    assert isinstance(decide(workers(p1=0)), Refusal)


def test_without_a_compatible_prefill_worker_the_decode_worker_prefills():
    stranger = Candidate("p1", "prefill", ("t", "other"), 0)
    assert decide([stranger, *workers(d1=0)]) == Choice(None, "d1", "no compatible prefill worker")


def test_k15_pairs_are_only_made_inside_a_group():
    other = [Candidate("p9", "prefill", ("t", "x"), 0), Candidate("d9", "decode", ("t", "x"), 9)]
    found = decide([*workers(p1=5, d1=0), *other])
    assert (found.prefill, found.decode) == ("p1", "d1")


def test_a_prompt_that_is_cached_is_prefilled_where_it_is():
    assert decide(workers(p1=0, d1=0), matched={"d1": 40}).prefill is None
    assert decide(workers(p1=0, d1=0), matched={"d1": 38}).prefill == "p1"


def test_kv_aware_goes_to_the_prefix_until_load_outweighs_it():
    assert decide(workers(p1=0, p2=0, d1=0), matched={"p2": 30}).prefill == "p2"
    assert decide(workers(p1=0, p2=4, p3=4, p4=4, d1=0), matched={"p2": 30}).prefill == "p1"


def test_round_robin_takes_turns_and_least_load_the_idle_one():
    pool = workers(p1=3, p2=0, d1=0, d2=0)
    assert [decide(pool, "roundRobin", turn=t).prefill for t in range(4)] == ["p1", "p2", "p1", "p2"]
    assert {decide(pool, "leastLoad", turn=t).prefill for t in range(4)} == {"p2"}


def test_prefix_hash_ignores_what_is_cached_elsewhere():
    pool = workers(p1=0, p2=0, p3=0, d1=0)
    assert len({decide(pool, "prefixHash", matched=m).prefill for m in ({}, {"p1": 9}, {"p2": 9}, {"p3": 9})}) == 1


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=300), st.sampled_from([1.0, 1.25, 2.0]))
def test_bounded_load_holds_whatever_the_keys(keys: list[int], bound: float):
    loads = dict.fromkeys(("p1", "p2", "p3", "p4", "p5"), 0)
    for key in keys:
        found = decide([*workers(**loads), Candidate("d1", "decode", GROUP, 0)], "prefixHash", [key] * 40).prefill
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


@given(st.integers(0, 2**64 - 1), st.sets(st.sampled_from("abcdef")))
def test_a_key_belongs_to_the_first_wanted_worker_clockwise(key: int, wanted: set[str]):
    ring = Ring(list("abcde"))
    clockwise = sorted(((point - key) % 2**64, name) for point, name in zip(ring._points, ring._names, strict=True))
    assert ring.first(key, wanted) == next((name for _, name in clockwise if name in wanted), None)


def test_an_empty_ring_has_nobody():
    assert Ring([]).first(1, {"a"}) is None


@given(st.binary(max_size=2000), st.binary(max_size=600), st.binary(max_size=600))
def test_equal_keys_mean_equal_prefixes(shared: bytes, left: bytes, right: bytes):
    a, b = key_chain(shared + left), key_chain(shared + right)
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    assert common >= min(len(shared) // 256, len(a), len(b))
    assert (shared + left)[: common * 256] == (shared + right)[: common * 256]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=40))
def test_the_index_equals_a_plain_model(steps: list[tuple[str, int, int, bool]]):
    index, model = PrefixIndex(10_000), {}
    for worker, topic, depth, removed in steps:
        keys = [topic * 100 + i for i in range(depth)]
        if removed:
            index.remove(worker)
            model.pop(worker, None)
        else:
            index.add(keys, worker)
            model.setdefault(worker, set()).update(keys)
        for asked in range(4):
            chain = [asked * 100 + i for i in range(6)]
            found = index.matched(chain)
            for name, known in model.items():
                expected = next((i for i, key in enumerate(chain) if key not in known), len(chain))
                assert found.get(name, 0) == expected


def test_the_index_is_bounded():
    index = PrefixIndex(50)
    for i in range(20):
        index.add([i * 1000 + j for j in range(10)], "w")
    assert len(index) == 50
    assert index.matched([19_000 + j for j in range(10)]) == {"w": 10}
    assert index.matched([j for j in range(10)]) == {}


@pytest.mark.parametrize(("loads", "cap"), [([], 0), ([0, 0], 2), ([10, 10], 14), ([0], 2), ([7], 10)])
def test_load_cap(loads: list[int], cap: int):
    assert load_cap(loads, 1.25) == cap
