"""Small models first, with real engines: two tiers, each with a model of its own, prefill and decode apart in both. What a client
gets is what transformers says of the model whose tier the answer names."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import yaml

from e2e.emulated.fleet import until
from e2e.fleet_up import free_port, running
from e2e.test_router_resume import engines
from fleet_cli.up.bundled import tiny_model
from tests.adapters import make_adapter, merged

pytestmark = [pytest.mark.timeout(600)]
PROMPT = [5 + i * 7 % 900 for i in range(150)]
COUNT = 12
TIERS = ("small", "large")


class Told(NamedTuple):
    tier: str
    tokens: list[int]
    text: str


class Fleet(NamedTuple):
    url: str
    state: Path
    truth: dict[str, list[int]]
    """What each tier's model says after the prompt."""
    texts: dict[str, str]

    def ask(self, *, stream: bool = False, headers: dict[str, str] | None = None, **more: Any) -> Told:
        """One completion, whole or streamed."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "return_token_ids": True, **more}
        answer = httpx.post(f"{self.url}/v1/completions", json={**body, "stream": stream}, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        lines = answer.text.splitlines() if stream else [f"data: {answer.text}"]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert not stream or lines[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in lines
        choices = [choice for event in events for choice in event["choices"]]
        tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
        text = "".join(choice["text"] for choice in choices)
        return Told(answer.headers["x-fleet-tier"], tokens, text)

    def counted(self, name: str) -> float:
        """A sample of the router's metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " ")), 0.0)


def spec(large: Path, **check: Any) -> dict[str, Any]:
    """The fleet: a tier rule sends who asks for it to a tier, all others climb."""
    one = {
        "accelerator": {"type": "cpu"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
        "ratio": {"prefill": 1, "decode": 1},
    }
    return {
        "apiVersion": "inferencefleet.io/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "cascade"},
        "spec": {
            "model": {"source": f"file://{tiny_model()}", "servedName": "tiny"},
            "engine": {"type": "torch", "maxModelLen": 1024, "cacheSize": "64Mi"},
            "scaling": {"mode": "manual"},
            "tiers": [{"name": "small", **one}, {"name": "large", **one, "model": {"source": f"file://{large}"}}],
            "routing": {
                "tierRules": [{"when": {"header": {"x-tier": tier}}, "tier": tier} for tier in TIERS],
                "cascade": {"tiers": list(TIERS), "check": check},
            },
        },
    }


def truth_of(folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.inference_mode():
        out = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
    return list(out[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """`fleet up` with both tiers; a draft is good enough when it ends by itself."""
    folder = tmp_path_factory.mktemp("cascade")
    make_adapter(folder / "adapter", 1)
    large = merged(tiny_model(), folder / "adapter", folder / "large")
    truth = {"small": truth_of(tiny_model()), "large": truth_of(large)}
    assert truth["small"] != truth["large"]
    port, state, file = free_port(), folder / "state", folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(spec(large, finishReasons=["length"])))
    with running(str(file), "--port", str(port), "--state", str(state)) as up:
        up.until("ready after")
        found = Fleet(f"http://127.0.0.1:{port}", state, truth, {})
        found.texts.update({tier: found.ask(headers={"x-tier": tier}).text for tier in TIERS})
        yield found
        up.process.send_signal(signal.SIGINT)
        assert up.end() == 0, "".join(up.lines)


@pytest.mark.parametrize("tier", TIERS)
def test_a_rule_sends_a_request_to_one_model_and_kv_stays_there(fleet: Fleet, tier: str):
    before = fleet.counted(f'fleet_router_handed_over_total{{tier="{tier}"}}')
    prompt = [7 + TIERS.index(tier), *PROMPT]  # nobody has it in a cache
    assert fleet.ask(headers={"x-tier": tier})[:2] == (tier, fleet.truth[tier])
    fleet.ask(headers={"x-tier": tier}, prompt=prompt)
    assert fleet.counted(f'fleet_router_handed_over_total{{tier="{tier}"}}') > before


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_good_draft_is_the_small_models_answer(fleet: Fleet, stream: bool):
    stop = fleet.texts["small"][-3:]
    told = fleet.ask(stream=stream, stop=[stop])
    assert told.tier == "small"
    assert told.tokens == fleet.truth["small"][: len(told.tokens)]
    assert fleet.texts["small"].startswith(told.text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_draft_that_is_not_good_enough_is_the_large_models_answer(fleet: Fleet, stream: bool):
    before = fleet.counted('fleet_router_drafts_total{tier="small",outcome="finish_length"}')
    told = fleet.ask(stream=stream)
    assert (told.tier, told.tokens) == ("large", fleet.truth["large"])
    assert fleet.counted('fleet_router_drafts_total{tier="small",outcome="finish_length"}') == before + 1


def test_a_small_tier_that_is_killed_costs_nobody_an_answer(fleet: Fleet):
    small = [pid for pid in engines(fleet.state) if b"FLEET_POD_NAME=cascade-small-" in Path(f"/proc/{pid}/environ").read_bytes()]
    assert len(small) == 2
    for engine in small:
        os.kill(engine, signal.SIGKILL)
    told = fleet.ask()
    assert (told.tier, told.tokens) == ("large", fleet.truth["large"])
    until("the small tier is back", lambda: fleet.ask(stop=[fleet.texts["small"][-3:]]).tier == "small", 120.0)
