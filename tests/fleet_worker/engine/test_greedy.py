"""Greedy output equals transformers token for token, however the work is cut and batched."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fleet_wire.blocks import root_hash
from fleet_worker.engine.blocks import BlockAllocator
from fleet_worker.engine.core import EngineCore, Limits
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.sequence import Sampling, Sequence

BLOCK = 16


def engine(llama: Llama, blocks: int = 256, batch: int = 16, step_tokens: int = 256) -> EngineCore:
    limits = Limits(max_model_len=2048, max_batch=batch, step_tokens=step_tokens, max_waiting=1000)
    return EngineCore(llama, BlockAllocator(blocks), llama.new_pool(blocks), root_hash("tiny", BLOCK), limits, (2,))


def run(core: EngineCore, prompts: dict[str, list[int]], max_tokens: int = 24, **sampling: object) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        params = Sampling(max_tokens=max_tokens, **sampling)
        core.add(Sequence(name, tuple(prompt), params, params.seed or 0, arrived_at=0.0))
    answers: dict[str, list[int]] = {}
    for _ in range(100_000):
        for output in core.step():
            if output.finish:
                answers[output.sequence.request_id] = list(output.sequence.output)
        if not core.has_work():
            break
    core.check_integrity()
    assert core.scheduler.blocks.used == 0
    return answers


def prompts(count: int, seed: int = 1, longest: int = 200) -> dict[str, list[int]]:
    chance = random.Random(seed)
    shared = [chance.randrange(3, 1024) for _ in range(64)]
    made = {}
    for i in range(count):
        own = [chance.randrange(3, 1024) for _ in range(chance.randrange(1, longest))]
        made[f"r{i}"] = (shared[: chance.randrange(0, 64)] if i % 2 else []) + own
    return made


@pytest.fixture(scope="session")
def reference(tiny: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, torch_dtype=torch.float32)

    def generate(prompt: list[int], max_tokens: int) -> list[int]:
        with torch.inference_mode():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        return out[0, len(prompt) :].tolist()

    return generate


def test_greedy_equals_transformers(llama: Llama, reference):
    asked = prompts(8)
    assert run(engine(llama), asked) == {name: reference(prompt, 24) for name, prompt in asked.items()}


@pytest.mark.parametrize(
    ("blocks", "batch", "step_tokens"),
    [(256, 1, 256), (256, 16, 7), (40, 16, 64)],
    ids=["one-at-a-time", "chunks-of-seven", "pool-so-small-that-it-preempts"],
)
def test_tokens_do_not_depend_on_how_the_work_is_cut(llama: Llama, blocks: int, batch: int, step_tokens: int):
    asked = prompts(24, seed=3)
    assert run(engine(llama, blocks, batch, step_tokens), asked) == run(engine(llama, 2000, 8, 512), asked)


def test_a_cached_prefix_changes_nothing_but_the_work(llama: Llama):
    core, asked = engine(llama), prompts(6, seed=5)
    first = run(core, asked)
    assert run(core, {f"again-{k}": v for k, v in asked.items()}) == {f"again-{k}": v for k, v in first.items()}
    assert core.scheduler.prefix_hits > 0


def test_a_seeded_sample_is_the_same_in_any_batch(llama: Llama):
    asked = prompts(6, seed=7)
    params = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 11}
    alone = {name: run(engine(llama), {name: prompt}, **params)[name] for name, prompt in asked.items()}
    assert run(engine(llama), asked, **params) == alone
    assert run(engine(llama), asked, **{**params, "seed": 12}) != alone
