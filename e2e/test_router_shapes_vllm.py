"""What a request may ask for, over prefill and decode of two real vLLMs and a real router: the answer of one vLLM alone, token
for token, or the same refusal. Every prompt is new, so that its KV has to come from the other worker."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.bench.proxies import ours
from e2e.emulated.fleet import until
from e2e.vllm.told import tell
from fleet_cli.up.bundled import tiny_model
from fleet_router.config import RouterConfig
from fleet_worker.config import KvSettings
from tests.conformance.workers import running, worker_config

ROOT = Path(__file__).resolve().parents[1]
PREFILL, DECODE, ROUTER = "127.82.8.1", "127.82.8.2", "127.82.8.9:8080"
PROMPT_TOKENS = 300
"""Two whole blocks of vLLM's on CPU: less does not move."""
CONFIG = RouterConfig(
    fleet="f", served_name="tiny", min_uncached_tokens=0, slow_start_s=0.0, max_input_tokens=1_000, max_output_tokens=64
)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 7}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}]
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "ignore_eos": False}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "sampled": {**SEEDED, "top_p": 0.7, "top_k": 20, "min_p": 0.05},
    "token ids": {**GREEDY, "return_token_ids": True},
    "echo and logprobs": {**GREEDY, "echo": True, "logprobs": 2},
    "prompt logprobs": {**GREEDY, "prompt_logprobs": 1},
    "stop": {**GREEDY, "stop": ["e"], "include_stop_str_in_output": True},
    "at least": {**GREEDY, "min_tokens": 10, "ignore_eos": False},
    "penalties": {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.7},
    "penalties of what is drawn": {**SEEDED, "presence_penalty": 0.8, "frequency_penalty": -0.6, "repetition_penalty": 1.3},
    "tokens that draw": {**GREEDY, "logit_bias": {"300": 4.5, "301": 4.0, "11": -100}},
    "tokens that draw, seeded": {**SEEDED, "logit_bias": {"300": 7, "301": 6.5}, "min_p": 0.2},
    "bad words": {**GREEDY, "bad_words": ["e", "the", " a"]},
    "only these": {**GREEDY, "allowed_token_ids": [11, 12, 13, 14]},
    "ends with a token": {**SEEDED, "top_k": 3, "stop_token_ids": [*range(200, 600)], "min_tokens": 2},
    "no stop before its time": {**GREEDY, "stop": ["e", "a"], "min_tokens": 12},
    "logprobs of what is drawn": {**SEEDED, "top_p": 0.9, "logprobs": 5, "return_tokens_as_token_ids": True},
    "logprobs of what was asked of": {**SEEDED, "logprobs": 1, "repetition_penalty": 1.2, "logit_bias": {"300": 3}},
    "text of all tokens": {**GREEDY, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    "cut prompt": {**GREEDY, "truncate_prompt_tokens": 280},
    "one token": {**GREEDY, "max_tokens": 1},
    "refused": {**GREEDY, "temperature": -1},
}
CHAT: dict[str, dict[str, Any]] = {
    "seeded": SEEDED,
    "logprobs": {**GREEDY, "logprobs": True, "top_logprobs": 2},
    "all of it": {
        **SEEDED,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"300": 2},
        "stop": ["zzz"],
        "min_tokens": 4,
        "logprobs": True,
        "top_logprobs": 3,
    },
    "json": {**GREEDY, **JSON},
    "tools": {**GREEDY, "tools": TOOLS, "tool_choice": "none"},
    "no generation prompt": {**GREEDY, "add_generation_prompt": False},
}
SEVERAL: dict[str, dict[str, Any]] = {
    "n": {**SEEDED, "n": 3},
    "best of": {**SEEDED, "n": 2, "best_of": 2},
    "n with all else": {**SEEDED, "n": 2, "logprobs": 2, "frequency_penalty": 0.7, "logit_bias": {"300": 3}, "stop": ["e"]},
}
"""vLLM makes a request of its own of each choice, and one reference is good for one reader: these get none."""
WORDS = ["router", "moves", "blocks", "of", "keys", "and", "values", "between", "two", "workers", "before", "noon", "again"]
OWN = frozenset({"id", "created", "kv_transfer_params", "system_fingerprint", "service_tier", "request_id", "retryable"})
"""Of each answer."""
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
_SEEDS = itertools.count(1)


