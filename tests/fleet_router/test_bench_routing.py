"""The routing benchmark's own parts: its traces, its engines, its figures."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Callable

import pytest

from e2e.bench.routing import Run, figures, greedy
from e2e.bench.routing_client import Landed, Seen
from e2e.bench.routing_scale_out import Case, split
from e2e.bench.routing_trace import (
    BLOCK_CHARS,
    Arrival,
    begun_alike,
    chats,
    conversation,
    faster,
    repeated_share,
    synthetic,
    together,
    window,
)
from e2e.bench.routing_worker import (
    CACHE_BLOCKS,
    PREFILL_BASE_S,
    PREFILL_TOKENS_PER_S,
    PULL_BASE_S,
    PULL_S_PER_TOKEN,
    STEP_PER_STREAM_S,
    STEP_S,
    Cache,
    Engine,
    Job,
    keys_of,
)


class Time:
    """Virtual."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._number), what))

    def run(self) -> None:
        while self._due:
            self.now, _, what = heapq.heappop(self._due)
            what()


@pytest.mark.parametrize(
    ("made", "requests", "mean", "share"), [(conversation, 3100, 11_635, 0.30), (synthetic, 3100, 15_300, 0.66)]
)
def test_traces_have_the_published_shape(made: Callable[[int], list[Arrival]], requests: int, mean: int, share: float):
    trace = made(0)
    assert len(trace) == pytest.approx(requests, rel=0.05)
    assert statistics.mean(one.tokens for one in trace) == pytest.approx(mean, rel=0.05)
    assert repeated_share(trace) == pytest.approx(share, abs=0.03)
    assert made(0) == trace != made(1)
    assert [one.at_s for one in trace] == sorted(one.at_s for one in trace)
    assert faster(trace, 8)[-1].at_s == trace[-1].at_s / 8


@pytest.mark.parametrize("made", [conversation, synthetic])
def test_eight_communities_send_eight_times_as_much_and_share_nothing(made: Callable[[int], list[Arrival]]):
    one, eight = together(made, 3, 1), together(made, 3, 8)
    assert one == made(3)
    assert len(eight) == pytest.approx(8 * len(one), rel=0.05)
    assert repeated_share(eight) == pytest.approx(repeated_share(one), abs=0.03)
    assert [arrival.at_s for arrival in eight] == sorted(arrival.at_s for arrival in eight)
    assert eight[-1].at_s < one[-1].at_s + 65


def test_equal_blocks_are_equal_text_and_others_differ_from_the_first_characters_on():
    one, other = Arrival(0, 1500, 1, (1, 2, 3)), Arrival(0, 1200, 1, (1, 2, 4))
    assert len(one.prompt) == 1500 * 4
    assert one.prompt[: 2 * BLOCK_CHARS] == other.prompt[: 2 * BLOCK_CHARS]
    assert one.prompt[2 * BLOCK_CHARS :][:16] != other.prompt[2 * BLOCK_CHARS :][:16]
    assert keys_of(one.prompt)[:2] == keys_of(other.prompt)
    assert len(keys_of(one.prompt)) == 2  # the third block is not whole


def test_a_cache_forgets_what_was_used_least_lately_and_the_end_of_a_prompt_first():
    cache = Cache(4)
    cache.store([1, 2, 3])
    cache.store([7, 8])
    assert (cache.hit([1, 2, 3]), cache.hit([7, 8])) == (2, 2)
    cache.store([1, 2])
    cache.store([9])
    assert (cache.hit([1, 2]), cache.hit([7, 8]), cache.hit([9])) == (2, 1, 1)


def test_an_engine_prefills_in_order_and_only_what_it_does_not_hold():
    time, wrote = Time(), list[tuple[str, float, int, bool]]()
    engine = Engine(time.at, lambda: time.now)

    def job(name: str, keys: list[int], output: int) -> Job:
        return Job(keys, 1024, output, lambda late, last: wrote.append((name, time.now, late, last)))

    engine.submit(job("a", [1, 2], 1))
    engine.submit(job("b", [1, 2], 400))
    time.run()
    first = PREFILL_BASE_S + 1024 / PREFILL_TOKENS_PER_S
    second = first + PREFILL_BASE_S + 1 / PREFILL_TOKENS_PER_S  # all cached: the last token is computed for its logits
    firsts = {name: at for name, at, _, _ in reversed(wrote)}
    assert firsts == {"a": pytest.approx(first), "b": pytest.approx(second)}
    assert [late for _, _, late, _ in wrote] == [0] * len(wrote)
    assert [(name, last) for name, _, _, last in wrote if last] == [("a", True), ("b", True)]
    ended = {name: at for name, at, _, last in wrote if last}["b"]
    assert ended - second == pytest.approx(400 * (STEP_S + STEP_PER_STREAM_S), rel=1e-3)
    assert (engine.requests, engine.computed_tokens, engine.streams) == (2, 1025, 0)


