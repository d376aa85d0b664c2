"""The worker's life: probes per phase, and when a drain is over."""

from __future__ import annotations

import pytest

from fleet_worker.agent import life as rules
from fleet_worker.agent.life import Life, Load, Pace, drain_done


def serving() -> Life:
    return rules.engine_checked(rules.engine_started(Life(), 42), healthy=True, now=1.0)


@pytest.mark.parametrize(
    ("life", "live", "started", "ready"),
    [
        pytest.param(Life(), True, False, False, id="preparing"),
        pytest.param(rules.engine_started(Life(), 42), True, False, False, id="warming"),
        pytest.param(serving(), True, True, True, id="serving"),
        pytest.param(rules.drain_asked(serving(), 2.0), True, True, False, id="draining"),
        pytest.param(rules.failed(serving(), "gone"), False, False, False, id="failed"),
    ],
)
def test_probes_follow_the_phase(life: Life, live: bool, started: bool, ready: bool):
    assert (rules.is_live(life, 3.0), rules.is_started(life), rules.is_ready(life)) == (live, started, ready)


def test_a_silent_engine_loses_readiness_at_once_and_liveness_after_the_bound():
    silent = rules.engine_checked(rules.engine_checked(serving(), False, now=10.0), False, now=15.0)
    assert not rules.is_ready(silent)
    assert rules.is_live(silent, 10.0 + rules.ENGINE_SILENCE_S - 0.1)
    assert not rules.is_live(silent, 10.0 + rules.ENGINE_SILENCE_S)
    answers = rules.engine_checked(silent, True, now=16.0)
    assert rules.is_ready(answers)
    again = rules.engine_checked(answers, False, now=30.0)
    assert rules.is_live(again, 30.0 + rules.ENGINE_SILENCE_S - 0.1), "each silence has its own time"


def test_a_slow_start_is_not_a_dead_engine():
    warming = rules.engine_checked(rules.engine_started(Life(), 1), False, now=0.0)
    assert rules.is_live(warming, 1_000.0)


def anew() -> Life:
    """Its engine is started once more at 100.0, for another role."""
    return rules.engine_started(rules.engine_anew(rules.flip_asked(serving()), 100.0), 43)


def test_an_engine_that_starts_for_another_role_keeps_the_change():
    assert (anew().phase, anew().engine_pid) == ("FlippingRole", 43)
    assert not rules.is_ready(rules.engine_checked(anew(), True, 101.0)), "it has not proved a token yet"


def test_an_engine_that_starts_for_another_role_may_be_silent_for_its_start_alone():
    begins = 100.0 + rules.ENGINE_START_S
    assert rules.engine_checked(anew(), False, begins - 0.1).unhealthy_since is None
    late = rules.engine_checked(anew(), False, begins)
    assert not rules.is_live(late, begins + rules.ENGINE_SILENCE_S)


def test_after_a_change_that_failed_silence_is_a_fault_again():
    """Else a pod whose engine is gone stayed, not ready, until the half hour of its start was over."""
    silent = rules.engine_checked(rules.flip_failed(anew(), "its engine ended"), False, 200.0)
    assert not rules.is_live(silent, 200.0 + rules.ENGINE_SILENCE_S)


def test_a_drain_that_came_meanwhile_is_not_undone_by_a_new_role():
    draining = rules.drain_asked(anew(), 150.0)
    assert (rules.flipped(draining), rules.returned(draining)) == (draining, draining)
    assert rules.engine_started(draining, 44).phase == "Draining"


def test_drain_is_not_undone_by_a_healthy_engine_and_begins_once():
    draining = rules.drain_asked(serving(), 5.0)
    assert rules.drain_asked(draining, 9.0).draining_since == 5.0
    assert not rules.is_ready(rules.engine_checked(draining, True, now=10.0))


def test_with_an_engine_that_is_gone_there_is_nothing_to_drain():
    """The preStop hook came between the engine's death and the agent's: it waited for a dead engine until its time was up."""
    gone = rules.failed(serving(), "engine ended: killed by SIGKILL")
    assert rules.drain_asked(gone, 5.0) == gone


