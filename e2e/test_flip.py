"""Workers that change their role instead of being started: under load, with every token right and the ratio in every document,
and as the repair of a lost prefill worker, before the cold start of the same moment is over."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from e2e.fleet import Fleet, manifest, worker_processes
from e2e.test_churn import load, recording, say
from e2e.test_traffic import single_process_answers
from e2e.traffic import read_trace
from fleet_cli.up.bundled import tiny_model

OUTPUT_TOKENS = 64

pytestmark = [pytest.mark.timeout(400)]


def wish(namespace: str) -> dict[str, Any]:
    """One prefill and three decode workers on four devices, never more."""
    made = manifest(namespace, tiny_model())
    spec, tier = made["spec"], made["spec"]["tiers"][0]
    tier["ratio"] = {"prefill": 1, "decode": 3, "min": "1:3", "max": "1:1"}
    spec["scaling"] = {"mode": "manual", "budget": {"gpus": 4}}
    spec["limits"] = {"maxOutputTokens": OUTPUT_TOKENS}
    spec["rollout"] = {"drainTimeout": "6s"}
    return made


def uids(fleet: Fleet, role: str) -> set[str]:
    """Workers of a role by their labels, those that leave excepted."""
    return {pod["metadata"]["uid"] for pod in fleet.pods(role) if "deletionTimestamp" not in pod["metadata"]}


def told(fleet: Fleet, reason: str) -> list[str]:
    """Notes of the fleet's events with this reason."""
    events = fleet.objects("events.events.k8s.io")
    return [event["note"] for event in events if event["reason"] == reason]


def test_a_tier_of_a_fixed_size_gets_its_second_prefill_worker_by_a_flip_under_load(fleet: Fleet, tmp_path: Path):
    requests = read_trace()
    expected = single_process_answers(requests, tmp_path)
    fleet.apply(wish(fleet.namespace))
    fleet.wait_serving(1, 3)
    before = uids(fleet, "prefill") | uids(fleet, "decode")
    with recording(fleet) as recorder, load(fleet, requests) as ledger:
        time.sleep(5)  # the load must be seen by telemetry
        say("scaling")
        begun = time.monotonic()
        pool = next(pool for pool in fleet.objects("workerpools") if pool["spec"]["role"] == "prefill")["metadata"]["name"]
        fleet.kubectl("scale", "workerpool", pool, "--replicas=2")
        fleet.wait("two prefill and two decode workers", lambda: fleet.serving() == (2, 2), 60)
        took_s = time.monotonic() - begun
        say("flipped")
        time.sleep(5)  # and serves
        fleet.wait("a load worth the name", lambda: len(ledger.tokens) >= 20, 60)
    print(json.dumps({"took_s": round(took_s, 1), "requests": len(ledger.tokens), "told": told(fleet, "Flipped")}))
    assert ledger.errors == {}
    assert ledger.tokens == {number: expected.tokens[number] for number in ledger.tokens}
    assert (len(uids(fleet, "prefill")), len(uids(fleet, "decode"))) == (2, 2)
    assert uids(fleet, "prefill") | uids(fleet, "decode") == before, "no pod was started"
    assert len(told(fleet, "Flipped")) == 1
    assert "after a KV transfer" in told(fleet, "Flipped")[0]
    assert told(fleet, "FlipFailed") == []
    assert recorder.outside() == []
    flipped = next(pod for pod in fleet.pods("prefill") if "-decode-" in pod["metadata"]["name"])
    assert flipped["metadata"]["ownerReferences"][0]["name"] == pool
    assert "inferencefleet.io/flip" not in flipped["metadata"]["annotations"]
    fleet.delete_and_leave_nothing()


def cold_start(fleet: Fleet, before: set[str]) -> list[int]:
    """Processes of decode workers that were not there before."""
    names = {pod["metadata"]["name"] for pod in fleet.pods("decode") if pod["metadata"]["uid"] not in before}
    return [pid for pid, name in worker_processes(fleet.namespace).items() if name in names]


def signal_all(pids: list[int], which: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, which)


def test_a_lost_prefill_worker_is_replaced_by_a_flip_before_a_cold_start_is_over(fleet: Fleet):
    fleet.apply(wish(fleet.namespace))
    fleet.wait_serving(1, 3)
    lost, decodes = uids(fleet, "prefill"), uids(fleet, "decode")
    victim = fleet.pods("prefill")[0]["metadata"]["name"]
    begun = time.monotonic()
    fleet.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
    fleet.wait("a cold start", lambda: bool(cold_start(fleet, decodes)), 30)
    signal_all(cold_start(fleet, decodes), signal.SIGSTOP)  # as a model of a real size would: this one loads in 3 s
    # in this order: for a moment the status still counts the lost one
    fleet.wait("a prefill worker again", lambda: bool(uids(fleet, "prefill") - lost) and fleet.serving()[0] == 1, 60)
    flip_s = time.monotonic() - begun
    assert fleet.serving() == (1, 2), "the cold start of the same moment is not over"
    assert uids(fleet, "prefill") <= decodes, "it was a decode worker"
    signal_all(cold_start(fleet, decodes), signal.SIGCONT)
    fleet.wait("whole again", lambda: fleet.serving() == (1, 3), 60)
    cold_s = time.monotonic() - begun
    print(json.dumps({"flip_s": round(flip_s, 1), "cold_s": round(cold_s, 1), "told": told(fleet, "Flipped")}))
    assert len(uids(fleet, "decode") - decodes) == 1, "the missing decode worker was started"
    fleet.delete_and_leave_nothing()
