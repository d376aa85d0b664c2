"""One worker as routing sees it: what it is sent, here and by other routers, what comes back, and what is known of its like."""

from __future__ import annotations

import pytest

from fleet_router.kvindex.pieces import key_chain
from fleet_router.policy.candidate import (
    CROWD_S,
    MOST_AT_ONCE,
    MOST_LATE_S,
    Candidate,
    gap_line,
    prefill_done,
    prefill_line,
    prefill_sent,
)
from fleet_router.policy.cost import Offer
from fleet_router.policy.estimate import Line
from fleet_router.policy.group import OUTPUT_MOST, Group
from fleet_router.policy.routing import Routing
from fleet_router.policy.side import WHOLE
from fleet_router.policy.trip import ADAPTERS_MOST, Trip

KEY = ("t", "c")
TOKEN_S = 1e-3
NOW = 100.0


def worker(uid: str = "a", role: str = "prefill", inflight: int = 0) -> Candidate:
    return Candidate(uid, role, KEY, inflight, base_s=0.5, token_s=TOKEN_S)


def grouped(*workers: Candidate) -> Group:
    group = Group(KEY)
    group.update([(one, 1 << number) for number, one in enumerate(workers)])
    return group


# -- what other routers say -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("free_at", "prefills", "tokens", "then", "lump"),
    [
        pytest.param(0.0, 2, 500, NOW + 0.5, 250.0, id="it was idle"),
        pytest.param(NOW + 1, 1, 500, NOW + 1.5, 500.0, id="behind what is there"),
        pytest.param(0.0, 1, 10**9, NOW + MOST_LATE_S, 3e4, id="nobody sees it done: bounded"),
        pytest.param(0.0, 2**63, 2**63, NOW + MOST_LATE_S, 3e4**2 / MOST_AT_ONCE / 3e4, id="nobody can have sent that"),
        pytest.param(NOW + 99, 1, 500, NOW + 99, 500.0, id="no later than what is known already"),
        pytest.param(0.0, 0, 500, NOW + 0.5, 500.0, id="tokens of a prefill that was told before"),
    ],
)
def test_what_others_send_waits_in_the_same_queue(free_at: float, prefills: int, tokens: int, then: float, lump: float):
    one = worker()
    side = grouped(one).prefill
    one.free_at = free_at
    one.sent_elsewhere(prefills, tokens, NOW)
    assert one.free_at == pytest.approx(then)
    taken = min(tokens, 30_000)  # what it computes in MOST_LATE_S
    assert (one.heat, side.heat) == (taken, taken)
    assert side.lump == pytest.approx(lump)
    assert one.crowd == pytest.approx(min(prefills, MOST_AT_ONCE) / 2 / CROWD_S)
    assert (one.pending, one.sent_prefills, one.sent_tokens) == (0, 0, 0.0), "it is not this router's"


@pytest.mark.parametrize("count", [1, WHOLE + 1])
def test_legs_of_others_are_part_of_what_runs_until_they_say_so_no_more(count: int):
    many = [worker(f"w{number}", inflight=number % 3) for number in range(count)]
    side = grouped(*many).prefill
    before, one = side.inflight, many[0]
    for others, here in ((5, 0), (2, 0), (2, 1), (0, 1)):
        while one.own < here:
            one.began()
        one.elsewhere(others, 0, NOW)
        assert (one.own, one.others, one.inflight) == (here, others, here + others)
        assert side.inflight == before + here + others == sum(each.inflight for each in many)
        assert side.reaches(one.inflight)
        assert not side.reaches(max(each.inflight for each in many) + 1)
    one.ended()
    assert (one.own, one.inflight, side.inflight) == (0, 0, before)
    most = max(each.inflight for each in many)
    levels = [{each.uid for each in many if each.inflight == inflight} for inflight in range(most + 1)]
    assert not side.large or [set(level) for level in side.levels] == levels