@pytest.mark.parametrize(
    ("load", "idle_for_s", "counter", "prefill", "done"),
    [
        pytest.param(Load(0, 0, 0), 0.0, True, True, True, id="nothing-left"),
        pytest.param(Load(0, 0, 2), 0.0, True, True, False, id="unread-leases"),
        pytest.param(Load(1, 0, 0), 0.0, True, False, False, id="a-stream"),
        pytest.param(Load(0, 3, 0), 0.0, True, False, False, id="a-queue"),
        pytest.param(Load(None, None, None), 99.0, True, True, False, id="no-answer-is-not-zero"),
        pytest.param(Load(0, 0, None), 99.0, True, True, False, id="no-lease-count-is-not-zero"),
        pytest.param(Load(0, 0, None), 29.0, False, True, False, id="vllm-prefill-inside-one-lease"),
        pytest.param(Load(0, 0, None), 30.0, False, True, True, id="vllm-prefill-after-one-lease"),
        # its lease was extended by the decode worker at which the request waits: prefill went, and the request failed there
        pytest.param(Load(0, 0, None, 9, 0.01), 99.0, False, True, False, id="vllm-prefill-whose-kv-waits-for-a-busy-decode"),
        pytest.param(Load(0, 0, None, 9, 0.0), 30.0, False, True, True, id="vllm-prefill-all-read"),
        pytest.param(Load(0, 0, None, 9, 0.0), 29.0, False, True, False, id="vllm-prefill-gauge-may-be-late"),
        pytest.param(Load(0, 0, None), 0.0, False, False, True, id="vllm-decode-holds-no-lease"),
        # vLLM's gauges are of its last step: a request whose first step lasted longer than the notice was cut
        pytest.param(Load(0, 0, None, open=1), 119.0, False, False, False, id="vllm-in-a-long-first-step"),
        pytest.param(Load(0, 0, None, open=1), 120.0, False, False, True, id="vllm-lost-count-of-who-left"),
        pytest.param(Load(0, 0, None, open=-1), 0.0, False, False, True, id="vllm-counted-one-twice"),
    ],
)
def test_drain_is_over_when(load: Load, idle_for_s: float, counter: bool, prefill: bool, done: bool):
    more = {"idle_for_s": idle_for_s, "lease_s": 30.0, "has_lease_counter": counter, "is_prefill": prefill}
    assert drain_done(load, waited_s=2.0, **more) is done
    assert not drain_done(load, waited_s=1.9, **more)  # routers may not have heard yet


@pytest.mark.parametrize(
    ("looks", "stuck"),
    [
        pytest.param([(1, 1, (5.0, 0.1)), (1, 1, (5.0, 0.1))], True, id="nothing-moves"),
        pytest.param([(1, 1, (5.0, 0.1)), (1, 1, (6.0, 0.1))], False, id="a-token"),
        pytest.param([(1, 1, (5.0, 0.1)), (1, 1, (5.0, 0.2))], False, id="a-part-of-a-long-prefill"),
        pytest.param([(0, 0, (5.0, 0.1)), (0, 0, (5.0, 0.1))], False, id="nothing-runs"),
        pytest.param([(0, 0, (5.0, 0.1)), (1, 1, (5.0, 0.1))], True, id="still-since-before-it-came"),
        pytest.param([(1, 0, (5.0, 0.1)), (1, 0, (5.0, 0.1))], False, id="all-aborted-and-the-gauge-stays"),
        pytest.param([(1, None, (5.0, 0.1)), (1, None, (5.0, 0.1))], False, id="several-servers-of-which-none-knows"),
        pytest.param([(1, 1, None), (1, 1, None)], False, id="an-engine-that-does-not-say"),
        pytest.param([(None, None, None), (None, None, None)], False, id="no-answer"),
        pytest.param([(1, 1, (5.0, 0.1)), (None, None, None)], False, id="no-answer-any-more"),
    ],
)
def test_an_engine_is_stuck_when_requests_run_and_nothing_moves(
    looks: list[tuple[int | None, int | None, tuple[float, ...] | None]], stuck: bool
):
    pace = Pace()
    for now, (running, opened, moved) in enumerate(looks):
        pace = rules.paced(pace, Load(running, running, None, moved=moved, open=opened), float(now))
    assert rules.is_stuck(pace, 300.0, 300.0) is stuck
    assert not rules.is_stuck(pace, 299.0, 300.0)
    assert not rules.is_stuck(rules.paced(pace, Load(1, 0, None, moved=(9.0,), open=1), 400.0), 699.0, 300.0), "it moves again"
