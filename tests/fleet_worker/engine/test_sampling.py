"""Every sampling parameter changes what it says and nothing else: exact sets of tokens, and shares of them over fixed seeds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from fleet_wire.blocks import root_hash
from fleet_worker.engine.blocks import BlockAllocator
from fleet_worker.engine.core import EngineCore, Limits
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.protocol import CompletionRequest, parse, sampling_of
from fleet_worker.engine.sampler import draw, sample
from fleet_worker.engine.sequence import Defaults, Sampling, Sequence, finish_reason
from tests.fleet_worker.engine.test_server import serve

LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 3.0, -2.0, 0.5, -40.0])
DRAWS = 4_000


def drawn(**params: Any) -> Counter[int]:
    sampling = Sampling(**{"temperature": 1.0, **params})
    return Counter(draw(LOGITS.clone(), Sequence("s", (1,), sampling, seed, 0.0)) for seed in range(DRAWS))


def shares(logits: torch.Tensor, temperature: float) -> list[float]:
    return (logits / temperature).softmax(-1).tolist()


# -- shares -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_tokens_come_as_often_as_the_temperature_says(temperature: float):
    found = drawn(temperature=temperature)
    for token, share in enumerate(shares(LOGITS, temperature)):
        spread = (share * (1 - share) / DRAWS) ** 0.5
        assert abs(found[token] / DRAWS - share) < 4.5 * spread + 1e-4, (token, found[token] / DRAWS, share)


def test_what_top_p_and_top_k_leave_keeps_its_shares():
    cut = LOGITS.clone()
    cut[[1, 3, 5, 6, 7]] = float("-inf")
    for params in ({"top_k": 3}, {"top_p": 0.87}):
        found = drawn(**params)
        for token, share in enumerate(shares(cut, 1.0)):
            assert abs(found[token] / DRAWS - share) < 0.035, (params, token)


# -- exact sets -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("top_k", "tokens"),
    [(1, {4}), (2, {4, 0}), (3, {4, 0, 2}), (4, {4, 0, 2, 6}), (0, {0, 1, 2, 3, 4, 5, 6}), (8, {0, 1, 2, 3, 4, 5, 6})],
)
def test_top_k_leaves_the_k_best_and_all_of_them(top_k: int, tokens: set[int]):
    assert drawn(top_k=top_k, temperature=1.5).keys() == tokens


@pytest.mark.parametrize(
    ("top_p", "tokens"),  # sums in order of probability: 4 0.602, 0 0.824, 2 0.905, 6 0.955, 1 0.985, 3 0.996, 5 1.000
    [(1e-300, {4}), (1e-9, {4}), (0.55, {4}), (0.7, {4, 0}), (0.85, {4, 0, 2}), (0.93, {4, 0, 2, 6}), (0.97, {4, 0, 2, 6, 1}),
     (1.0, {0, 1, 2, 3, 4, 5, 6})],
)  # fmt: skip
def test_top_p_leaves_the_smallest_set_that_reaches_it(top_p: float, tokens: set[int]):
    assert drawn(top_p=top_p).keys() == tokens


def test_top_p_is_of_the_scaled_probabilities():
    """At temperature 0.1 the best token alone has 0.99995 of them."""
    assert drawn(temperature=0.1, top_p=0.999).keys() == {4}
    assert len(drawn(temperature=2.0, top_p=0.999)) == 7


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_no_temperature_is_the_best_token(temperature: float):
    sampling = Sampling(temperature=temperature, top_p=0.9, top_k=5)
    rows = [Sequence("s", (1,), sampling, seed, 0.0) for seed in range(50)]
    assert set(sample(LOGITS.repeat(50, 1), rows, ())) == {4}


# -- noise ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shift", [31, 32, 47, 62])
def test_all_of_a_seed_counts(shift: int):
    """Torch's generator for CPUs reads the lower 32 bits alone: with seeds such as (shard << 32) + n all shards had the same
    answers to the same prompts, and all multiples of 2**31 two."""
    seeds = [number << shift for number in range(2 ** min(9, 63 - shift))]
    logits = torch.zeros(1024)
    found = {
        draw(logits.clone(), Sequence("s", (1,), Sampling(temperature=1.0), sign * seed, 0.0))
        for seed in seeds
        for sign in (1, -1)
    }
    assert len(found) >= min(300, len(seeds))


def test_each_position_and_each_seed_has_noise_of_its_own():
    even = torch.zeros(1024)

    def tokens(seed: int) -> list[int]:
        sequence, found = Sequence("s", (1,), Sampling(temperature=1.0), seed, 0.0), []
        for _ in range(100):
            found.append(draw(even.clone(), sequence))
            sequence.output.append(found[-1])
        return found

    first = tokens(1)
    assert first == tokens(1)
    assert len(set(first)) > 85  # 100 of 1,024 without a rule: 95 different ones on average
    other = tokens(2)
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5
    assert not set(pairwise(first)) & set(pairwise(other))


# -- ends -------------------------------------------------------------------------------------------------------------------
EOS, STOP = 2, 7
WANTED = torch.zeros(16)
WANTED[[EOS, STOP, 9, 11]] = torch.tensor([4.0, 3.0, 2.0, 1.0])


@dataclass
class Wishing:
    """A model that always wants the same tokens: the end first, then STOP, 9, 11."""

    block_tokens: int = 16
    weights_digest: str = "w"
    config: Any = None

    def __post_init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=16)

    def forward(self, tokens: list[int], chunks: list[Any], pool: Any) -> torch.Tensor:
        return WANTED.repeat(len(chunks), 1)


def answer(**params: Any) -> tuple[list[int], str | None]:
    limits = Limits(max_model_len=256, max_batch=4, step_tokens=64, max_waiting=4)
    core = EngineCore(Wishing(), BlockAllocator(16), torch.zeros(1), root_hash("m", 16), limits, (EOS,))  # type: ignore[arg-type]
    sequence = Sequence("s", (1, 3), Sampling(**{"max_tokens": 6, **params}), 0, 0.0)
    core.add(sequence)
    while core.has_work():
        core.step()
    return sequence.output, sequence.finish


ENDS: dict[str, tuple[dict[str, Any], list[int], str]] = {
    "end-token": ({}, [EOS], "stop"),
    "ignored-end-token": ({"ignore_eos": True}, [EOS] * 6, "length"),
    "stop-token-is-not-wanted": ({"stop_token_ids": (9,)}, [EOS], "stop"),
    "stop-token": ({"ignore_eos": True, "stop_token_ids": (EOS,)}, [EOS], "stop"),
    "least-0": ({"min_tokens": 0}, [EOS], "stop"),
    "least-1": ({"min_tokens": 1}, [STOP, EOS], "stop"),
    "least-3": ({"min_tokens": 3}, [STOP, STOP, STOP, EOS], "stop"),
    "least-3-stop": ({"min_tokens": 3, "stop_token_ids": (STOP,)}, [9, 9, 9, EOS], "stop"),
    "least-is-most": ({"min_tokens": 6}, [STOP] * 6, "length"),
    "least-is-most-but-one": ({"min_tokens": 5}, [STOP] * 5 + [EOS], "stop"),
    "two-stops": ({"min_tokens": 1, "stop_token_ids": (STOP, 9)}, [11, EOS], "stop"),
    "least-and-ignored": ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": (STOP,)}, [9, 9, EOS, EOS, EOS, EOS], "length"),
    "most-1": ({"max_tokens": 1, "ignore_eos": True}, [EOS], "length"),
}


@pytest.mark.parametrize(("params", "tokens", "finish"), ENDS.values(), ids=ENDS)
def test_an_answer_ends_where_its_parameters_say(params: dict[str, Any], tokens: list[int], finish: str):
    assert answer(**params) == (tokens, finish)


@pytest.mark.parametrize(("tokens", "finish"), [(1, None), (3, None), (4, "stop"), (5, "stop")])
def test_an_end_token_inside_the_least_length_ends_nothing(tokens: int, finish: str | None):
    sequence = Sequence("s", (1,), Sampling(max_tokens=9, min_tokens=3, stop_token_ids=(STOP,)), 0, 0.0, output=[STOP] * tokens)
    assert finish_reason(sequence, STOP, (EOS,)) == finish


ADVISED = Defaults(temperature=0.6, top_p=0.9, top_k=20)


@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        ({}, (0.6, 0.9, 20)),
        ({"temperature": 1}, (1.0, 0.9, 20)),
        ({"temperature": 0, "top_p": 1, "top_k": 0}, (0.0, 1.0, 0)),
        ({"top_k": -1}, (0.6, 0.9, 0)),
        ({"temperature": None, "top_p": None, "top_k": None}, (0.6, 0.9, 20)),
    ],
)
def test_who_does_not_say_how_to_sample_gets_what_the_models_makers_advise(
    given: dict[str, Any], sampled: tuple[float, float, int]
):
    """As with vLLM: Llama 3's answers were sampled at temperature 1, and wandered."""
    asked = parse(json.dumps({"model": "m", "prompt": "a", **given}).encode(), CompletionRequest)
    found = sampling_of(asked, 100, 100, ADVISED)
    assert (found.temperature, found.top_p, found.top_k) == sampled


def test_the_server_goes_by_it():
    answers: list[list[int]] = []

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        for given in ({}, {"temperature": 0}, {"temperature": 1, "seed": 3}):
            asked = {"model": "tiny", "prompt": "the router", "max_tokens": 8, "return_token_ids": True, **given}
            answers.append((await client.post("/v1/completions", json=asked)).json()["choices"][0]["token_ids"])

    serve(scenario, defaults=Defaults(temperature=0.0))
    assert answers[0] == answers[1] != answers[2]
