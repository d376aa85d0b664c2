"""Scale to zero and back, on the real control plane and in `fleet up`: no worker while nobody asks, and whoever asks waits for
workers and gets the right tokens."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from e2e.fleet import Fleet, manifest, tokens, worker_processes
from e2e.fleet_up import END_S, free_port, gone, marked, running
from e2e.test_churn import recording
from fleet_cli.up.bundled import bundled_manifest, tiny_model

PROMPT = "The router sends every prompt to a prefill worker, which computes its keys and values. " * 4
IDLE_S = 8
AT_ONCE = 20
OUTPUT_TOKENS = 16
WAKE_MOST_S = 60.0

pytestmark = [pytest.mark.timeout(500)]


def wish(namespace: str) -> dict[str, Any]:
    made = manifest(namespace, tiny_model())
    made["spec"]["scaling"] = {"toZero": {"enabled": True, "idle": f"{IDLE_S}s"}}
    made["spec"]["tiers"][0]["decode"]["minReplicas"] = 2
    return made


def ask(url: str, prompt: str, model: str = "tiny") -> list[int]:
    """Greedy tokens, with the official client and no retry of its own."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAKE_MOST_S)
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=OUTPUT_TOKENS, temperature=0, extra_body={"return_token_ids": True}
    )
    return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")))


def devices(fleet: Fleet) -> int:
    """GPUs that the fleet's pods ask for, whatever state they are in."""
    asked = 0
    for pod in fleet.objects("pods"):
        for container in pod["spec"]["containers"]:
            asked += int((container.get("resources", {}).get("limits") or {}).get("nvidia.com/gpu", 0))
    return asked


def at_zero(fleet: Fleet) -> bool:
    return fleet.condition("Ready").get("reason") == "AtZero" and not fleet.pods("prefill") and not fleet.pods("decode")


def test_an_idle_fleet_has_no_workers_and_wakes_for_whoever_asks(fleet: Fleet):
    fleet.apply(wish(fleet.namespace))
    fleet.wait_serving(1, 2)
    assert devices(fleet) == 3
    engine = f"http://{fleet.pods('prefill')[0]['status']['podIP']}:8000"
    prompts = [f"{number} {PROMPT}" for number in range(AT_ONCE)]
    expected = {prompt: tokens(engine, prompt, OUTPUT_TOKENS) for prompt in prompts}
    with recording(fleet) as recorder:
        fleet.wait("zero", lambda: at_zero(fleet), 90)
        assert devices(fleet) == 0
        fleet.wait("no worker process", lambda: not worker_processes(fleet.namespace), 20)
        says_so(fleet)

        url, begun = fleet.router(), time.monotonic()
        assert ask(url, prompts[0]) == expected[prompts[0]]
        one_s = time.monotonic() - begun
        pods = [pod for role in ("prefill", "decode") for pod in fleet.pods(role)]
        fleet.wait_serving(1, 2)

        fleet.wait("zero again", lambda: at_zero(fleet), 120)
        begun = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as users:
            answers = dict(zip(prompts, users.map(lambda prompt: ask(url, prompt), prompts), strict=True))
        many_s = time.monotonic() - begun
    assert answers == expected
    assert metric(url, 'fleet_router_held_total{outcome="released"}') == AT_ONCE + 1
    assert metric(url, "fleet_router_held") == 0
    assert one_s < WAKE_MOST_S
    print(json.dumps({"one_s": round(one_s, 1), "twenty_s": round(many_s, 1), "pods_of_the_first_wake": len(pods)}))
    told = {(prefill, decode) for _, prefill, decode in recorder.counts}
    assert (0, 0) in told
    assert [one for one in recorder.outside() if one[1:] != (0, 0)] == [], "no role without the other, in any document"
    fleet.delete_and_leave_nothing()