def test_lateness_of_timers_is_told_and_does_not_add_up():
    time, late = Time(), list[int]()
    engine = Engine(lambda when, what: time.at(when + 0.25, what), lambda: time.now)
    for _ in range(3):
        engine.submit(Job([], 512, 1, lambda us, last: late.append(us)))
    time.run()
    assert late == pytest.approx([250_000] * len(late), abs=1)
    assert engine.free_at == pytest.approx(3 * (PREFILL_BASE_S + 512 / PREFILL_TOKENS_PER_S))


def test_a_cache_is_no_larger_than_it_says():
    cache = Cache(CACHE_BLOCKS)
    cache.store(list(range(CACHE_BLOCKS + 10)))
    assert cache.hit(list(range(CACHE_BLOCKS + 10))) == CACHE_BLOCKS


def test_ratios_are_against_the_best_peer_of_each_figure():
    def runs(*means: float) -> list[Run]:
        return [Run(Seen(ttft_s=[mean] * 99 + [mean * 10], lag_s=[mean / 2]), 0.5, 1.2, 1.1, 100.0, 100) for mean in means]

    found = figures({"ours": runs(1.0, 2.0), "a": runs(2.0, 2.0), "b": runs(4.0, 4.0)})
    assert (found["best_peer"], found["ttft_mean_vs_best_peer"], found["errors"]) == ("a", 0.75, 0)
    assert found["disturbed"] == ["ours", "a", "b"]
    assert figures({"ours": runs(1.0)})["ttft_mean_vs_best_peer"] == 1.0


def test_least_work_first_is_the_yardstick_of_the_load():
    assert greedy([5, 5, 5, 5], 2) == 1.0
    assert greedy([1, 1, 10], 2) == 11 / 6  # the largest comes last: who cannot see it coming has spread the others evenly
    assert greedy([10, 1, 1], 2) == 10 / 6


def test_requests_are_told_apart_by_where_and_when_they_landed():
    places = [(5.0, 0), (20.0, 1), (41.0, 2), (41.0, 64), (90.0, 71), (101.0, 64)]
    landed = [Landed(due_s, 1, worker) for due_s, worker in places]
    found = split([Seen(ttft_s=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], landed=landed)], range(64, 72), 64, "decode")
    assert ([one for one, _ in found.joined], [one for one, _ in found.steady]) == ([4.0, 5.0], [2.0])
    assert found.shares == [0.5 * 9, 0.0, 9.0]  # of two requests one, of none none, the only one
    assert not split([Seen(ttft_s=[1.0] * 6, landed=landed)], range(64, 72), 64, "prefill").joined


def test_a_fleet_with_prefill_workers_has_two_sides_that_join_and_as_much_for_each_who_prefills():
    case = Case((16, 2), (8, 1), beginning=1024)
    assert case.joining() == {"prefill": range(8, 9), "decode": range(25, 27)}
    assert (case.serving("prefill"), case.serving("decode")) == (8, 16)
    assert Case((16, 2)).joining() == {"decode": range(16, 18)}
    one, other = case.requests("synthetic", 0), case.requests("synthetic", 1)
    assert 3 < len(one) / 100 < 5
    assert one[0].at_s < 2
    assert 98 < one[-1].at_s < 100
    assert {arrival.blocks[:2] for arrival in one} == {(-2, -1)} == {arrival.blocks[:2] for arrival in other}
    assert [arrival.tokens for arrival in one] == [a.tokens + 1024 for a in window(synthetic(0), 100, 0)]
    assert window(synthetic(0), 100, 1)[0].blocks != window(synthetic(0), 100, 0)[0].blocks


def test_chats_are_short_and_share_nothing():
    trace = chats(0)
    assert statistics.mean(arrival.tokens for arrival in trace) == pytest.approx(680, rel=0.1)
    assert len(trace) == pytest.approx(3_600, rel=0.1)
    assert repeated_share(trace) == 0
    assert repeated_share(begun_alike(trace, 8_192)) > 0.85


def test_an_engine_hands_over_without_decoding_and_pulls_what_it_does_not_hold():
    time, wrote = Time(), list[tuple[float, int, bool]]()
    engine = Engine(time.at, lambda: time.now)
    leg = Job([1, 2], 1024, 400, lambda late, last: wrote.append((time.now, late, last)), hands_over=True)
    engine.submit(leg)
    time.run()
    assert wrote == [(pytest.approx(PREFILL_BASE_S + 1024 / PREFILL_TOKENS_PER_S), 0, True)]
    assert (engine.streams, leg.computed, leg.waited_s) == (0, 1024, 0.0)
    wrote.clear()
    other, began = Engine(time.at, lambda: time.now), time.now
    for _ in range(2):
        other.pull(Job([1, 2], 1025, 1, lambda late, last: wrote.append((time.now, late, last))), 1_000)
        time.run()
    step_s = PULL_BASE_S + STEP_S - 0.001  # the prefill leg was told so late
    assert wrote[0][0] - began == pytest.approx(step_s + 1025 * PULL_S_PER_TOKEN)
    assert wrote[2][0] - wrote[1][0] == pytest.approx(step_s + PULL_S_PER_TOKEN)
    assert (other.computed_tokens, other.requests, other.streams) == (0, 2, 0)
