"""Which workers of a role a decision looks at."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet_router.policy.candidate import Candidate
from fleet_router.policy.cost import cheapest
from fleet_router.policy.group import Group
from fleet_router.policy.ring import cap_of
from fleet_router.policy.side import HOLDERS, IDLE, IDLE_LOOKED, WHOLE, Usable
from tests.fleet_router.policy.test_cost import KEY, ask, chosen, fleet, load


@pytest.mark.parametrize("usable", [None, lambda worker: int(worker.uid[1:]) % 2 == 0], ids=["all", "some"])
@pytest.mark.parametrize("ramping", [False, True])
@pytest.mark.parametrize("idle", [1, 30])
def test_a_look_at_a_large_side_is_short_and_names_nobody_twice(usable: Usable | None, ramping: bool, idle: int):
    group, workers = fleet(0, 200)
    side, rng = group.decode, random.Random(3)
    for number, worker in enumerate(workers.values()):
        load(worker, min(6, number // idle))
    if ramping:
        workers["d7"].share = 0.5
        side.mark_ramping()
    cap = cap_of(side.inflight, 200, 1.25)
    for _ in range(50):
        deep = sum({1 << rng.randrange(200) for _ in range(20)})
        assert len(side.look((), rng.getrandbits(64), 1.25, usable)) >= IDLE
        looked = side.look([(2500.0, deep), (900.0, (1 << 90) - 1 & ~deep)], rng.getrandbits(64), 1.25, usable)
        assert IDLE <= len({worker.uid for worker in looked}) == len(looked) <= HOLDERS + IDLE + 1
        assert all(worker.inflight < cap * worker.share and (usable is None or usable(worker)) for worker in looked)


def test_of_a_large_side_that_is_hot_the_coolest_of_a_few_are_looked_at():
    group, workers = fleet(0, 200)
    for number, worker in enumerate(workers.values()):
        worker.heat = group.decode.heat = 1_000.0 - number
    looked = group.decode.look((), KEY, 1.25, None, 1e9)
    assert len(looked) == IDLE + 1  # the prompt's own first
    assert {worker.heat for worker in looked[1:]} == {1_001.0 - IDLE_LOOKED + by for by in range(IDLE)}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=WHOLE), st.sampled_from([1.0, 1.25, 2.0]))
@example([8, 4], 1.25)  # the request that comes counts, too: 1.25 x 13 / 2 is above 8
def test_a_small_side_is_bounded_alike_with_and_without_a_filter(loads: list[int], bound: float):
    group, workers = fleet(0, len(loads))
    for worker, requests in zip(workers.values(), loads, strict=True):
        load(worker, requests)
    plain = group.decode.look((), KEY, bound, None)
    assert plain == group.decode.look((), KEY, bound, lambda _: True)
    assert any(worker.inflight < cap_of(sum(loads), len(loads), bound) for worker in plain)


@given(
    st.lists(st.integers(0, 12), min_size=WHOLE + 1, max_size=60),
    st.sampled_from([1.0, 1.1, 1.25, 2.0]),
    st.integers(0, 2**64 - 1),
)
@example([4] * 30 + [0], 1.0, KEY)  # those at their bound were looked at beside the only one that was below it
def test_nobody_of_a_large_side_is_looked_at_above_its_bound(loads: list[int], bound: float, key: int):
    group, workers = fleet(0, len(loads))
    for worker, requests in zip(workers.values(), loads, strict=True):
        load(worker, requests)
    cap = cap_of(sum(loads), len(loads), bound)
    for steps in ((), [(2500.0, 5)]):
        looked = group.decode.look(steps, key, bound, None, 3000.0)
        assert looked
        assert all(worker.inflight < cap for worker in looked)


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("ramping", [False, True])
def test_those_of_a_large_side_that_may_be_used_share_what_all_of_it_would_have(session: bool, ramping: bool):
    """The others are put out, of the other revision or without the adapter, and count in the mean with nothing: all who may be
    used were at its bound, and the first ones of the document got 2.7 times as much as the others."""
    group, workers = fleet(0, 200)
    may, running, rng = {f"d{i}" for i in range(120)}, deque(), random.Random(7)
    if ramping:
        workers["d119"].share = 0.05
        group.decode.mark_ramping()
    for _ in range(3_600):
        offer = cheapest(ask(ring_key=rng.getrandbits(64), session=session), group, (), lambda worker: worker.uid in may)
        load(offer.decode, 1)
        running.append(offer.decode)
        if len(running) > 2_400:
            running.popleft().ended()
    loads = [workers[uid].inflight for uid in may]
    assert sum(loads) == 2_400
    assert max(loads) <= cap_of(2_400, 120, 1.25)


def test_where_all_who_may_be_used_have_just_joined_a_large_side_looks_at_a_few_of_them():
    group, workers = fleet(0, 200)
    for uid, worker in workers.items():
        load(worker, 100 if uid == "d0" else 5)
        worker.share = 1.0 if uid == "d0" else 0.05
    group.decode.mark_ramping()
    looked = group.decode.look((), KEY, 1.25, lambda worker: worker.uid != "d0")
    assert IDLE <= len(looked) <= HOLDERS + IDLE + 1


@pytest.mark.parametrize("size", [4, WHOLE + 4])
@pytest.mark.parametrize(("share", "tokens", "may"), [
    (0.05, 10_000.0, True), (0.05, 10_600.0, False), (0.5, 14_900.0, True), (0.5, 15_100.0, False), (1.0, 120_000.0, True),
])  # fmt: skip
def test_in_its_slow_start_a_worker_takes_no_prompt_much_longer_than_usual(size: int, share: float, tokens: float, may: bool):
    """Incident: it is idle, so that the longest prompts of all went there: p99 TTFT of a minute was 1.5 to 2 times as long."""
    group, workers = fleet(0, size)
    side = group.decode
    for one in workers.values():
        one.heat = 50_000.0
    side.heat, side.squares = 50_000.0 * size, 50_000.0 * size * 10_000.0  # prompts of 10,000 tokens
    for number in range(size - 1):
        load(workers[f"d{number}"], 1)
    last = workers[f"d{size - 1}"]
    last.share = share
    side.mark_ramping()
    assert (last in side.look((), KEY, 1.25, None, tokens, tokens)) is may
    assert may or chosen(cheapest(ask(tokens), group, (), None))[1] != last.uid
    assert last in side.look((), KEY, 1.25, None)  # a session's: it stays where it is


@pytest.mark.parametrize("size", [4, WHOLE + 4])
def test_the_longest_prompt_is_taken_where_all_have_just_joined(size: int):
    group, workers = fleet(0, size)
    group.decode.heat, group.decode.squares = 1e5, 1e9
    for worker in workers.values():
        worker.share = 0.05
    group.decode.mark_ramping()
    assert group.decode.look((), KEY, 1.25, None, 120_000.0, 120_000.0)


def test_a_session_stays_with_its_worker_however_long_its_prompt_grows():
    group, workers = fleet(0, 4)
    group.decode.heat, group.decode.squares = 1e5, 1e9
    own = chosen(cheapest(ask(5_000.0, session=True), group, (), None))[1]
    workers[own].share = 0.5
    group.decode.mark_ramping()
    assert chosen(cheapest(ask(120_000.0, session=True), group, (), None))[1] == own
    assert chosen(cheapest(ask(120_000.0), group, (), None))[1] != own


def _one_has_just_joined(prefill: int, decode: int) -> tuple[Group, dict[str, Candidate]]:
    """Prompts had 500 tokens that were new; d0 and p0 have just joined, and nothing runs there."""
    group, workers = fleet(prefill, decode)
    for side in (group.prefill, group.decode):
        side.heat, side.squares = 1e5, 5e7
        for worker in side.members:
            load(worker, 0 if worker.uid in ("p0", "d0") else 3)
            worker.share = 0.5 if worker.uid in ("p0", "d0") else 1.0
        side.mark_ramping()
    return group, workers


def test_a_beginning_that_others_hold_makes_no_prompt_long_for_a_worker_in_its_slow_start():
    """Or where all prompts share one that is long, a new worker would get nothing for as long as its slow start is."""
    group, workers = _one_has_just_joined(0, 4)
    held = [(10_000.0, workers["d1"].bit | workers["d2"].bit | workers["d3"].bit)]
    seen = ask(10_600.0)
    cheapest(seen, group, held, None)
    assert "d0" in {worker.uid for worker in seen.seen[0].workers}
    seen = ask(10_600.0)
    cheapest(seen, group, (), None)
    assert "d0" not in {worker.uid for worker in seen.seen[0].workers}


def test_where_others_prefill_a_decode_worker_in_its_slow_start_takes_prompts_of_any_length():
    group, _ = _one_has_just_joined(4, 4)
    seen = ask(50_000.0, by_cost=False)
    offer = cheapest(seen, group, (), None)
    assert offer is not None
    assert offer.prefill is not None
    assert (offer.decode.uid, offer.prefill.uid == "p0") == ("d0", False)


def _alike(prefill: int, decode: int, fresh: str, others: int) -> tuple[Group, dict[str, Candidate], list[tuple[float, int]]]:
    """One has just joined; of the others of its role so many hold 8,000 tokens, and have a wait of a fifth of what those take."""
    group, workers = fleet(prefill, decode)
    mine = [worker for worker in workers.values() if worker.role == workers[fresh].role]
    for worker in mine:
        worker.share = 0.05 if worker.uid == fresh else 1.0
        worker.free_at = 0.0 if worker.uid == fresh else 8_000.0 * worker.token_s / 5
        worker.heat = 4_000.0
    side = group.decode if workers[fresh] in group.decode.members else group.prefill
    side.heat, side.squares = 4_000.0 * len(mine), 4_000.0 * len(mine) * 500
    side.mark_ramping()
    mask = sum(worker.bit for worker in [worker for worker in mine if worker.uid != fresh][:others])
    return group, workers, [(8_000.0, mask)]


@pytest.mark.parametrize(("prefill", "decode", "fresh"), [(0, 5, "d0"), (5, 2, "p0"), (0, 20, "d0"), (20, 2, "p0")])
def test_where_all_prompts_begin_alike_one_of_them_is_the_first_on_a_new_worker(prefill: int, decode: int, fresh: str):
    """It finds it dearer by the beginning, as every other one would: the new worker had nothing for as long as nobody waited
    elsewhere for longer than that takes."""
    group, _, held = _alike(prefill, decode, fresh, (prefill or decode) - 1)
    offer = cheapest(ask(8_500.0, now=0.0, by_cost=False), group, held, None)
    assert offer is not None
    assert (offer.prefill or offer.decode).uid == fresh
    assert offer.missing == 8_500.0  # what is expected of it, and learnt from it, is all of it


@pytest.mark.parametrize("others", [1, 2, 3])
def test_what_only_some_hold_is_computed_by_these_and_not_by_a_new_worker(others: int):
    group, _, held = _alike(0, 7, "d0", others)
    offer = cheapest(ask(8_500.0, now=0.0), group, held, None)
    assert offer is not None
    assert offer.decode.bit & held[0][1]


def test_what_the_only_other_two_hold_may_be_one_conversation_and_stays_there():
    group, _, held = _alike(0, 3, "d0", 2)
    offer = cheapest(ask(8_500.0, now=0.0), group, held, None)
    assert offer is not None
    assert offer.decode.uid != "d0"


def test_a_worker_that_holds_more_or_less_than_most_is_in_one_step_still():
    group, workers, _ = _alike(0, 8, "d0", 7)
    bits = {uid: worker.bit for uid, worker in workers.items()}
    workers["d1"].share = 0.5
    group.decode.mark_ramping()
    most = bits["d3"] | bits["d4"] | bits["d5"] | bits["d6"]
    steps = [(9_000.0, bits["d2"]), (8_000.0, most), (500.0, bits["d0"] | bits["d7"])]
    assert group.decode.with_common(steps) == [
        (9_000.0, bits["d2"]), (8_000.0, most | bits["d0"] | bits["d1"]), (500.0, bits["d7"]),
    ]  # fmt: skip
    deeper = [(9_000.0, bits["d1"]), *steps[1:]]
    assert group.decode.with_common(deeper)[0] == deeper[0]
    assert group.decode.with_common(steps[:1]) == steps[:1]


def test_nor_is_a_new_decode_worker_dearer_by_a_beginning_that_all_others_have_got():
    group, _, held = _alike(2, 5, "d0", 4)
    for worker in group.decode.members:
        load(worker, 0 if worker.uid == "d0" else 4)
        worker.drag_s = 0.001  # what four streams lose is a twentieth of what the beginning's way takes
    offer = cheapest(ask(8_500.0, now=0.0, by_cost=False), group, held, None)
    assert offer is not None
    assert offer.prefill is not None
    assert (offer.decode.uid, offer.moved) == ("d0", 8_500.0)