@pytest.mark.parametrize(
    ("own", "others", "free_at"),
    [(0, 0, NOW), (1, 0, NOW + 9), (0, 1, NOW + 9)],
    ids=["nothing is on its way", "one of ours is", "one of theirs is"],
)
def test_a_queue_is_empty_when_nobody_has_a_prefill_there(own: int, others: int, free_at: float):
    one = worker()
    one.pending, one.free_at = own, NOW + 9
    one.elsewhere(3, others, NOW)
    assert (one.free_at, one.others_pending) == (free_at, others)
    one.free_at = NOW - 5
    one.elsewhere(3, 0, NOW)
    assert one.free_at == NOW - 5, "it is not made later"


# -- prefills of this router ----------------------------------------------------------------------------------------------
def test_a_prefill_waits_for_those_before_it_and_is_counted():
    one = worker()
    side = grouped(one).prefill
    first, second = prefill_sent(one, 2000.0, NOW), prefill_sent(one, 1000.0, NOW + 1)
    assert (first.begins, first.due) == pytest.approx((NOW, NOW + 2.5))
    assert (second.begins, second.due) == pytest.approx((NOW + 2, NOW + 3.5))
    assert one.free_at == pytest.approx(NOW + 3)
    assert (one.pending, one.sent_prefills, one.sent_tokens) == (2, 2, 3000.0)
    assert (one.heat, side.heat, side.squares) == (3000.0, 3000.0, 5e6)
    assert one.crowd == pytest.approx(1 / CROWD_S)


def test_what_was_late_moves_those_behind_it_and_the_last_one_empties_the_queue():
    one = worker()
    first, second = prefill_sent(one, 2000.0, NOW), prefill_sent(one, 1000.0, NOW)
    assert prefill_done(first, NOW + 4.5, learn=True) == pytest.approx(4.5)
    assert (one.late_s, one.free_at, one.done_at) == pytest.approx((2.0, NOW + 5, NOW + 4.5))
    third = prefill_sent(one, 1000.0, NOW + 4.5)
    assert (third.begins + one.late_s, third.due + one.late_s) == pytest.approx((NOW + 5, one.free_at + one.base_s))
    free_at, late_s = one.free_at, one.late_s
    began = NOW + 4  # when those before it were expected to be done, as late as everything is
    assert prefill_done(second, NOW + 5, learn=True) == pytest.approx(NOW + 5 - began)
    assert one.free_at == pytest.approx(free_at + one.late_s - late_s), "the third is on its way"
    assert prefill_done(third, NOW + 5.25, learn=False) is None
    assert (one.pending, one.free_at, one.done_at) == (0, NOW + 5.25, NOW + 5)


def test_a_worker_that_froze_is_late_by_so_much_at_most_and_others_keep_its_queue():
    one = worker()
    sent = prefill_sent(one, 1000.0, NOW)
    one.elsewhere(1, 1, NOW)
    prefill_done(sent, NOW + 3600, learn=True)
    assert one.late_s == MOST_LATE_S
    assert one.free_at == pytest.approx(NOW + 1 + MOST_LATE_S), "a prefill of another router is not seen done"


def test_a_first_token_before_its_prefill_was_sent_took_no_time():
    """A clock that is read twice in one turn may be the same; nothing is learnt below nothing."""
    one = worker()
    assert prefill_done(prefill_sent(one, 10.0, NOW), NOW - 1, learn=True) == 0.0


# -- what is known of its like --------------------------------------------------------------------------------------------
def test_a_new_worker_is_believed_to_be_like_its_group():
    group, one, new = grouped(), worker("a", "decode"), worker("b", "decode")
    for _ in range(200):
        group.speed["decode"].observe(1000.0, 2.0)
        group.answered(one, 10, 4, 0.1, 1.0)
    group.adopt(new)
    common = group.speed["decode"]
    assert (new.base_s, new.token_s) == (common.base, common.slope) == (new.prefill.base, new.prefill.slope)
    assert (new.gap.base, new.gap.slope) == (group.gap.base, group.gap.slope)
    assert new.drag_s == pytest.approx(group.output.value * group.gap.slope)
    assert group.speed["prefill"].slope == prefill_line().slope, "prefill workers are others"
    assert one.gap.at(4) == pytest.approx(0.1, rel=0.1)


