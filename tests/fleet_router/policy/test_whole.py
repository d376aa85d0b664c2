"""What is learnt of answers that come as a whole (`decide: cost`): their time is that of a prompt and of tokens together."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.bench.decision import COST, PREFILLS, World, arrivals
from e2e.bench.decision_engine import PREFILL_TOKENS_PER_S, STEP_S
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.cost import Offer, cheapest
from fleet_router.policy.estimate import Line
from fleet_router.policy.group import Group
from fleet_router.policy.trip import Trip
from tests.fleet_router.policy.test_cost import ask, fleet, load

PROMPT = 2_000.0
NOW = 100.0


def weights(group: Group, worker: Candidate) -> tuple[float, float, float]:
    """How much was learnt of (time between tokens, prefill, pairs)."""
    return worker.gap.weight, worker.prefill.weight, group.pairs.common.weight


def knows(line: Line, x: float, y: float) -> None:
    for _ in range(20):
        line.observe(x, y)


@pytest.mark.parametrize(
    ("remote", "tokens", "took_s", "known", "learnt"),
    [
        pytest.param(False, 1, 0.5, "", (False, True, False), id="one token: its time is the prompt's"),
        pytest.param(True, 1, 0.5, "", (False, False, True), id="or the KV's"),
        pytest.param(True, 201, 4.0, "", (True, False, False), id="many tokens, the KV's way is little"),
        pytest.param(True, 201, 1.0, "", (False, False, False), id="the KV may have taken much of it, for all that is known"),
        pytest.param(True, 8, 4.0, "", (False, False, False), id="too few tokens to be sure of"),
        pytest.param(False, 8, 0.5, "", (False, False, False), id="a prompt and tokens, and nothing is known of either"),
        pytest.param(False, 201, 4.0, "", (False, False, False), id="a prompt of which nothing is known may be slow"),
        pytest.param(False, 201, 40.0, "", (True, False, False), id="and not so slow"),
        pytest.param(False, 201, 4.0, "prefill", (True, False, False), id="a prompt that is known"),
        pytest.param(False, 8, 2.0, "gap", (False, True, False), id="few tokens whose time is known"),
        pytest.param(False, 8, 0.25, "gap", (False, False, False), id="they took most of it"),
        pytest.param(False, 0, 4.0, "", (False, False, False), id="it does not tell how many"),
        pytest.param(False, 1, 0.0, "", (False, False, False), id="a clock that stood"),
        pytest.param(False, 1, -4.0, "", (False, False, False), id="a clock that went back"),
        pytest.param(False, 5_001, 0.48, "prefill", (False, False, False), id="it cannot have written that just now"),
        pytest.param(True, 10**9, 4.0, "", (False, False, False), id="a lie"),
        pytest.param(False, 1, 4.0, "full", (False, False, False), id="it may have waited for a slot"),
        pytest.param(False, 1, 4.0, "other", (False, False, False), id="another worker answered"),
    ],
)
def test_only_what_can_be_told_apart_is_learnt(
    remote: bool, tokens: int, took_s: float, known: str, learnt: tuple[bool, bool, bool]
):
    group, workers = fleet(1, 2, slots=1)
    worker = workers["d0"]
    if known == "gap":
        knows(worker.gap, 1.0, 0.02)
    elif known == "prefill":
        knows(worker.prefill, PROMPT, 0.1)
    if known != "full":
        worker.slots = 8
    load(worker, 1)
    offer = Offer(0, workers["p0"] if remote else None, worker, PROMPT, PROMPT if remote else 0.0, "", 0)
    trip = Trip(group, offer, NOW, stream=False, learns_whole=True)
    sent_at = NOW
    if remote:
        sent_at = NOW + 0.3
        trip.prefilled(sent_at)
        assert workers["p0"].prefill.weight > 0
    before = weights(group, worker)
    trip.first_token(sent_at + took_s)
    trip.whole(sent_at + took_s, tokens, workers["d1"] if known == "other" else worker)
    trip.over(sent_at + took_s)
    assert tuple(now > then for now, then in zip(weights(group, worker), before, strict=True)) == learnt
    assert worker.pending == 0


def test_how_long_answers_are_is_always_learnt():
    group, workers = fleet(1, 1)
    for second in range(200):
        trip = Trip(group, Offer(0, None, workers["d0"], PROMPT, 0.0, "", 0), float(second), stream=False, learns_whole=True)
        trip.whole(second + 0.4, 20, workers["d0"])
        trip.over(second + 0.4)
    assert group.output.value == pytest.approx(20, rel=0.05)
    assert group.answer.value == pytest.approx(0.4, rel=0.1)


def test_two_that_have_moved_kv_once_need_no_other_handshake():
    group, workers = fleet(1, 1)
    group.pairs.forget("d0")
    offer = Offer(0, workers["p0"], workers["d0"], PROMPT, PROMPT, "", 0)
    before = group.pairs.cost_s("p0", "d0", PROMPT)
    trip = Trip(group, offer, NOW, stream=False, learns_whole=True)
    trip.prefilled(NOW + 0.1)
    trip.whole(NOW + 0.4, 8, workers["d0"])
    assert group.pairs.cost_s("p0", "d0", PROMPT) == pytest.approx(before - group.pairs.handshake.value)


class Serial:
    """An engine that computes prompts one after the other; tokens take `gap_s` each."""

    def __init__(self, group: Group, worker: Candidate, prompt_s: float, gap_s: float) -> None:
        self.group, self.worker, self.prompt_s, self.gap_s = group, worker, prompt_s, gap_s

    def burst(self, lengths: list[int], now: float) -> float:
        """All at once; when the last one is whole."""
        offers = [Offer(0, None, self.worker, PROMPT, 0.0, "", 0) for _ in lengths]
        trips = [Trip(self.group, offer, now, stream=False, learns_whole=True) for offer in offers]
        ends = [now + (i + 1) * self.prompt_s + (n - 1) * self.gap_s for i, n in enumerate(lengths)]
        for i in sorted(range(len(lengths)), key=ends.__getitem__):
            trips[i].first_token(ends[i])
            trips[i].whole(ends[i], lengths[i], self.worker)
            trips[i].over(ends[i])
        return max(ends)


@pytest.mark.parametrize("tokens", [2, 8, 16])
def test_bursts_of_whole_answers_spread_once_prompts_were_seen_to_wait(tokens: int):
    """They were believed to be 40 times as fast, and all of a burst waited for the decode worker."""
    group, workers = fleet(1, 1)
    engine, now = Serial(group, workers["d0"], prompt_s=0.6, gap_s=0.03), 0.0
    for _ in range(3):
        now = engine.burst([tokens] * 4, now) + 1.0
    assert workers["d0"].prefill.at(PROMPT) == pytest.approx(0.6, rel=0.25)
    taken = []
    for _ in range(4):
        offer = cheapest(ask(PROMPT, now=now, by_cost=True), group, (), None)
        assert offer is not None
        taken.append(offer.prefill.uid if offer.prefill else "d0")
        Trip(group, offer, now, stream=False, learns_whole=True)
    assert set(taken) == {"d0", "p0"}, taken


@given(
    st.floats(0.001, 2.0), st.floats(0.001, 0.2), st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=6), max_size=8)
)  # fmt: skip
def test_no_prompt_is_believed_to_be_slower_than_it_was(prompt_s: float, gap_s: float, bursts: list[list[int]]):
    """Of a worker whose tokens were not seen by themselves: what is inferred of its prompts is no more than they took."""
    group, workers = fleet(1, 1)
    worker, now = workers["d0"], 0.0
    engine, guessed_s = Serial(group, worker, prompt_s, gap_s), worker.prefill.at(PROMPT)
    for lengths in bursts:
        now = engine.burst(lengths, now) + 1.0
        if worker.gap.weight:
            return  # from here on it is an estimate
        assert worker.prefill.at(PROMPT) <= max(prompt_s, guessed_s) * 1.001
        assert worker.pending == 0


@given(st.floats(0.001, 2.0), st.floats(0.001, 0.2), st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_one_after_the_other_nothing_wrong_is_learnt_of_either(prompt_s: float, gap_s: float, lengths: list[int]):
    """Tokens: no more than a quarter above what they took, where the guess is not off by more than its doubt."""
    group, workers = fleet(1, 1)
    worker, now = workers["d0"], 0.0
    engine, guessed_s, guessed_gap_s = Serial(group, worker, prompt_s, gap_s), worker.prefill.at(PROMPT), worker.gap.at(0)
    for tokens in lengths:
        now = engine.burst([tokens], now) + 1.0
    assert worker.prefill.at(PROMPT) <= max(prompt_s, guessed_s) * 1.34
    if prompt_s <= 10 * guessed_s:
        assert min(gap_s, guessed_gap_s) * 0.74 <= worker.gap.at(0) <= max(gap_s, guessed_gap_s) * 1.34


def test_without_being_asked_to_nothing_is_learnt_of_them():
    group, workers = fleet(1, 1)
    for first, second in pairwise(range(0, 20, 2)):
        trip = Trip(group, Offer(0, None, workers["d0"], PROMPT, 0.0, "", 0), float(first), stream=False)
        assert not trip.learns_whole
        trip.first_token(float(second))
        trip.over(float(second))
    assert weights(group, workers["d0"])[:2] == (0.0, 0.0)
    assert not Trip(group, Offer(0, None, workers["d0"], 1, 0, "", 0), 0, stream=True, learns_whole=True).learns_whole


def test_a_mix_of_whole_answers_teaches_what_streams_teach():
    """Engines of `bench-decision`, where prompts of 30,000 tokens and of 50 meet: what is learnt of decode workers is no further
    from what these do than what streams tell."""
    learnt = {}
    for stream in (True, False):
        world = World(COST, 1, stream=stream)
        world.run([one for one in arrivals("both", 1) if one.at < 90])
        decodes, group = world.workers[PREFILLS:], world.routing.groups["t", "c"]
        prompt_s = median(worker.prefill.at(PROMPT) for worker in decodes)
        assert prompt_s == pytest.approx(PROMPT / PREFILL_TOKENS_PER_S + 2 * STEP_S, rel=0.5)
        learnt[stream] = (median(worker.gap.at(8) for worker in decodes), group.output.value)
    assert learnt[False] == pytest.approx(learnt[True], rel=0.1), learnt


def test_a_worker_that_says_what_cannot_be_moves_no_estimate():
    group, workers = fleet(1, 2)
    before = (group.output.value, group.answer.value, group.pace_s, group.gap.at(8), workers["d0"].drag_s)
    for i in range(300):
        trip = Trip(group, Offer(0, None, workers["d0"], PROMPT, 0.0, "", 0), float(i), stream=False, learns_whole=True)
        trip.whole(i + 0.5, 10**9, workers["d0"])
        trip.over(i + 0.5)
    assert (group.output.value, group.answer.value, group.pace_s, group.gap.at(8), workers["d0"].drag_s) == before
