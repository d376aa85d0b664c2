"""What a chat template may look at besides the conversation, over prefill and decode of two vLLMs and a router: the day, which
the two see differently, and how much is to be thought. The answer is that of one vLLM alone, in its own dialects."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from e2e.bench.proxies import ours
from e2e.emulated.fleet import until
from e2e.test_router_shapes_vllm import CONFIG, WORDS, Served, ask, same
from e2e.vllm.told import tell
from fleet_cli.up.bundled import tiny_model
from fleet_router.midnight import DAY_S
from fleet_worker.config import KvSettings
from tests.conformance.workers import running, worker_config

ROOT = Path(__file__).resolve().parents[1]
CHANGED = Path(__file__).parent / "changed"
PREFILL, DECODE, ROUTER = "127.82.10.1", "127.82.10.2", "127.82.10.9:8080"
ZONES = {PREFILL: "EAST-12", DECODE: "WEST+12"}
"""Two workers between which it is always midnight."""
BEFORE_S = 840.0
"""The router's clock is so long before the end of its day when it starts."""
TEMPLATE = """{{ bos_token }}Today is {{ strftime_now('%d %B %Y') }}. \
{% if reasoning_effort %}Effort: {{ reasoning_effort }}. {% endif %}\
{% if enable_thinking is defined and not enable_thinking %}Without a thought. {% endif %}\
{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
THINKS = {"reasoning_start_str": "assistant: ", "reasoning_end_str": "That is enough. "}
"""What vLLM counts as a thought: all that is said, until it has to end."""
LEAST_BUDGET = 1_024
MOST_S = 300.0
"""For more than a thousand tokens of an engine that has little of two cores."""
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
EFFORTS: dict[str, dict[str, Any]] = {
    "none": {"thinking": {"type": "disabled"}},
    "low": {"output_config": {"effort": "low"}},
    "max": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
    "of nobody": {"thinking": {"type": "adaptive"}},
    "with a form": {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}},
    "in tokens": {"max_tokens": LEAST_BUDGET + 40, "thinking": {"type": "enabled", "budget_tokens": LEAST_BUDGET}},
}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ROUTED = msgspec.structs.replace(
    CONFIG,
    max_input_tokens=2_000,
    max_output_tokens=1_200,
    first_token_deadline_s=MOST_S,
    inter_token_deadline_s=120.0,
    silent_s=60.0,
)
"""Two vLLMs on two cores stand still for longer than deadlines."""
_SEEDS = itertools.count(1)
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_200)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    installed = subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True, capture_output=True, text=True)
    env = {"FLEET_VLLM_BIN": str(Path(installed.stdout.strip()) / "vllm"), "OMP_NUM_THREADS": "1"}
    folder, model = tmp_path_factory.mktemp("templates"), tiny_model()
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    told = ("--dtype", "float32", "--chat-template", str(template), "--reasoning-config", json.dumps(THINKS))
    prefill, decode = (
        worker_config(role, model, engine="vllm", kv=KvSettings(lease_s=15.0), max_model_len=2_048, engine_args=told)
        for role in ("prefill", "decode")
    )
    with (
        running(prefill, PREFILL, folder, **env, TZ=ZONES[PREFILL]),
        running(decode, DECODE, folder, **env, TZ=ZONES[DECODE]),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", str(CHANGED), prepend=":")
        patch.setenv("AHEAD_S", str(DAY_S - BEFORE_S - time.time() % DAY_S))
        with ours("ours", ROUTER, [f"{PREFILL}:8000"], [f"{DECODE}:8000"], folder, ROUTED, ready=f"http://{ROUTER}/health"):
            tell(folder / ROUTER.replace(":", "-"), [("prefill", PREFILL), ("decode", DECODE)])
            until(
                "the router knows how KV is read",
                lambda: "prefill=" in ask(f"http://{ROUTER}{CHAT}", talk()).headers.get("x-fleet-decision", ""),
                60,
            )
            found = Served(f"http://{ROUTER}", f"http://{PREFILL}:8000")
            yield found
            assert sum(found.moved) * 2 > len(found.moved)


def talk(**asked: Any) -> dict[str, Any]:
    """A conversation that nobody had before."""
    rng = random.Random(next(_SEEDS))
    said = [" ".join(rng.choices(WORDS, k=count)) for count in (60, 150)]
    messages = [{"role": role, "content": content} for role, content in zip(("user", "assistant"), said, strict=True)]
    return {"model": "tiny", "messages": [*messages, {"role": "user", "content": "go on"}], **GREEDY, **asked}


def tokens(host: str, body: dict[str, Any]) -> list[int]:
    """What an engine makes of a conversation."""
    asked = {"model": "tiny", "messages": body["messages"]}
    return list(httpx.post(f"http://{host}:8000/tokenize", json=asked, timeout=60, trust_env=False).json()["tokens"])


def sureness(host: str, body: dict[str, Any]) -> list[float]:
    """Of each token that one engine says alone."""
    answer = httpx.post(f"http://{host}:8000{CHAT}", json={**body, "logprobs": True}, timeout=MOST_S, trust_env=False)
    return [one["logprob"] for one in answer.json()["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_conversation_of_two_days_is_one_prompt(served: Served, stream: bool):
    """The decode worker would read KV of yesterday for a prompt with today in it, and keep it under today's name: with the
    router's clock at noon its next answers are off by 1.5 and 1.9 in a logprob."""
    body = talk(logprobs=True)
    assert tokens(PREFILL, body) != tokens(DECODE, body)
    same(served, CHAT, body, stream, moved=True)
    fresh = sureness(DECODE, {**body, "cache_salt": "nobody's"})
    assert sureness(DECODE, body) == pytest.approx(fresh, abs=0.001), "KV of another day is kept for its own"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("effort", ["none", "minimal", "max"])
def test_an_effort_is_that_of_one_engine(served: Served, effort: str, stream: bool):
    same(served, CHAT, talk(reasoning_effort=effort), stream, moved=True)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("asked", EFFORTS.values(), ids=EFFORTS.keys())
def test_thoughts_of_messages_are_those_of_vllms_own_messages(served: Served, asked: dict[str, Any], stream: bool):
    """Our translation is theirs: the same tokens asked, the same answer."""
    body = {**{name: value for name, value in talk().items() if name != "ignore_eos"}, **asked, "stream": stream}
    explain = {"x-fleet-explain": "1"}
    answers = [
        httpx.post(url + MESSAGES, json=body, headers=explain, timeout=MOST_S, trust_env=False)
        for url in (served.router, served.alone)
    ]
    assert [one.status_code for one in answers] == [200, 200], [one.text for one in answers]
    served.moved.append('prefill="' in answers[0].headers["x-fleet-decision"])
    mine, theirs = (told(one.text) if stream else one.json() for one in answers)
    for name in ("content", "stop_reason", "stop_sequence"):
        assert mine.get(name) == theirs.get(name), name
    for name in ("input_tokens", "output_tokens"):
        assert mine["usage"][name] == theirs["usage"][name], name


def told(events: str) -> dict[str, Any]:
    """A stream as one message of one text."""
    found = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    (end,) = [one for one in found if one["type"] == "message_delta"]
    said = "".join(one["delta"].get("text", "") for one in found if one["type"] == "content_block_delta")
    return {"content": [{"type": "text", "text": said}], "usage": end["usage"], **end["delta"]}
