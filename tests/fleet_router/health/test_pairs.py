"""Routing around pairs that are put out."""

from __future__ import annotations

import itertools

import pytest

from fleet_router.config import RouterConfig
from fleet_router.health.pairs import PairHealth
from fleet_router.policy.chosen import Choice
from fleet_router.workers import WorkerTable
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
    pairs.keep(frozenset({"p1"}))
    assert pairs.breakers == {}
