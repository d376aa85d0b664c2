"""What is believed of workers of which nothing was seen: what was seen of those that are like them."""

from __future__ import annotations

import pytest

from fleet_router.policy.candidate import Candidate
from fleet_router.policy.cost import Offer, cheapest
from fleet_router.policy.trip import Trip
from tests.fleet_router.policy.test_cost import ask, fleet


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole answers"])
def test_decode_workers_of_which_nothing_is_learnt_are_no_faster_than_the_others(stream: bool):
    """Of answers that come as a whole no first token is seen. Prefill workers were learnt to need seconds, the decode worker went
    on as it was guessed to be: with `decide: cost` all of a burst waited for it, and the prefill worker stood still."""
    group, workers = fleet(1, 1)
    for second in range(60):
        for uid in ("p0", "d0"):
            prefill = workers["p0"] if uid == "p0" else None
            trip = Trip(group, Offer(0, prefill, workers["d0"], 2000, 2000, "", 0), float(second), stream=stream)
            if prefill is not None:
                trip.prefilled(second + 2.0)
            trip.first_token(second + 2.05 if prefill is not None else second + 2.0)
            trip.over(second + 2.1)
        if second % 10 == 9:
            group.relax(0.9, 0, 1)
    assert workers["d0"].token_s == pytest.approx(workers["p0"].token_s, rel=0.5)
    taken = []
    for _ in range(6):
        offer = cheapest(ask(2000.0, now=1000.0, by_cost=True), group, (), None)
        assert offer is not None
        taken.append(offer.prefill.uid if offer.prefill else "d0")
        Trip(group, offer, 1000.0, stream=stream)
    assert sorted(taken) == ["d0"] * 3 + ["p0"] * 3


def test_what_was_learnt_of_decode_workers_is_not_what_others_need():
    group, workers = fleet(1, 1)
    for _ in range(50):
        group.speed["decode"].observe(1000, 0.02)
        group.speed["prefill"].observe(1000, 2.0)
    for _ in range(10):
        group.relax(0.9, 0, 1)
    assert workers["d0"].prefill.at(1000) == pytest.approx(0.02, rel=0.5)
    assert workers["p0"].prefill.at(1000) == pytest.approx(2.0, rel=0.5)


def test_a_new_decode_worker_is_believed_to_slow_its_streams_down_as_the_others_do():
    group, workers = fleet(0, 1)
    for step in range(100):
        group.spaced(workers["d0"], step % 20 + 1, 0.02 + 0.01 * (step % 20 + 1))
    new = Candidate("d1", "decode", ("t", "c"), 0)
    group.adopt(new)
    for worker in (workers["d0"], new):
        assert worker.gap.at(10) == pytest.approx(0.12, rel=0.1)
        assert worker.drag_s == pytest.approx(group.output.value * 0.01, rel=0.1)
