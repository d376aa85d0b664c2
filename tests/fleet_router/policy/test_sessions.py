"""Sessions (routing.sessionHeader) and the cost of a pair: they stay where they are, whatever it costs there."""

from __future__ import annotations

import pytest

from fleet_router.policy.cost import cheapest
from fleet_router.policy.ring import LOAD_FLOOR
from fleet_router.policy.side import WHOLE
from tests.fleet_router.policy.test_cost import ask, chosen, fleet, load


@pytest.mark.parametrize("by_cost", [True, False])
@pytest.mark.parametrize("prefill", [0, 3])
def test_a_session_stays_while_its_workers_are_within_their_bound(prefill: int, by_cost: bool):
    """Incident: one request more at a session's worker, or its prompt cached elsewhere, and it went there: of twelve sessions
    that asked at a time on four workers, none of which was at its bound, eleven moved."""
    group, workers = fleet(prefill, 4)
    session = ask(session=True, by_cost=by_cost, ring_key=12_345)
    home = cheapest(session, group, (), None)
    source, decode = chosen(home)
    assert (source is not None) is (prefill > 0 and not by_cost)
    elsewhere = sum(1 << i for i, uid in enumerate(workers) if uid not in (source, decode))
    for _ in range(LOAD_FLOOR - 1):
        load(workers[decode], 1)
        workers[decode].free_at += 30.0
        if source is not None:
            load(workers[source], 1)
            workers[source].free_at += 30.0
        found = cheapest(session, group, [(2_000.0, elsewhere)], None)
        assert found.decode.uid == decode
        assert by_cost or chosen(found) == (source, decode)
    load(workers[decode], 1)
    assert chosen(cheapest(session, group, (), None))[1] != decode  # at its bound


def test_a_session_of_a_large_side_stays_too():
    group, workers = fleet(0, 4 * WHOLE)
    session = ask(session=True, ring_key=12_345)
    _, decode = chosen(cheapest(session, group, (), None))
    load(workers[decode], LOAD_FLOOR - 1)
    holders = sum(1 << i for i, uid in enumerate(workers) if uid != decode and i < 3)
    assert chosen(cheapest(session, group, [(2_900.0, holders)], None)) == (None, decode)


@pytest.mark.parametrize("decode", [4, 4 * WHOLE])
def test_a_session_under_an_adapter_stays_though_others_have_it_loaded(decode: int):
    """Both draw: to load it costs a quarter of a second where the session is at home, and nothing elsewhere."""
    group, workers = fleet(3, decode)
    homes = {chosen(cheapest(ask(session=True, adapter="a", ring_key=key << 58), group, (), None)) for key in range(16)}
    assert len(homes) > 2
    for key in range(16):
        session = ask(session=True, adapter="a", ring_key=key << 58)
        home = chosen(cheapest(session, group, (), None))
        for uid, worker in workers.items():
            worker.adapters.clear()
            if uid not in home:
                worker.adapters["a"] = None
        few = {*home, "p0", "d0", "d1", "d2"}
        assert chosen(cheapest(session, group, (), None)) == home
        assert chosen(cheapest(session, group, (), lambda worker, few=few: worker.uid in few)) == home
