"""Rollouts with real workers: a canary that fails is rolled back by itself and stays so; history, undo, pause, restart from the
command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet import Fleet, manifest, tokens, worker_processes
from e2e.test_churn import load
from e2e.traffic import read_trace
from fleet_cli.rollout.history import entries
from fleet_cli.up.bundled import tiny_model

INTERVAL_S = 20
ENGINE = b"fleet_worker.engine"

pytestmark = [pytest.mark.timeout(400)]


def rollout(fleet: Fleet, *args: str, check: bool = True) -> str:
    """`fleet rollout ARGS` as a user runs it."""
    argv = [sys.executable, "-m", "fleet_cli.main", "rollout", *args, "-n", fleet.namespace]
    argv += ["--kubeconfig", str(fleet.plane.kubeconfig)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=130, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def wish(fleet: Fleet, **spec: Any) -> dict[str, Any]:
    made = manifest(fleet.namespace, tiny_model())
    made["spec"] |= {"scaling": {"mode": "manual"}, **spec}
    return made


def rollout_status(fleet: Fleet) -> dict[str, Any]:
    return fleet.status()["tiers"][0]["rollout"]


def busy(address: str) -> bool:
    """Its engine has a request; no answer is none."""
    try:
        told = httpx.get(f"http://{address}:8000/metrics", timeout=1, trust_env=False).text
    except httpx.HTTPError:
        return False
    return any(line.startswith("fleet:requests_open") and not line.endswith(" 0") for line in told.splitlines())


def kill_engines(fleet: Fleet, pods: set[str]) -> int:
    """SIGKILL to the engines of these pods, as a device error would."""
    killed = 0
    for pid, pod in worker_processes(fleet.namespace).items():
        if pod in pods and ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def test_a_canary_that_fails_is_rolled_back_within_one_interval_and_not_tried_again(fleet: Fleet):
    canary = {"steps": [50], "interval": f"{INTERVAL_S}s", "analysis": {"minRequests": 5, "ttftP99": "9x", "itlP99": "9x"}}
    made = wish(fleet, rollout={"canary": canary, "drainTimeout": "20s"})
    fleet.apply(made)
    fleet.wait_serving(1, 2)
    before = {pod["metadata"]["uid"] for pod in [*fleet.pods("prefill"), *fleet.pods("decode")]}
    with load(fleet, read_trace()[:40]):
        made["spec"]["engine"]["maxBatch"] = 24
        fleet.apply(made)
        fleet.wait("the canary serving", lambda: rollout_status(fleet).get("percent") == 50)
        target = rollout_status(fleet)["target"]
        label = f"inferencefleet.io/revision={target}"
        bad = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in fleet.objects("pods", "-l", label)}
        time.sleep(3)  # some requests first: it is judged from the fifth on
        while not any(busy(address) for address in bad.values()):  # killed between two requests they hurt nobody
            time.sleep(0.02)
        breached = time.monotonic()
        while fleet.condition("RollingOut")["reason"] != "RolledBack":
            kill_engines(fleet, {name for name, address in bad.items() if busy(address)})
            assert time.monotonic() < breached + INTERVAL_S, fleet.status()
            time.sleep(0.1)
        took_s = time.monotonic() - breached
        fleet.wait("no worker of the bad revision", lambda: not fleet.objects("pods", "-l", label), 60)
    print(f"rolled back {took_s:.1f} s after the first breach")
    assert rollout_status(fleet)["failed"] == target
    # both are true of a worker that is killed again and again: what is seen first is told
    assert any(words in fleet.condition("RollingOut")["message"] for words in ("requests failed", "its workers crash"))
    assert {pod["metadata"]["uid"] for pod in [*fleet.pods("prefill"), *fleet.pods("decode")]} == before
    assert fleet.serving() == (1, 2)
    assert len(tokens(fleet.router(), "it still answers")) == 16
    made["spec"]["engine"]["maxBatch"] = 32
    fleet.apply(made)
    fleet.wait("nothing to do any more", lambda: fleet.condition("RollingOut")["reason"] == "Complete", 30)
    fleet.delete_and_leave_nothing()


def test_history_pause_undo_and_restart_from_the_command_line(fleet: Fleet):
    made = wish(fleet)
    fleet.apply(made)
    fleet.wait_serving(1, 2)
    assert "Complete" in rollout(fleet, "status", "loop")
    first = fleet.status()["tiers"][0]["revision"]
    assert "rollouts are paused" in rollout(fleet, "pause", "loop")
    made["spec"]["engine"]["maxBatch"] = 24
    fleet.apply(made)
    fleet.wait("the new revision stored", lambda: len(entries(fleet.objects("controllerrevisions"))) == 2)
    time.sleep(2)
    assert {pod["metadata"]["labels"]["inferencefleet.io/revision"] for pod in fleet.pods("decode")} == {first}
    rollout(fleet, "resume", "loop")
    assert "Complete" in rollout(fleet, "status", "loop", "--timeout", "120")
    second = fleet.status()["tiers"][0]["revision"]
    assert second != first
    history = rollout(fleet, "history", "loop")
    assert [line.split()[:3] for line in history.splitlines()[1:]] == [["gpu", "1", first], ["gpu", "2", second]]
    assert f"goes back to revision 1 ({first})" in rollout(fleet, "undo", "loop")
    assert "Complete" in rollout(fleet, "status", "loop", "--timeout", "120")
    assert fleet.status()["tiers"][0]["revision"] == first
    assert "no fleet nobody in namespace" in rollout(fleet, "status", "nobody", check=False)
    rollout(fleet, "restart", "loop")
    assert "Complete" in rollout(fleet, "status", "loop", "--timeout", "120")
    assert fleet.status()["tiers"][0]["revision"] not in (first, second)
    fleet.delete_and_leave_nothing()
