"""Adapters in the engine: greedy output equals transformers on merged weights, mixed in one batch, and no KV crosses over."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_wire.blocks import root_hash
from fleet_worker.engine.adapterfiles import load_adapter
from fleet_worker.engine.blocks import BlockAllocator
from fleet_worker.engine.core import EngineCore, Limits
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.lora import Adapter
from fleet_worker.engine.sequence import Sampling, Sequence
from tests.adapters import make_adapter, merged

BLOCK = 16
Generate = Callable[[list[int], int], list[int]]


def loaded(llama: Llama, name: str, folder: Path) -> Adapter:
    return load_adapter(name, folder, llama.config, llama.dtype, 64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of different ranks, targets and scalings."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "all": make_adapter(root / "all", 1),
        "attention": make_adapter(root / "attention", 2, rank=4, alpha=32, targets=("q_proj", "v_proj")),
        "mlp-rs": make_adapter(root / "mlp-rs", 3, rank=16, alpha=8, targets=("up_proj", "down_proj"), use_rslora=True),
    }


@pytest.fixture(scope="module")
def adapters(llama: Llama, folders: dict[str, Path]) -> dict[str, Adapter | None]:
    return {"": None, **{name: loaded(llama, name, folder) for name, folder in folders.items()}}


@pytest.fixture(scope="module")
def reference(tiny: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Generate]:
    """transformers on the plain and on the merged weights."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("merged")
    places = {"": tiny, **{name: merged(tiny, folder, root / name) for name, folder in folders.items()}}

    def of(folder: Path) -> Generate:
        model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)

        def generate(prompt: list[int], count: int) -> list[int]:
            with torch.inference_mode():
                out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
            return out[0, len(prompt) :].tolist()

        return generate

    return {name: of(folder) for name, folder in places.items()}


def engine(llama: Llama, blocks: int = 256, batch: int = 16, step_tokens: int = 256) -> EngineCore:
    limits = Limits(max_model_len=2048, max_batch=batch, step_tokens=step_tokens, max_waiting=1000)
    return EngineCore(llama, BlockAllocator(blocks), llama.new_pool(blocks), root_hash("tiny", BLOCK), limits, (2,))


Asked = dict[str, tuple[Adapter | None, list[int]]]


def run(core: EngineCore, asked: Asked, max_tokens: int = 24) -> dict[str, list[int]]:
    for name, (adapter, prompt) in asked.items():
        core.add(Sequence(name, tuple(prompt), Sampling(max_tokens=max_tokens), 0, arrived_at=0.0, adapter=adapter))
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


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, 1024) for _ in range(chance.randrange(1, 150))] for _ in range(count)]


def test_a_mixed_batch_equals_transformers_on_merged_weights(
    llama: Llama, adapters: dict[str, Adapter | None], reference: dict[str, Generate]
):
    """Every prompt under every adapter, all of them in one batch."""
    made = prompts(4)
    asked = {f"{name}/{i}": (adapter, prompt) for i, prompt in enumerate(made) for name, adapter in adapters.items()}
    answers = run(engine(llama), asked)
    assert answers == {f"{name}/{i}": reference[name](prompt, 24) for i, prompt in enumerate(made) for name in adapters}
    for i in range(len(made)):
        assert len({tuple(answers[f"{name}/{i}"]) for name in adapters}) == len(adapters), "an adapter that changes nothing"


@pytest.mark.parametrize(
    ("blocks", "batch", "step_tokens"),
    [(256, 1, 256), (256, 16, 7), (40, 16, 64)],
    ids=["one-at-a-time", "chunks-of-seven", "pool-so-small-that-it-preempts"],
)
def test_tokens_do_not_depend_on_how_the_work_is_cut(
    llama: Llama, adapters: dict[str, Adapter | None], blocks: int, batch: int, step_tokens: int
):
    names = list(adapters)
    asked = {f"r{i}": (adapters[names[i % len(names)]], prompt) for i, prompt in enumerate(prompts(16, seed=3))}
    assert run(engine(llama, blocks, batch, step_tokens), asked) == run(engine(llama, 2000, 8, 512), asked)


def test_a_prefix_is_shared_inside_an_adapter_and_never_across(llama: Llama, adapters: dict[str, Adapter | None]):
    prompt = list(range(5, 120))
    fresh = {name: run(engine(llama), {"r": (adapter, prompt)})["r"] for name, adapter in adapters.items()}
    core = engine(llama)
    for name, adapter in adapters.items():
        before = core.scheduler.prefix_hits
        assert run(core, {"r": (adapter, prompt)})["r"] == fresh[name]
        assert core.scheduler.prefix_hits == before, "KV of another adapter was used"
    for name, adapter in adapters.items():
        before = core.scheduler.prefix_hits
        assert run(core, {"r": (adapter, prompt)})["r"] == fresh[name]
        assert core.scheduler.prefix_hits == before + 112, "its own KV was not"


def test_another_content_under_the_same_name_is_another_adapter(llama: Llama, tmp_path: Path):
    first = loaded(llama, "a", make_adapter(tmp_path / "1", 10))
    second = loaded(llama, "a", make_adapter(tmp_path / "2", 11))
    again = loaded(llama, "a", make_adapter(tmp_path / "3", 10))
    assert (first.salt == again.salt, first.salt == second.salt) == (True, False)
    core, prompt = engine(llama), list(range(5, 100))
    run(core, {"r": (first, prompt)})
    before = core.scheduler.prefix_hits
    assert run(core, {"r": (second, prompt)}) == run(engine(llama), {"r": (second, prompt)})
    assert core.scheduler.prefix_hits == before
    run(core, {"r": (again, prompt)})
    assert core.scheduler.prefix_hits > before, "the same content is the same adapter, loaded again"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.tuples(st.sampled_from(["", "all", "attention", "mlp-rs"]), st.integers(0, 2)), max_size=8))
def test_any_order_of_adapters_over_a_warm_cache_gives_the_same_tokens(
    llama: Llama, adapters: dict[str, Adapter | None], order: list[tuple[str, int]]
):
    """Prompts share prefixes, the cache is warm from whatever ran before."""
    shared = list(range(7, 60))
    made = [shared[:20], shared, [*shared, *range(300, 330)]]
    core = engine(llama, blocks=40)
    for number, (name, which) in enumerate(order):
        answer = run(core, {f"r{number}": (adapters[name], made[which])}, max_tokens=6)[f"r{number}"]
        key = (name, which)
        if key not in _ALONE:
            _ALONE[key] = run(engine(llama), {"r": (adapters[name], made[which])}, max_tokens=6)["r"]
        assert answer == _ALONE[key]


_ALONE: dict[tuple[str, int], list[int]] = {}
