"""What every engine must do with adapters, whoever wrote it. Collected through test_torch_adapters.py here and
e2e/test_conformance_vllm_adapters.py there.

`adapted` is a fixture: a prefill and a decode worker that serve the tiny model as "tiny" with room for two adapters, and the
tokens that are right under each. No adapter is there at the beginning of a case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from fleet_worker.config import AdapterSettings, WorkerConfig
from tests.adapters import make_adapter, merged
from tests.conformance.suite import eventually
from tests.conformance.workers import Worker, running, worker_config

PROMPT = [5 + i * 7 % 900 for i in range(300)]
COUNT = 12
LOAD_S = 60.0


@dataclass(frozen=True)
class Adapted:
    """Two workers and what they should say."""

    prefill: Worker
    decode: Worker
    expected: dict[str, list[int]]

    def tell(self, **adapters: str) -> None:
        """Both agents: name → folder; returns when each was tried."""
        wished = [{"name": name, "source": source} for name, source in adapters.items()]
        for worker in (self.prefill, self.decode):
            httpx.post(worker.agent + "/adapters", json=wished, timeout=10).raise_for_status()
        for worker in (self.prefill, self.decode):
            eventually(lambda worker=worker: tried(worker, set(adapters)), LOAD_S)


def tried(worker: Worker, names: set[str]) -> bool:
    """It has heard of these and no others, and works at none of them."""
    found = states(worker)
    return set(found) == names and set(found.values()) <= {"Loaded", "Failed"}


def states(worker: Worker) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in report(worker)}


def report(worker: Worker) -> list[dict[str, str]]:
    return httpx.get(worker.agent + "/state", timeout=10).json()["adapters"]


def ask(worker: Worker, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "return_token_ids": True, **more}
    return worker.post("/v1/completions", body)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@contextmanager
def adapted_pair(model: Path, folder: Path, addresses: tuple[str, str], env: dict[str, str], **changes: Any) -> Iterator[Adapted]:
    """Two workers with an adapter root, and the tokens of transformers on merged weights."""
    root = folder / "root"
    make_adapter(root / "one", 1)
    make_adapter(root / "two", 2, rank=4, alpha=32, targets=("q_proj", "v_proj"))
    make_adapter(root / "broken", 3)
    (root / "broken/adapter_model.safetensors").write_bytes(b"nothing of use")
    expected = {name: reference(model, root / name if name else None, folder / f"merged-{name}") for name in ("", "one", "two")}
    assert len({tuple(answer) for answer in expected.values()}) == 3
    settings = AdapterSettings(most=2, max_rank=16, root=str(root))
    configs: list[WorkerConfig] = [worker_config(role, model, adapters=settings, **changes) for role in ("prefill", "decode")]
    with running(configs[0], addresses[0], folder, **env) as prefill, running(configs[1], addresses[1], folder, **env) as decode:
        yield Adapted(prefill, decode, expected)


def reference(model: Path, adapter: Path | None, folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(merged(model, adapter, folder) if adapter else model, torch_dtype=torch.float32)
    with torch.inference_mode():
        out = loaded.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
    return out[0, len(PROMPT) :].tolist()


class AdapterConformance:
    """One suite for all engines."""

    @pytest.fixture(autouse=True)
    def _fresh(self, adapted: Adapted) -> None:
        adapted.tell()

    def test_right_tokens_under_each_and_over_each_others_cache(self, adapted: Adapted):
        adapted.tell(a="one", b="two")
        for worker in (adapted.prefill, adapted.decode):
            for _ in range(2):
                for model, name in (("a", "one"), ("tiny", ""), ("b", "two")):
                    assert tokens(ask(worker, model)) == adapted.expected[name], (worker.ip, model)

    def test_both_in_one_batch(self, adapted: Adapted):
        adapted.tell(a="one", b="two")
        right = {"a": adapted.expected["one"], "b": adapted.expected["two"], "tiny": adapted.expected[""]}
        models = [*right] * 3
        with ThreadPoolExecutor(len(models)) as pool:
            answers = list(pool.map(lambda model: tokens(ask(adapted.decode, model)), models))
        wrong = [(model, said, right[model]) for model, said in zip(models, answers, strict=True) if said != right[model]]
        assert not wrong, wrong

    def test_models_lists_them_with_their_parent(self, adapted: Adapted):
        adapted.tell(a="one")
        cards = httpx.get(adapted.decode.engine + "/v1/models", timeout=10).json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [("tiny", None), ("a", "tiny")]

    def test_prefill_there_decode_here_under_an_adapter(self, adapted: Adapted):
        adapted.tell(a="one")
        moved = adapted.decode.metric("vllm:nixl_xfer_time_seconds_count")
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        first = ask(adapted.prefill, "a", max_tokens=1, kv_transfer_params=params)
        assert first.status_code == 200, first.text
        given = first.json()["kv_transfer_params"]
        assert tokens(ask(adapted.decode, "a", kv_transfer_params=given)) == adapted.expected["one"]
        eventually(lambda: adapted.decode.metric("vllm:nixl_xfer_time_seconds_count") > moved)

    def test_another_content_under_a_name_is_another_adapter(self, adapted: Adapted):
        adapted.tell(a="one")
        assert tokens(ask(adapted.decode, "a")) == adapted.expected["one"]
        adapted.tell(a="two")
        eventually(lambda: all(entry["source"] == "two" for entry in report(adapted.decode)), LOAD_S)
        assert tokens(ask(adapted.decode, "a")) == adapted.expected["two"], "not over the KV of the version before"

    def test_unloading_leaves_a_running_request_alone(self, adapted: Adapted):
        adapted.tell(a="one")
        expected = tokens(ask(adapted.decode, "a", max_tokens=300, ignore_eos=True))
        body = {
            "model": "a", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "stream": True,
        }  # fmt: skip
        found: list[int] = []
        with httpx.stream("POST", adapted.decode.engine + "/v1/completions", json=body, timeout=60) as answer:
            for number, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
                found += [t for choice in json.loads(line[6:])["choices"] for t in choice["token_ids"]]
                if number == 3:
                    httpx.post(adapted.decode.agent + "/adapters", json=[], timeout=10).raise_for_status()
        assert found == expected
        eventually(lambda: ask(adapted.decode, "a", max_tokens=1).status_code == 404, LOAD_S)
        assert tokens(ask(adapted.decode, "tiny")) == adapted.expected[""]

    def test_a_broken_one_is_told_and_hurts_nobody(self, adapted: Adapted):
        adapted.tell(a="one", broken="broken")
        entry = next(entry for entry in report(adapted.decode) if entry["name"] == "broken")
        assert (entry["state"], entry["reason"], bool(entry["message"])) == ("Failed", "BadAdapter", True)
        assert ask(adapted.decode, "broken").status_code == 404
        assert tokens(ask(adapted.decode, "a")) == adapted.expected["one"]
        assert tokens(ask(adapted.decode, "tiny")) == adapted.expected[""]