@dataclass(frozen=True)
class Served:
    """A fleet of one vLLM for each role."""

    router: str
    alone: str
    """The prefill worker's engine, which can do all of it by itself."""
    moved: list[bool] = field(default_factory=list)
    """Of each answer that should come over two workers: whether it did. A vLLM that two cores let wait for long is taken for a
    silent one, and then the other does all of it."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    installed = subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True, capture_output=True, text=True)
    env = {"FLEET_VLLM_BIN": str(Path(installed.stdout.strip()) / "vllm"), "OMP_NUM_THREADS": "1"}
    folder, model = tmp_path_factory.mktemp("shapes"), tiny_model()
    prefill, decode = (
        worker_config(role, model, engine="vllm", kv=KvSettings(lease_s=15.0), engine_args=("--dtype", "float32"))
        for role in ("prefill", "decode")
    )
    with (
        running(prefill, PREFILL, folder, **env),
        running(decode, DECODE, folder, **env),
        ours("ours", ROUTER, [f"{PREFILL}:8000"], [f"{DECODE}:8000"], folder, CONFIG, ready=f"http://{ROUTER}/health"),
    ):
        tell(folder / ROUTER.replace(":", "-"), [("prefill", PREFILL), ("decode", DECODE)])
        once = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
        until(
            "the router serves",
            lambda: httpx.post(f"http://{ROUTER}/v1/completions", json=once, timeout=60).status_code == 200,
            60,
        )
        found = Served(f"http://{ROUTER}", f"http://{PREFILL}:8000")
        yield found
        assert sum(found.moved) * 2 > len(found.moved)


@pytest.mark.parametrize("asked", COMPLETIONS.values(), ids=COMPLETIONS.keys())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_completions_are_those_of_one_engine(served: Served, asked: dict[str, Any], stream: bool):
    rng = random.Random(next(_SEEDS))
    same(
        served, "/v1/completions", {"prompt": [rng.randrange(5, 400) for _ in range(PROMPT_TOKENS)], **asked}, stream, moved=True
    )


@pytest.mark.parametrize("asked", CHAT.values(), ids=CHAT.keys())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_is_that_of_one_engine(served: Served, asked: dict[str, Any], stream: bool):
    rng = random.Random(next(_SEEDS))
    said = [" ".join(rng.choices(WORDS, k=count)) for count in (150, 60)]
    messages = [{"role": role, "content": content} for role, content in zip(("system", "user"), said, strict=True)]
    same(served, "/v1/chat/completions", {"messages": messages, **asked}, stream, moved=True)


@pytest.mark.parametrize("asked", SEVERAL.values(), ids=SEVERAL.keys())
def test_several_choices_are_those_of_one_engine(served: Served, asked: dict[str, Any]):
    rng = random.Random(next(_SEEDS))
    prompt = [rng.randrange(5, 400) for _ in range(PROMPT_TOKENS)]
    same(served, "/v1/completions", {"prompt": prompt, **asked}, stream=False, moved=False)


def same(served: Served, path: str, body: dict[str, Any], stream: bool, *, moved: bool) -> None:
    """Router and engine answer alike; `moved`: over two workers."""
    body = {"model": "tiny", **body, **({"stream": True, "stream_options": {"include_usage": True}} if stream else {})}
    ours_, theirs = (ask(url + path, body) for url in (served.router, served.alone))
    assert ours_.status_code == theirs.status_code, ours_.text
    if ours_.status_code == 200:
        decision = ours_.headers["x-fleet-decision"]
        over_two = 'prefill="' in decision
        served.moved.extend([over_two] if moved else [])
        assert over_two is moved or (moved and "after a failure" in decision), decision
        alike(*(folded(one.text) if stream else one.json() for one in (ours_, theirs)))


def ask(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url, json=body, headers={"x-fleet-explain": "1"}, timeout=120, trust_env=False)


def folded(text: str) -> dict[str, Any]:
    """A stream as one answer: how it was cut is nobody's promise."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    found: dict[str, Any] = {}
    for event in map(json.loads, lines[:-1]):
        assert "error" not in event, event
        found["usage"] = event.get("usage") or found.get("usage")
        for choice in event["choices"]:
            into = found.setdefault(str(choice["index"]), {"text": "", "finish": None, "ids": [], "logprobs": []})
            delta, logprobs = choice.get("delta") or {}, choice.get("logprobs") or {}
            into["text"] += choice.get("text") or delta.get("content") or ""
            into["finish"] = choice.get("finish_reason") or into["finish"]
            into["ids"] += choice.get("token_ids") or []
            into["logprobs"] += logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content") or []]
    return found


def alike(mine: Any, theirs: Any, at: str = "") -> None:
    """Equal but for ids and times; numbers to two hundredths, for two engines add up in different orders."""
    if isinstance(mine, float) and isinstance(theirs, float):
        assert mine == pytest.approx(theirs, abs=0.02), at
    elif isinstance(mine, dict) and isinstance(theirs, dict):
        mine, theirs = ({k: v for k, v in one.items() if k not in OWN and v is not None} for one in (mine, theirs))
        assert mine.keys() == theirs.keys(), at
        for key, value in mine.items():
            alike(value, theirs[key], f"{at}.{key}")
    elif isinstance(mine, list) and isinstance(theirs, list):
        assert len(mine) == len(theirs), at
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            alike(one, other, f"{at}[{number}]")
    else:
        assert mine == theirs, at