def test_an_answer_of_one_token_says_nothing_of_the_time_between_two():
    group, one = grouped(), worker(role="decode")
    group.answered(one, 1, 4, 9.0, 2.0)
    assert (one.gap.weight, group.gap.weight) == (0.0, 0.0)
    assert group.output.value < gap_line().at(0) + 128
    for _ in range(2000):
        group.answered(one, 10_000, 4, 0.1, 60.0)
    assert one.drag_s == pytest.approx(OUTPUT_MOST * one.gap.slope), "a stream more is not charged with more than so many tokens"
    assert group.answer.value == pytest.approx(60.0, rel=0.05)


def test_a_new_worker_owes_as_much_heat_as_the_mean():
    group = grouped(worker("a"), worker("b"), worker("c", "decode"))
    for one, heat in zip((*group.prefill.members, *group.decode.members), (30.0, 10.0, 5.0), strict=True):
        one.heat = heat
    group.update([(one, 1 << n) for n, one in enumerate((*group.prefill.members, *group.decode.members))])
    assert (group.heat_of("prefill"), group.heat_of("decode")) == (20.0, 5.0)
    assert grouped().heat_of("prefill") == 0.0


def test_time_forgets_each_worker_in_its_part_and_the_group_once():
    workers = [*(worker(f"p{n}") for n in range(3)), worker("d", "decode")]
    group = grouped(*workers)
    lines: list[Line] = [one.gap for one in workers] + [one.prefill for one in workers]
    for line in (*lines, *group.speed.values(), group.gap):
        line.observe(100.0, 1.0)
    for part in range(2):
        group.relax(0.5, part, 2)
        assert [round(line.weight, 3) for line in (*group.speed.values(), group.gap)] == [0.5, 0.5, 0.5]
        assert sum(line.weight == 0.5 for line in lines) == 4 * (part + 1)
    assert all(one.token_s == one.prefill.slope for one in workers)
    assert {one.prefill.prior_base for one in workers if one.role == "decode"} == {group.speed["decode"].base}


# -- coming and going ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fresh", ["b", "a"], ids=["another one", "the same uid once more"])
def test_who_comes_after_one_that_left_holds_nothing_of_its(fresh: str):
    """They have the same bit: a prompt would be sent for KV that is not there."""
    routing, keys = Routing(), key_chain(b"long " * 500)
    stays, gone, new = worker("s", "decode"), worker("a", "decode"), worker(fresh, "decode")
    routing.update([stays, gone], NOW, 0.0)
    gone_bit = routing.bits.of("a")
    routing.index.add(keys, "a")
    routing.underway.sent(keys, gone_bit)
    assert (routing.known(keys, 2500, 600.0), routing.coming(keys, 2500, 600.0, -1)) == ([(600.0, gone_bit)],) * 2
    routing.update([stays, new], NOW, 0.0)
    assert routing.bits.of(fresh) == gone_bit
    assert (routing.known(keys, 2500, 600.0), routing.coming(keys, 2500, 600.0, -1)) == ([], [])
    assert (len(routing.index), routing.underway.keys) == (0, 0)


def test_of_many_adapters_a_worker_is_taken_to_have_those_that_it_was_asked_for_last():
    decode = worker("d", "decode")
    group = grouped(worker("p"), decode)
    offer = Offer(0, None, decode, 10, 10, "", 0)
    for number in [*range(ADAPTERS_MOST), 0, ADAPTERS_MOST]:
        Trip(group, offer, NOW, stream=True, adapter=f"a{number}").over(NOW)
    assert list(decode.adapters) == [*(f"a{number}" for number in range(2, ADAPTERS_MOST)), "a0", f"a{ADAPTERS_MOST}"]
