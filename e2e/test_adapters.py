"""Adapters on a running fleet: right tokens under each, none of them restarts a pod, and a broken one hurts nobody."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from e2e.fleet import Fleet, manifest
from fleet_cli.up.bundled import tiny_model
from tests.adapters import make_adapter, merged

pytestmark = [pytest.mark.timeout(400)]
PROMPT = [5 + i * 7 % 900 for i in range(150)]
COUNT = 12
Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters as they lie on every node."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "one", 1)
    make_adapter(folder / "two", 2, rank=4, alpha=32, targets=("q_proj", "v_proj"))
    make_adapter(folder / "three", 3, rank=16)
    make_adapter(folder / "broken", 4)
    (folder / "broken/adapter_model.safetensors").write_bytes(b"nothing of use")
    return folder


@pytest.fixture(scope="module")
def expected(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What transformers says, on the plain and on merged weights."""
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("merged")
    found = {}
    for name in ("", "one", "two", "three"):
        folder = merged(tiny_model(), root / name, place / name) if name else tiny_model()
        model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
        with torch.inference_mode():
            out = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
        found[name] = out[0, len(PROMPT) :].tolist()
    assert len({tuple(answer) for answer in found.values()}) == 4
    return found


def wish(namespace: str, root: Path, **adapters: str) -> dict[str, Any]:
    """A fleet of one prefill and two decode workers with these adapters: name → folder."""
    made = manifest(namespace, tiny_model())
    made["spec"]["model"] |= {
        "adapterRoot": f"file://{root}",
        "adapters": [{"name": name, "source": f"file://{root}/{folder}"} for name, folder in adapters.items()],
    }
    made["spec"]["scaling"] = {"mode": "manual"}
    return made


def ask(fleet: Fleet, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{fleet.router()}/v1/completions", json=body, timeout=60)


def tokens(fleet: Fleet, model: str) -> list[int]:
    answer = ask(fleet, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def says(fleet: Fleet, model: str, wanted: list[int]) -> Callable[[], bool]:
    def check() -> bool:
        answer = ask(fleet, model)
        return answer.status_code == 200 and answer.json()["choices"][0]["token_ids"] == wanted

    return check


def adapters(fleet: Fleet) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in fleet.status().get("adapters") or []}


def everywhere(fleet: Fleet, *names: str) -> Callable[[], bool]:
    def check() -> bool:
        found = adapters(fleet)
        return set(found) == set(names) and all(0 < one["loaded"] == one["desired"] for one in found.values())

    return check


def workers(fleet: Fleet) -> dict[str, tuple[str, int]]:
    """Name → uid and restarts."""
    pods = [pod for role in ("prefill", "decode") for pod in fleet.pods(role) if "deletionTimestamp" not in pod["metadata"]]
    return {
        pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in pods
    }


def told(fleet: Fleet, reason: str) -> list[str]:
    return [event["note"] for event in fleet.objects("events.events.k8s.io") if event["reason"] == reason]


def test_adapters_come_go_and_change_on_a_running_fleet(fleet: Fleet, root: Path, expected: Answers):
    def apply(**wanted: str) -> float:
        fleet.apply(wish(fleet.namespace, root, **wanted))
        return time.monotonic()

    apply(one="one", two="two")
    fleet.wait_serving(1, 2)
    fleet.wait("both adapters everywhere", everywhere(fleet, "one", "two"), 30)
    before = workers(fleet)
    assert len(before) == 3
    took = {}
    for _ in range(3):  # cold, then over a warm cache
        assert (tokens(fleet, "tiny"), tokens(fleet, "one"), tokens(fleet, "two")) == tuple(
            expected[name] for name in ("", "one", "two")
        )
    fleet.wait("KV moved", lambda: fleet.status()["tiers"][0].get("kv", {}).get("transfers", 0) >= 2, 45)  # written every 30 s
    listed = httpx.get(f"{fleet.router()}/v1/models", timeout=10).json()["data"]
    assert [(card["id"], card.get("parent")) for card in listed] == [("tiny", None), ("one", "tiny"), ("two", "tiny")]
    assert fleet.condition("AdaptersLoaded")["status"] == "True"

    begun = apply(one="one", two="two", three="three")
    fleet.wait("the new one answers", says(fleet, "three", expected["three"]), 20)
    took["added_s"] = time.monotonic() - begun
    begun = apply(two="two", three="three")
    fleet.wait("the removed one is gone", lambda: ask(fleet, "one").status_code == 404, 20)
    took["removed_s"] = time.monotonic() - begun
    assert ask(fleet, "one").json()["error"]["code"] == "model_not_found"
    begun = apply(two="one", three="three")
    fleet.wait("another content under the name", says(fleet, "two", expected["one"]), 20)
    took["changed_s"] = time.monotonic() - begun
    assert (tokens(fleet, "tiny"), tokens(fleet, "three")) == (expected[""], expected["three"])
    assert workers(fleet) == before, "no pod was started, none restarted"

    apply(two="one", three="three", four="broken")
    fleet.wait("its failure is told", lambda: adapters(fleet).get("four", {}).get("reason") == "BadAdapter", 20)
    status = adapters(fleet)["four"]
    assert (status["loaded"], "is not a readable safetensors file" in status["message"]) == (0, True), status
    assert fleet.condition("AdaptersLoaded")["reason"] == "AdapterFailed"
    fleet.wait("an event", lambda: bool(told(fleet, "AdapterFailed")), 20)
    refused = ask(fleet, "four")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_not_loaded")
    assert (tokens(fleet, "tiny"), tokens(fleet, "two")) == (expected[""], expected["one"])
    assert fleet.condition("Ready")["status"] == "True"
    assert workers(fleet) == before

    # a new worker has them before it gets a request; a container that starts again, too
    apply(two="one", three="three")
    pool = next(pool for pool in fleet.objects("workerpools") if pool["spec"]["role"] == "decode")["metadata"]["name"]
    fleet.kubectl("scale", "workerpool", pool, "--replicas=3")
    fleet.wait("a third decode worker", lambda: fleet.serving() == (1, 3), 150)
    new = next(pod for pod in fleet.pods("decode") if pod["metadata"]["name"] not in before)
    state = httpx.get(f"http://{new['status']['podIP']}:9000/state", timeout=10).json()
    assert {entry["name"]: entry["state"] for entry in state["adapters"]} == {"two": "Loaded", "three": "Loaded"}
    assert "two" in new["metadata"]["annotations"]["inferencefleet.io/adapters"]
    print(json.dumps({name: round(value, 1) for name, value in took.items()} | {"failed": told(fleet, "AdapterFailed")}))
    fleet.delete_and_leave_nothing()
