"""Prompts that workers were sent and have not computed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet_router.ask import Ask, Hints
from fleet_router.config import RouterConfig
from fleet_router.kvindex.underway import Underway, united
from fleet_router.policy.chosen import Choice
from fleet_router.policy.trip import Trip
from fleet_router.workers import WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints, Role

PROMPTS = [[1, 2, 3], [1, 2, 4], [1, 5], [6]]
MOVES = st.lists(st.tuples(st.sampled_from(range(len(PROMPTS))), st.sampled_from([64, 128]), st.sampled_from("ssof")))
CONFIG = RouterConfig(fleet="f", served_name="m")
STREAM, WHOLE = (Ask({}, b"", stream, None) for stream in (True, False))


@given(MOVES)
def test_a_key_is_known_as_long_as_some_prompt_with_it_is_on_its_way(moves: list[tuple[int, int, str]]):
    underway, there = Underway(), list[tuple[int, int]]()
    for prompt, bit, move in moves:
        if move == "s":
            assert underway.sent(PROMPTS[prompt], bit)
            there.append((prompt, bit))
        elif move == "o" and (prompt, bit) in there:
            underway.over(PROMPTS[prompt], bit)
            there.remove((prompt, bit))
        elif move == "f":
            underway.forget(bit)
            there = [one for one in there if one[1] != bit]
        known = {(key, bit) for prompt, bit in there for key in PROMPTS[prompt]}
        assert {(key, bit) for key, mask in underway.masks.items() for bit in (64, 128) if mask & bit} == known
        assert underway.keys == len(known)


def test_what_is_on_its_way_is_bounded():
    underway = Underway(most=5)
    assert underway.sent([1, 2, 3], 64)
    assert not underway.sent([4, 5, 6], 64)
    assert underway.depths([4, 5, 6], -1) == []
    underway.over([1, 2, 3], 64)
    assert underway.sent([4, 5, 6], 64)


@given(st.lists(st.tuples(st.floats(1, 9), st.integers(0, 15))))
@example([(1.0, 12), (1.0, 5), (1.0, 2)])
def test_steps_of_several_indexes_name_each_worker_once_with_the_most_that_is_known(steps: list[tuple[float, int]]):
    found = united(steps)
    for bit in (1, 2, 4, 8):
        most = [max((tokens for tokens, mask in steps if mask & bit), default=None)]
        assert [tokens for tokens, mask in found if mask & bit] == [one for one in most if one is not None]
    assert [tokens for tokens, _ in found] == sorted([tokens for tokens, _ in found], reverse=True)


def endpoint(uid: str, role: Role) -> Endpoint:
    return Endpoint(
        name=uid, uid=uid, address="127.0.0.1", http_port=1, agent_port=2, role=role, tier="t", revision="aaaaaaaa", compat="c",
    )  # fmt: skip


def test_the_next_prompt_goes_where_one_with_its_beginning_is_being_computed_though_no_event_told_of_it():
    """All workers are believed by their events alone, and these come when a block is there."""
    table = WorkerTable()
    workers = (*(endpoint(f"p{i}", "prefill") for i in range(6)), endpoint("d", "decode"))
    table.update(Endpoints(fleet="f", namespace="n", workers=workers), 0.0, CONFIG)
    hints = Hints(precise=sum(worker.bit for worker in table.workers.values()))

    def send(prompt: bytes, now: float) -> tuple[str | None, Trip]:
        found, keys = table.choose(prompt, CONFIG, now, frozenset(), hints=hints)
        assert isinstance(found, Choice)
        trip = table.depart(found, now, STREAM, "threshold", keys, True)
        assert trip is not None
        return found.prefill, trip

    for number in range(6):  # whichever worker the ring would send it to
        shared = b"%d shared " % number * 3000
        first, trip = send(shared + b"one " * 200, 10.0 * number)
        second, more = send(shared + b"two " * 200, 10.0 * number + 0.6)  # nearly done: waiting costs less than computing it all
        assert first == second
        for one in (trip, more):
            one.prefilled(10.0 * number + 1.0)
        assert not table.routing.underway.masks


def test_who_left_takes_its_notes_along_and_the_next_owner_of_its_place_has_none():
    table, workers = WorkerTable(), (endpoint("p", "prefill"), endpoint("d", "decode"))
    table.update(Endpoints(fleet="f", namespace="n", workers=workers), 0.0, CONFIG)
    found, keys = table.choose(b"long " * 3000, CONFIG, 0.0, frozenset(), hints=Hints(precise=-1))
    assert isinstance(found, Choice)
    trip = table.depart(found, 0.0, STREAM, "threshold", keys, True)
    assert table.routing.underway.masks
    table.update(Endpoints(fleet="f", namespace="n", workers=(endpoint("n", "prefill"), workers[1])), 1.0, CONFIG)
    assert not table.routing.underway.masks
    found, keys = table.choose(b"long " * 3000, CONFIG, 1.0, frozenset(), hints=Hints(precise=-1))
    assert isinstance(found, Choice)
    table.depart(found, 1.0, STREAM, "threshold", keys, True)
    noted = dict(table.routing.underway.masks)
    assert trip is not None
    trip.over(2.0)  # of the one that left
    assert table.routing.underway.masks == noted != {}


def test_a_prompt_whose_time_is_inferred_from_a_whole_answer_is_not_on_its_way_any_more():
    table = WorkerTable()
    table.update(Endpoints(fleet="f", namespace="n", workers=(endpoint("d", "decode"),)), 0.0, CONFIG)
    worker = table.workers["d"]
    for now in (0.0, 10.0):
        found, keys = table.choose(b"%d " % now * 3000, CONFIG, now, frozenset(), hints=Hints(precise=-1))
        assert isinstance(found, Choice)
        trip = table.depart(found, now, WHOLE, "cost", keys, True)
        assert trip is not None
        assert table.routing.underway.masks
        seen = worker.prefill.weight
        trip.whole(now + 2.0, 1, worker)  # one token: all of its time went to the prompt
        assert worker.prefill.weight > seen  # that way it went
        trip.over(now + 2.0)
        assert not table.routing.underway.masks


@pytest.mark.parametrize("prefills", [0, 1])
def test_where_nobody_prefills_for_others_a_prompt_is_at_its_worker_once_it_is_sent(prefills: int):
    """Known by its first byte alone, as before, the next ones with its beginning were computed anew wherever nobody waited. Where
    prefill workers are, decode workers compute what is short."""
    table = WorkerTable()
    workers = (*(endpoint(f"p{i}", "prefill") for i in range(prefills)), *(endpoint(f"d{i}", "decode") for i in range(4)))
    table.update(Endpoints(fleet="f", namespace="n", workers=workers), 0.0, CONFIG)
    found, keys = table.choose(b"shared " * 3000, CONFIG, 0.0, frozenset(), hints=Hints(local=True))
    assert isinstance(found, Choice)
    table.depart(found, 0.0, STREAM, "threshold", keys, False)
    assert bool(table.routing.index.depths(keys)) == (prefills == 0)


@pytest.mark.parametrize("won", [True, False])
def test_a_second_worker_that_is_asked_takes_no_note_away_that_is_not_its_own(won: bool):
    """Both have other prompts with this beginning on their way."""
    table = WorkerTable()
    workers = (*(endpoint(f"p{i}", "prefill") for i in range(2)), endpoint("d", "decode"))
    table.update(Endpoints(fleet="f", namespace="n", workers=workers), 0.0, CONFIG)
    underway, prefills = table.routing.underway, [table.workers[f"p{i}"] for i in range(2)]
    found, keys = table.choose(b"shared " * 3000, CONFIG, 0.0, frozenset())
    assert isinstance(found, Choice)
    trip = table.depart(found, 0.0, STREAM, "threshold", keys, True)
    assert trip is not None
    assert all(underway.sent(keys, worker.bit) for worker in prefills)
    first = table.workers[found.prefill or ""]
    trip.hedged(next(worker for worker in prefills if worker is not first), 5_000.0, 1.0)
    trip.hedge_over(2.0, won=won)
    trip.prefilled(2.0)
    trip.over(3.0)
    assert underway.masks[keys[0]] == prefills[0].bit | prefills[1].bit
