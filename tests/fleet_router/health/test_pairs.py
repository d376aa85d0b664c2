"""Routing around pairs that are put out."""

from __future__ import annotations

import itertools

import pytest

from fleet_router.config import RouterConfig
from fleet_router.health.breaker import OPEN_FIRST_S, PAIR_FAILURES_MOST
from fleet_router.health.pairs import MOVED_S, PAIRS_MOST, PairHealth
from fleet_router.policy.chosen import Choice
from fleet_router.workers import PAIRS_TOLD, WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints, Role

PREFILL, DECODE = ("p1", "p2"), ("d1", "d2")
PAIRS = list(itertools.product(PREFILL, DECODE))


def endpoint(uid: str, role: Role) -> Endpoint:
    return Endpoint(
        name=uid, uid=uid, address="127.0.0.1", http_port=1, agent_port=2, role=role, tier="t", revision="aaaaaaaa", compat="c",
    )  # fmt: skip


def chosen(out: list[tuple[str, str]], policy: str) -> Choice:
    table, config = WorkerTable(), RouterConfig(fleet="f", served_name="m", policy=policy)
    workers = tuple(endpoint(uid, "prefill") for uid in PREFILL) + tuple(endpoint(uid, "decode") for uid in DECODE)
    table.update(Endpoints(fleet="f", namespace="n", workers=workers))
    for pair in out:
        while not table.pairs.failed(*pair, 1.0):
            pass
    found, _ = table.choose(b"long " * 2_000, config, 2.0, frozenset())
    assert isinstance(found, Choice)
    return found


@pytest.mark.parametrize("out", [list(some) for n in range(len(PAIRS)) for some in itertools.combinations(PAIRS, n)])
def test_a_pair_that_is_left_is_found(out: list[tuple[str, str]]):
    found = chosen(out, "kvAware")
    assert found.prefill is not None
    assert (found.prefill, found.decode) not in out


@pytest.mark.parametrize("policy", ["kvAware", "leastLoad", "roundRobin", "prefixHash"])
def test_without_any_pair_the_decode_worker_prefills(policy: str):
    found = chosen(PAIRS, policy)
    assert (found.prefill, found.decode in DECODE) == (None, True)


def test_pairs_of_workers_that_left_are_forgotten():
    pairs = PairHealth()
    pairs.failed("p1", "d1", 1.0)
    pairs.failed("p2", "d2", 1.0)
    for prefill, decode in (("p1", "d2"), ("p2", "d1"), ("p2", "d3")):
        pairs.succeeded(prefill, decode, 2.0)
    pairs.keep(frozenset({"p2", "d1", "d2"}))
    assert (set(pairs.breakers), set(pairs.moved)) == ({("p2", "d2")}, {("p2", "d1")})
    pairs.keep(frozenset({"p2"}))
    assert (pairs.breakers, pairs.moved) == ({}, {})


def test_a_pair_lasts_when_it_is_put_out_again_until_kv_moves():
    pairs, now = PairHealth(), 1.0
    while not pairs.failed("p1", "d1", now):
        pass
    assert pairs.lasting() == []  # once may be a worker's restart
    now += OPEN_FIRST_S + 1
    assert pairs.failed("p1", "d1", now)  # on trial
    assert pairs.lasting() == [("p1", "d1")]
    pairs.succeeded("p1", "d1", now - 1)  # was on its way before
    assert pairs.lasting() == [("p1", "d1")]
    pairs.succeeded("p1", "d1", now + 1)
    assert (pairs.lasting(), pairs.breakers) == ([], {})


def test_pairs_that_fail_again_are_told_by_name_and_bounded():
    table, now = WorkerTable(), 1.0
    givers, takers = [f"p{n}" for n in range(6)], [f"d{n}" for n in range(6)]
    workers = [endpoint(uid, "prefill") for uid in givers] + [endpoint(uid, "decode") for uid in takers]
    table.update(Endpoints(fleet="f", namespace="n", workers=tuple(workers)))
    assert not [line for line in table.lines(now) if line.startswith("fleet_router_pair_failing")]
    for pair in itertools.product(givers, takers):
        for at in (now, now + OPEN_FIRST_S + 1):
            while not table.pairs.failed(*pair, at):
                pass
    told = [line for line in table.lines(now) if line.startswith("fleet_router_pair_failing")]
    assert told[0] == 'fleet_router_pair_failing{tier="t",prefill="p0",decode="d0"} 1'
    assert len(told) == PAIRS_TOLD
    table.update(Endpoints(fleet="f", namespace="n", workers=tuple(workers[1:])))
    assert not any('prefill="p0"' in line for line in table.lines(now))


def failing(pairs: PairHealth, *pair: str) -> None:
    """Put out, tried again and put out again."""
    for at in (1.0, 1.0 + OPEN_FIRST_S + 1):
        while not pairs.failed(*pair, at):
            pass


def test_pairs_beside_failing_ones_tell_which_side_it_is():
    pairs = PairHealth()
    pairs.succeeded("p1", "d1", 1.0)
    assert pairs.moved == {}, "nothing is counted while nothing fails"
    failing(pairs, "p0", "d0")
    for pair in (("p1", "d0"), ("p0", "d1"), ("p1", "d1"), ("p1", "d0")):
        pairs.succeeded(*pair, 20.0)
    assert pairs.beside(21.0) == [("p1", "d0"), ("p0", "d1")], "of p1 and d1 no pair fails"
    assert pairs.beside(20.0 + MOVED_S + 1) == [], "long ago"
    failing(pairs, "p1", "d0")
    assert ("p1", "d0") not in pairs.moved, "it fails by now"
    pairs.keep(frozenset({"p0", "d0", "d1"}))
    assert pairs.beside(21.0) == [("p0", "d1")]
    pairs.succeeded("p0", "d0", 30.0)
    assert (pairs.breakers, pairs.moved) == ({}, {})


def test_what_was_sent_before_a_pair_was_put_out_shows_nothing():
    pairs = PairHealth()
    failing(pairs, "p0", "d0")
    pairs.succeeded("p0", "d0", 0.5)
    assert pairs.beside(21.0) == []


def test_pairs_that_work_are_bounded():
    pairs = PairHealth()
    failing(pairs, "p0", "d0")
    for number in range(PAIRS_MOST + 3):
        pairs.succeeded("p1", f"d{number}", 20.0)
    assert len(pairs.moved) == PAIRS_MOST
    assert next(iter(pairs.moved)) == ("p1", "d3"), "the oldest go"


@pytest.mark.parametrize(
    ("partners", "out", "condemned"), [(1, 1, False), (2, 1, False), (2, 2, True), (4, 2, True), (5, 2, False), (5, 3, True)]
)
def test_a_prefill_worker_is_at_fault_when_half_of_its_partners_and_two_of_them_get_nothing(
    partners: int, out: int, condemned: bool
):
    pairs = PairHealth()
    for decode in range(out):
        for _ in range(PAIR_FAILURES_MOST):
            pairs.failed("p", f"d{decode}", 1.0)
    assert pairs.condemns("p", partners, 2.0) is condemned
    assert not pairs.condemns("p", partners, 1.0 + OPEN_FIRST_S)  # their time is over
    assert not pairs.condemns("other", partners, 2.0)
