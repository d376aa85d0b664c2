"""The cost of a pair: what it prefers, what it looks at, and what it learns."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.policy.candidate import Candidate, prefill_done, prefill_sent
from fleet_router.policy.cost import (
    COLD_LEAST,
    EPSILON_S,
    EPSILON_SHARE,
    STALL,
    CostAsk,
    Offer,
    cheapest,
    missing_of,
)
from fleet_router.policy.group import Group
from fleet_router.policy.ring import LOAD_FLOOR, cap_of
from fleet_router.policy.routing import Routing
from fleet_router.policy.side import HEAT_LEAST, HEAT_WORTH, WHOLE
from fleet_router.policy.trip import Trip

GROUP = ("t", "c")
KEY = 7


def fleet(prefill: int, decode: int, slots: int = 0) -> tuple[Group, dict[str, Candidate]]:
    """A group of idle workers whose pairs have all met."""
    group = Group(GROUP)
    names = [f"p{i}" for i in range(prefill)] + [f"d{i}" for i in range(decode)]
    made = [Candidate(n, "prefill" if n[0] == "p" else "decode", GROUP, 0, slots) for n in names]
    for worker in made:
        group.adopt(worker)
    group.update([(worker, 1 << i) for i, worker in enumerate(made)])
    for i in range(prefill):
        for j in range(decode):
            group.pairs.observe(f"p{i}", f"d{j}", 1000, group.pairs.common.at(1000))
    return group, {worker.uid: worker for worker in made}


def ask(tokens: float = 3000.0, **more) -> CostAsk:
    given = {"ring_key": KEY, "now": 100.0, "bound": 1.25, "min_uncached": 64.0} | more
    return CostAsk(tokens, **given)


def chosen(offer: Offer | None) -> tuple[str | None, str]:
    assert offer is not None
    return offer.prefill.uid if offer.prefill else None, offer.decode.uid


def load(worker: Candidate, requests: int) -> None:
    for _ in range(requests):
        worker.began()


# -- local, remote, kept -------------------------------------------------------------------------------------------------------
def test_an_idle_fleet_prefills_on_decode_and_a_busy_decode_worker_lets_others():
    group, workers = fleet(1, 1)
    assert chosen(cheapest(ask(), group, (), None)) == (None, "d0")
    load(workers["d0"], 16)
    assert chosen(cheapest(ask(), group, (), None)) == ("p0", "d0")


def test_a_backlog_of_the_prefill_worker_sends_the_prompt_to_decode():
    group, workers = fleet(1, 1)
    load(workers["d0"], 16)
    workers["p0"].free_at = 103.0
    found = cheapest(ask(), group, (), None)
    assert chosen(found) == (None, "d0")
    assert found.reason == "local prefill costs less"


def test_slow_transfers_are_weighed():
    group, workers = fleet(1, 1)
    load(workers["d0"], 16)
    for _ in range(50):
        group.pairs.observe("p0", "d0", 3000, 2.0)
    assert chosen(cheapest(ask(), group, (), None)) == (None, "d0")


def test_full_decode_workers_leave_the_request_on_prefill_when_waiting_costs_more():
    group, workers = fleet(1, 1, slots=4)
    load(workers["d0"], 4)
    for _ in range(100):
        group.answer.observe(60.0)
    found = cheapest(ask(), group, (), None)
    assert chosen(found) == (None, "p0")
    assert found.reason.startswith("decode workers are full")
    for _ in range(300):
        group.answer.observe(0.1)
    assert chosen(cheapest(ask(), group, (), None))[1] == "d0"


def test_after_prefill_failed_nobody_of_prefill_takes_part():
    group, workers = fleet(2, 1, slots=1)
    load(workers["d0"], 9)
    assert chosen(cheapest(ask(local=True), group, (), None)) == (None, "d0")


@pytest.mark.parametrize("by_cost", [True, False])
@pytest.mark.parametrize(("held", "prefill"), [(2950.0, None), (1500.0, "p0")])
def test_the_threshold_is_a_floor_for_cost_and_the_rule_without_it(by_cost: bool, held: float, prefill: str | None):
    group, workers = fleet(1, 1)
    load(workers["d0"], 40)
    found = cheapest(ask(by_cost=by_cost, tokens=3000.0), group, [(held, 3)], None)
    assert chosen(found) == (prefill, "d0")


def test_by_threshold_an_idle_decode_worker_gets_long_prompts_from_prefill():
    group, _ = fleet(1, 1)
    assert chosen(cheapest(ask(by_cost=False), group, (), None)) == ("p0", "d0")


def test_a_class_that_can_wait_spares_the_others():
    group, workers = fleet(1, 1)
    load(workers["d0"], 4)
    workers["p0"].free_at = 100.05
    assert chosen(cheapest(ask(), group, (), None)) == (None, "d0")
    assert chosen(cheapest(ask(others=20.0), group, (), None)) == ("p0", "d0")


# -- which worker --------------------------------------------------------------------------------------------------------------
def test_a_prefix_draws_until_its_queue_outweighs_it():
    group, workers = fleet(3, 1)
    steps = [(2500.0, workers["p1"].bit)]
    assert chosen(cheapest(ask(by_cost=False), group, steps, None))[0] == "p1"
    workers["p1"].free_at = 100.2
    assert chosen(cheapest(ask(by_cost=False), group, steps, None))[0] == "p1"
    workers["p1"].free_at = 100.4
    assert chosen(cheapest(ask(by_cost=False), group, steps, None))[0] != "p1"


def test_a_faster_worker_is_preferred_once_it_is_known():
    group, workers = fleet(3, 1)
    for _ in range(20):
        workers["p2"].prefill.observe(3000, 0.05)
    workers["p2"].note_speed()
    assert {chosen(cheapest(ask(by_cost=False, ring_key=key), group, (), None))[0] for key in range(50)} == {"p2"}


def test_a_pair_that_never_met_is_passed_over_for_one_that_did():
    group, workers = fleet(2, 2)
    group.pairs._lines.clear()
    group.pairs.observe("p1", "d0", 10, 0.02)
    load(workers["d0"], 1)
    load(workers["d1"], 1)
    assert {chosen(cheapest(ask(by_cost=False, ring_key=key), group, (), None)) for key in range(20)} == {("p1", "d0")}


def test_near_equal_costs_are_settled_by_the_ring_alike_in_every_router():
    one, _ = fleet(8, 8)
    two, workers = fleet(8, 8)
    for worker in workers.values():
        worker.free_at = 100.0 + random.Random(worker.uid).random() * EPSILON_S / 2
    seen = set()
    for key in range(0, 2**64, 2**64 // 200):
        found = chosen(cheapest(ask(by_cost=False, ring_key=key), one, (), None))
        assert chosen(cheapest(ask(by_cost=False, ring_key=key), two, (), None)) == found
        seen.add(found[0])
    assert len(seen) == 8


@pytest.mark.parametrize(("adapter", "queue_s", "found"), [("billing", 0.1, "p1"), ("billing", 0.5, "p0"), ("", 0.1, "p0")])
def test_a_prefill_worker_that_loads_an_adapter_first_takes_so_much_longer(adapter: str, queue_s: float, found: str):
    group, workers = fleet(2, 1)
    load(workers["d0"], 200)
    workers["p1"].free_at = 100.0 + queue_s
    workers["p1"].adapters["billing"] = None
    assert chosen(cheapest(ask(adapter=adapter), group, (), None)) == (found, "d0")


def test_an_adapter_goes_where_it_is_loaded():
    group, workers = fleet(2, 2)
    offer = Offer(0, workers["p1"], workers["d1"], 10, 10, "", 0)
    Trip(group, offer, 90.0, stream=True, adapter="billing").over(90.0)
    asked = [chosen(cheapest(ask(by_cost=False, adapter="billing", ring_key=key), group, (), None)) for key in range(20)]
    assert set(asked) == {("p1", "d1")}
    others = {chosen(cheapest(ask(by_cost=False, adapter="legal", ring_key=key << 58), group, (), None)) for key in range(64)}
    assert len(others) > 1


def test_a_new_worker_begins_slowly():
    routing = Routing()
    old = [Candidate(f"d{i}", "decode", GROUP, 0) for i in range(3)]
    routing.update(old, 0.0, 60.0)
    assert all(worker.share == 1.0 for worker in old)  # a router that starts finds no new workers
    fresh = Candidate("d9", "decode", GROUP, 0)
    routing.update([*old, fresh], 10.0, 60.0)
    for worker in old:
        load(worker, 8)
    given = []
    for second in (10, 25, 40, 71):
        routing.tick(float(second), 60.0)
        taken = 0
        while chosen(routing.decide(ask(now=float(second)), ()))[1] == "d9" and taken < 99:
            fresh.began()
            taken += 1
        given.append(fresh.inflight)
    assert given[0] == 1
    assert given == sorted(given)
    assert given[-1] >= 8


def test_what_is_held_counts_however_deep_it_is():
    """Of five depths, on both sides: the workers in order, each holding more than the one before."""
    group, workers = fleet(5, 5)
    steps = [
        (held, workers[f"p{i}"].bit | workers[f"d{i}"].bit) for i, held in ((4, 2900.0), (3, 2000.0), (2, 900.0), (1, 300.0))
    ]
    asked = ask(min_uncached=0.0)
    cheapest(asked, group, steps, None)
    missed = [3000.0, 2700.0, 2100.0, 1000.0, 100.0]
    for weighed, costs in ((asked.seen[0], asked.seen[0].local), (asked.seen[1], asked.seen[1].costs)):
        assert [missing_of(weighed, at) for at in range(5)] == missed
        assert costs == pytest.approx([0.01 + 1e-4 * tokens for tokens in missed])


def test_a_holder_without_a_slot_is_compared_with_what_waits_less():
    group, workers = fleet(0, 2, slots=2)
    load(workers["d0"], 2)
    assert group.answer.value / 2 > 1.0 > 0.01 + 1e-4 * 9_000
    for _ in range(2):
        assert chosen(cheapest(ask(9_000.0), group, [(8_990.0, workers["d0"].bit)], None)) == (None, "d1")
        workers["d0"].slots = workers["d1"].slots = 3
        assert chosen(cheapest(ask(9_000.0), group, [(8_990.0, workers["d0"].bit)], None)) == (None, "d0")
        workers["d0"].slots = workers["d1"].slots = 2


@pytest.mark.parametrize("queue_s", [0.2, 0.9, 3.0])
@pytest.mark.parametrize("side", ["p", "d"])
def test_a_queue_of_less_than_a_second_counts(queue_s: float, side: str):
    group, workers = fleet(2 if side == "p" else 0, 2)
    for busy, free in (("0", "1"), ("1", "0")):
        workers[side + busy].free_at, workers[side + free].free_at = 100.0 + queue_s, 0.0
        for key in range(0, 2**64, 2**60):
            found = chosen(cheapest(ask(ring_key=key, by_cost=side == "d"), group, (), None))
            assert found[side == "d"] == side + free


# -- bound, exactness, what is looked at -----------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 40)), min_size=1, max_size=120))
def test_no_worker_exceeds_the_bound_whatever_it_holds(size: int, asked: list[tuple[int, int]]):
    group, workers = fleet(1, size)
    for key, holder in asked:
        bit = workers[f"d{holder % size}"].bit
        total = group.decode.inflight
        _, decode = chosen(cheapest(ask(ring_key=key, local=True), group, [(2999.0, bit)], None))
        workers[decode].began()
        assert workers[decode].inflight <= max(LOAD_FLOOR, cap_of(total, size, 1.25))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, WHOLE), st.booleans(), st.randoms(use_true_random=False))
def test_nobody_is_sent_more_prefill_work_than_the_bound_while_others_have_room(size: int, remote: bool, rng: random.Random):
    """Prompts of any size, known here and there. Above the bound only: who holds what it costs, who is coolest, and a floor."""
    group, _ = fleet(size if remote else 0, 1 if remote else size)
    side = group.prefill if remote else group.decode
    for number in range(150):
        tokens = max(10.0, min(120_000.0, rng.lognormvariate(8.5, 1.4)))
        steps = rng.choice([(), [(tokens * rng.random(), rng.getrandbits(size))]])
        mean, floor = side.heat / size, COLD_LEAST * side.lump or HEAT_LEAST * tokens
        before = {one.uid: one.heat for one in side.members}
        offer = cheapest(ask(tokens, now=10.0 * number, by_cost=False, ring_key=rng.getrandbits(64)), group, steps, None)
        worker = offer.prefill or offer.decode
        if not remote or offer.prefill is not None:
            prefill_done(prefill_sent(worker, offer.missing, 10.0 * number), 10.0 * number, learn=False)
            after = before[worker.uid] + offer.missing
            saved = before[worker.uid] <= HEAT_LEAST * (tokens - offer.missing) + EPSILON_SHARE * tokens
            coolest = before[worker.uid] <= max(mean, min(before.values())) + EPSILON_SHARE * tokens + 1 + tokens - offer.missing
            room = min(before.values()) + tokens <= max(1.25 * mean, floor)
            assert after <= max(1.25 * mean, floor) or saved or (coolest and not room)


def test_a_large_prompt_goes_where_there_is_room_and_not_where_its_hash_is():
    group, workers = fleet(0, 64)
    for number, worker in enumerate(workers.values()):
        for _ in range(10 if number % 8 else 6):
            prefill_sent(worker, 10_000.0, 0.0)
        worker.free_at = worker.crowd = 0.0
    cool = {worker.uid for worker in workers.values() if worker.heat < 100_000.0}
    sent = [chosen(cheapest(ask(50_000.0, ring_key=key), group, (), None))[1] for key in range(0, 2**64, 2**64 // 60)]
    assert set(sent) <= cool
    assert len(set(sent)) > 1


def test_a_conversation_stays_though_its_worker_alone_has_work():
    group, workers = fleet(0, 8)
    prefill_sent(workers["d3"], 100_000.0, 0.0)
    for turn in range(1, 20):
        tokens = 100_000.0 + 500 * turn
        found = cheapest(ask(tokens, now=100.0 * turn), group, [(tokens - 500, workers["d3"].bit)], None)
        assert chosen(found) == (None, "d3")
        prefill_done(prefill_sent(workers["d3"], found.missing, 100.0 * turn), 100.0 * turn, learn=False)


def test_a_worker_that_joins_owes_no_work_and_those_that_hold_a_prompt_go_on_with_it():
    routing = Routing()
    old = [Candidate(f"d{i}", "decode", GROUP, 0) for i in range(3)]
    routing.update(old, 0.0, 60.0)
    for worker in old:
        prefill_sent(worker, 90_000.0, 0.0)
        worker.free_at = 0.0
    fresh = [Candidate(f"n{i}", "decode", GROUP, 0) for i in range(6)]
    routing.update([*old, *fresh], 10.0, 60.0)
    assert [worker.heat for worker in fresh] == [90_000.0] * 6
    offer = routing.decide(ask(10_000.0), [(9_000.0, old[1].bit)])
    assert offer.decode is old[1]


def plain_costs(asked: CostAsk, group: Group, steps: list[tuple[float, int]]) -> list[float]:
    """Every way to serve the request, told slowly: all pairs, and all decode workers alone."""

    def lacks(worker: Candidate) -> float:
        held = max([0.0, *(tokens for tokens, mask in steps[:1] if mask & worker.bit)])
        held = held or max([0.0, *(tokens for tokens, mask in steps[1:] if mask & worker.bit)])
        return asked.tokens - held if held < asked.tokens else 1.0

    def prefill(worker: Candidate, members: list[Candidate], streams: int) -> float:
        side = group.decode if members is group.decode.members else group.prefill
        floor = COLD_LEAST * side.lump or HEAT_LEAST * asked.tokens
        mean = max(HEAT_LEAST * asked.tokens if steps else floor, sum(one.heat for one in members) / len(members))
        work = lacks(worker) * worker.token_s
        hot = max(0.0, worker.heat / mean - (0.0 if steps else 1.0))
        meeting = STALL * streams + work * worker.crowd + HEAT_WORTH * hot
        return max(0.0, worker.free_at - asked.now) + worker.base_s + work + work * meeting * asked.others

    decodes, prefills, found = group.decode.members, group.prefill.members, []
    for decode in decodes:
        late = decode.inflight * decode.drag_s * asked.others
        found += [late + prefill(one, prefills, 0) + group.pairs.cost_s(one.uid, decode.uid, lacks(decode)) for one in prefills]
        if asked.by_cost or not prefills:
            found.append(late + prefill(decode, decodes, decode.inflight))
    return found


@settings(max_examples=120, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, WHOLE), st.integers(1, WHOLE), st.booleans(), st.integers(0, 4))
def test_the_best_of_all_ways_is_found_but_for_epsilon(rng: random.Random, prefill: int, decode: int, by_cost: bool, depths: int):
    """Against every pair of a small fleet. Pairs differ by their handshake alone here, which bounds what three of each miss."""
    group, workers = fleet(prefill, decode)
    for worker in workers.values():
        worker.free_at = 100.0 + rng.choice([0, rng.random() * 3])
        worker.crowd = rng.choice([0.0, rng.random()])
        sent = prefill_sent(worker, rng.choice([0.0, 30_000 * rng.random()]), 0.0)
        prefill_done(sent, 0.0, learn=False)
        worker.free_at = 100.0 + rng.choice([0, rng.random() * 3])
        load(worker, rng.randrange(4))
    for pair in rng.sample(sorted(group.pairs._lines), len(group.pairs._lines) // 2):
        del group.pairs._lines[pair]
    left, steps = (1 << (prefill + decode)) - 1, []
    for tokens in (2500.0, 2000.0, 900.0, 500.0)[:depths]:
        mask = rng.getrandbits(prefill + decode) & left
        steps, left = [*steps, (tokens, mask)], left & ~mask
    asked = ask(by_cost=by_cost, bound=1e9, min_uncached=0.0, others=rng.choice([0.3, 1.0, 4.0]))
    found = cheapest(asked, group, steps, None)
    best = min(plain_costs(asked, group, steps))
    slack = 3 * EPSILON_S + 2 * EPSILON_SHARE * (best + 1)
    assert best - 1e-9 <= found.cost_s <= best + slack + group.pairs.handshake.value


def test_work_is_spread_over_workers_that_cost_the_same():
    """One beginning that all prompts share, at one worker after the other so slowly that no queue tells them apart."""
    routing = Routing()
    workers = [Candidate(f"d{i}", "decode", GROUP, 0) for i in range(8)]
    routing.update(workers, 0.0, 0.0)
    sent = dict.fromkeys((worker.uid for worker in workers), 0.0)
    everybody = sum(worker.bit for worker in workers)
    rng = random.Random(5)
    for number in range(400):
        asked = ask(tokens=rng.choice([500.0, 3000.0, 20_000.0]), now=3.0 * number)
        for step in range(6):
            routing.tick(asked.now + 0.5 * step, 0.0)
        offer = routing.decide(asked, [(300.0, everybody)])
        trip = Trip(routing.groups[GROUP], offer, asked.now, stream=True)
        trip.first_token(asked.now + 0.01 + offer.missing * 1e-4)
        trip.over(asked.now + 1.0)
        sent[offer.decode.uid] += offer.missing
    assert max(sent.values()) <= 1.1 * sum(sent.values()) / len(sent)


def test_heat_is_forgotten_and_counted_once_a_side():
    routing = Routing()
    workers = [Candidate(f"d{i}", "decode", GROUP, 0) for i in range(4)]
    routing.update(workers, 0.0, 0.0)
    side = routing.groups[GROUP].decode
    for worker in workers[:2]:
        prefill_sent(worker, 1000.0, 0.0)
    assert (side.heat, workers[0].heat) == (2000.0, 1000.0)
    routing.tick(0.5, 0.0)
    assert 1900.0 < side.heat == sum(worker.heat for worker in workers) < 2000.0
    routing.update(workers[1:], 1.0, 0.0)
    assert side.heat == workers[1].heat


@pytest.mark.parametrize("size", [16, 64, 256, 1024])
def test_what_is_looked_at_does_not_grow_with_the_fleet(size: int):
    group = Group(GROUP)
    rng = random.Random(size)
    made = [Candidate(f"{i}", "prefill" if i % 4 == 0 else "decode", GROUP, 0) for i in range(size)]
    group.update([(worker, 1 << i) for i, worker in enumerate(made)])
    for _ in range(200):
        everybody = (1 << size) - 1
        deep = sum(1 << rng.randrange(size) for _ in range(3)) & everybody
        found = cheapest(ask(ring_key=rng.getrandbits(64)), group, [(2500.0, deep), (500.0, everybody & ~deep)], None)
        assert found.looked <= 2 * WHOLE + 9
        found.decode.began()


def test_of_a_large_fleet_holders_and_idle_ones_are_looked_at():
    group, workers = fleet(1, 200)
    for i in range(200):
        load(workers[f"d{i}"], 2)
    idle, holder = workers["d150"], workers["d77"]
    idle.ended()
    idle.ended()
    looked = group.decode.look([(2500.0, holder.bit)], KEY, 1.25, None)
    assert idle in looked
    assert holder in looked
    own = group.decode.ring.first(KEY, workers)
    assert workers[own] in looked
    some = {f"d{i}" for i in range(0, 200, 50)}
    assert {w.uid for w in group.decode.look((), KEY, 1.25, lambda worker: worker.uid in some)} == some


# -- learning ------------------------------------------------------------------------------------------------------------------
def test_the_queue_follows_what_really_happens():
    _, workers = fleet(1, 1)
    worker = workers["p0"]
    first = prefill_sent(worker, 1000, 0.0)
    second = prefill_sent(worker, 1000, 0.0)
    expected = worker.free_at
    assert expected == pytest.approx(0.2)  # tokens queue, the fixed part of both runs at once
    assert prefill_done(first, 0.5, learn=True) == pytest.approx(0.5)
    assert worker.free_at == pytest.approx(expected + 0.39)  # late by so much: so is everything behind it
    assert prefill_done(second, 1.0, learn=True) == pytest.approx(0.51)  # not 1.0: it waited for the first
    assert worker.free_at == 1.0
    assert worker.prefill.at(1000) > 0.11
    third = prefill_sent(worker, 1000, 2.0)
    prefill_done(third, 2.1, learn=False)
    assert (worker.pending, worker.free_at) == (0, 2.1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_trip_teaches_what_it_saw(stream: bool):
    group, workers = fleet(1, 1)
    offer = Offer(0, workers["p0"], workers["d0"], 2000, 3000, "", 0)
    moved, prefill, drag = group.pairs.cost_s("p0", "d0", 3000), workers["p0"].prefill.at(2000), workers["d0"].drag_s
    for start in range(40):
        trip = Trip(group, offer, float(start), stream=stream)
        trip.prefilled(start + 0.05)
        trip.first_token(start + 0.3)
        load(workers["d0"], 1)
        trip.ended(start + 0.9, 31)
        trip.over(start + 0.9)
    assert workers["p0"].prefill.at(2000) == pytest.approx(0.05, rel=0.1) != prefill
    assert group.speed["prefill"].at(2000) == pytest.approx(0.05, rel=0.1)
    if stream:
        assert group.pairs.cost_s("p0", "d0", 3000) == pytest.approx(0.25, rel=0.1)
        assert group.output.value < 60
        assert workers["d0"].drag_s != drag
    else:
        assert group.pairs.cost_s("p0", "d0", 3000) == moved
    assert workers["p0"].pending == 0


def test_a_new_worker_is_believed_to_be_like_the_others():
    group, workers = fleet(1, 1)
    for _ in range(50):
        group.speed["prefill"].observe(1000, 0.02)
    fresh = Candidate("p9", "prefill", GROUP, 0)
    group.adopt(fresh)
    assert fresh.token_s * 1000 + fresh.base_s == pytest.approx(0.02, rel=0.15)
    for _ in range(400):
        group.relax(0.9, 0, 1)
    assert workers["p0"].prefill.at(1000) == pytest.approx(group.speed["prefill"].at(1000), rel=0.01)


def test_a_tier_serves_its_own_and_all_when_it_cannot():
    routing = Routing()
    small, large = Candidate("s", "decode", ("small", "c"), 0), Candidate("l", "decode", ("large", "c"), 0)
    routing.update([small, large], 0.0, 0.0)
    assert {chosen(routing.decide(ask(ring_key=key << 60), (), tier="small"))[1] for key in range(16)} == {"s"}
    assert {chosen(routing.decide(ask(ring_key=key << 60), (), tier="large"))[1] for key in range(16)} == {"l"}
    assert routing.decide(ask(), (), tier="gone") is not None
    routing.update([large], 1.0, 0.0)
    assert chosen(routing.decide(ask(), (), tier="small"))[1] == "l"