def says_so(fleet: Fleet) -> None:
    """What people see of a fleet at zero."""
    shown = fleet.kubectl("get", "ifleet", "loop", "-o", "wide").splitlines()
    row = dict(zip(shown[0].split(), shown[1].split(), strict=True))
    assert (row["READY"], row["PREFILL"], row["DECODE"], row["REASON"]) == ("True", "0/0", "0/0", "AtZero"), shown
    assert {pool["spec"]["replicas"] for pool in fleet.objects("workerpools")} == {0}
    assert "1 prefill and 2 decode → 0 prefill and 0 decode" in fleet.kubectl("describe", "ifleet", "loop")
    assert httpx.get(f"{fleet.router()}/ready").status_code == 200
    routers = [pod for pod in fleet.pods("router") if "deletionTimestamp" not in pod["metadata"]]
    assert len(routers) == 1


def test_the_operator_hears_of_a_held_request_at_once(fleet: Fleet):
    """Telemetry every minute, so that only the question which the operator keeps open can tell it."""
    made = wish(fleet.namespace)
    fleet.apply(made)
    fleet.wait_serving(1, 2)
    fleet.wait("zero", lambda: at_zero(fleet), 90)
    made["spec"]["telemetry"]["interval"] = "1m"
    fleet.apply(made)
    time.sleep(2)
    url = fleet.router()
    with ThreadPoolExecutor(1) as user:
        begun = time.monotonic()
        answer = user.submit(ask, url, PROMPT)
        while not fleet.pods("decode"):
            assert time.monotonic() - begun < 10, fleet.operator.tail()
            time.sleep(0.05)
        heard_s = time.monotonic() - begun
        assert len(answer.result()) == OUTPUT_TOKENS
    print(json.dumps({"request_to_pods_s": round(heard_s, 2)}))
    assert heard_s < 5
    fleet.kubectl("delete", "ifleet", "loop", "--timeout=60s")


def test_without_nodes_the_request_is_told_when_to_come_again(fleet: Fleet):
    """A fleet that has no room when it wakes says so, in its status and to whoever waited."""
    made = wish(fleet.namespace)
    made["spec"]["limits"] = {"hold": {"time": "10s"}}
    made["spec"]["scaling"]["capacityWait"] = "20s"  # so long a node is waited for, also when nobody waits any more
    fleet.apply(made)
    fleet.wait_serving(1, 2)
    fleet.wait("zero", lambda: at_zero(fleet), 90)
    made["spec"]["tiers"][0]["prefill"]["podTemplate"] = made["spec"]["tiers"][0]["decode"]["podTemplate"] = {
        "nodeSelector": {"no-such": "node"}
    }
    fleet.apply(made)
    time.sleep(3)
    assert not fleet.pods("decode"), "a new revision starts nothing at zero"
    answer = httpx.post(f"{fleet.router()}/v1/completions", json={"model": "tiny", "prompt": PROMPT}, timeout=60)
    assert answer.status_code == 503, answer.text
    assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("no_capacity", "60")
    assert fleet.condition("CapacityLimited")["status"] == "True"
    fleet.wait("zero", lambda: at_zero(fleet), 90)
    fleet.kubectl("delete", "ifleet", "loop", "--timeout=60s")


def test_fleet_up_wakes_too(tmp_path: Path):
    state, port = tmp_path / "state", free_port()
    made = bundled_manifest(tiny_model())
    made["spec"]["scaling"] = {"toZero": {"enabled": True, "idle": f"{IDLE_S}s"}}
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(made))
    url = f"http://127.0.0.1:{port}"
    with running(str(path), "--port", str(port), "--state", str(state)) as up:
        up.until("Try it")
        before = ask(url, PROMPT)
        end = time.monotonic() + 60
        while workers(state):
            assert time.monotonic() < end, "".join(up.lines)
            time.sleep(0.2)
        assert httpx.get(f"{url}/ready").status_code == 200
        begun = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as users:
            answers = list(users.map(lambda _: ask(url, PROMPT), range(AT_ONCE)))
        print(json.dumps({"up_twenty_s": round(time.monotonic() - begun, 1)}))
        assert answers == [before] * AT_ONCE
        up.process.terminate()
        assert up.end(END_S) == 0, "".join(up.lines)
    assert gone(state)


def workers(state: Path) -> list[str]:
    """Agents and engines of this `fleet up`."""
    return [line for line in marked(state) if "fleet-router" not in line and "fleet_router" not in line]
