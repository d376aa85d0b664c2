"""Agents whose role is not their pod's label, told so by somebody who talks to them past the operator, under load: one has its
own again, and where all of a role say another one nobody is taken away."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from e2e.fleet import Fleet
from e2e.test_churn import load, recording, say
from e2e.test_flip import told, uids, wish
from e2e.test_traffic import single_process_answers
from e2e.traffic import read_trace

pytestmark = [pytest.mark.timeout(400)]


def tell(fleet: Fleet, role: str, count: int) -> list[str]:
    """So many decode workers take this role; their names."""
    pods = fleet.pods("decode")[:count]
    for pod in pods:
        assert httpx.post(f"http://{pod['status']['podIP']}:9000/role", json={"role": role}).status_code == 202
    return [pod["metadata"]["name"] for pod in pods]


def test_a_worker_that_took_another_role_has_its_own_again_and_no_answer_is_wrong(fleet: Fleet, tmp_path: Path):
    requests = read_trace()
    expected = single_process_answers(requests, tmp_path)
    fleet.apply(wish(fleet.namespace))
    fleet.wait_serving(1, 3)
    before = uids(fleet, "prefill") | uids(fleet, "decode")
    with recording(fleet) as recorder, load(fleet, requests) as ledger:
        time.sleep(3)
        begun = time.monotonic()
        (name,) = tell(fleet, "prefill", 1)
        fleet.wait("it is told", lambda: bool(told(fleet, "RoleMismatch")), 60)
        fleet.wait("it has its role again", lambda: bool(told(fleet, "Flipped")) and fleet.serving() == (1, 3), 60)
        took_s = time.monotonic() - begun
        fleet.wait("a load worth the name", lambda: len(ledger.tokens) >= 20, 60)
    print(json.dumps({"took_s": round(took_s, 1), "requests": len(ledger.tokens), "told": told(fleet, "RoleMismatch")}))
    assert name in told(fleet, "RoleMismatch")[0]
    assert ledger.errors == {}
    assert ledger.tokens == {number: expected.tokens[number] for number in ledger.tokens}
    assert uids(fleet, "prefill") | uids(fleet, "decode") == before
    assert recorder.outside() == []
    fleet.delete_and_leave_nothing()


def test_where_all_of_a_role_took_another_one_none_is_taken_away(fleet: Fleet, tmp_path: Path):
    requests = read_trace()
    expected = single_process_answers(requests, tmp_path)
    fleet.apply(wish(fleet.namespace))
    fleet.wait_serving(1, 3)
    before = uids(fleet, "prefill") | uids(fleet, "decode")
    with load(fleet, requests) as ledger:
        tell(fleet, "prefill", 3)
        fleet.wait("it is said", lambda: fleet.condition("WithinRatio").get("reason") == "AgentsSuspected", 60)
        say("suspected")
        time.sleep(20)
        assert fleet.condition("WithinRatio")["reason"] == "AgentsSuspected"
        assert uids(fleet, "prefill") | uids(fleet, "decode") == before
        assert fleet.serving() == (1, 3)
        count = len(ledger.tokens)
        tell(fleet, "decode", 3)
        fleet.wait("all is well", lambda: fleet.condition("WithinRatio")["reason"] == "InRatio" and fleet.serving() == (1, 3), 60)
    print(json.dumps({"requests": count}))
    assert count > 0
    assert ledger.errors == {}
    assert ledger.tokens == {number: expected.tokens[number] for number in ledger.tokens}
    assert told(fleet, "FlipFailed") == []
    assert uids(fleet, "prefill") | uids(fleet, "decode") == before
    fleet.delete_and_leave_nothing()
