"""The end of a day: two engines that each ask a clock what day it is are given one prompt, as token ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_router.midnight import is_near
from fleet_router.request import reference_of
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import Rig, run

NOON, NIGHT = 20_000.5 * 86_400, 20_001.0 * 86_400 - 1
VLLM = {"do_remote_prefill": True, "remote_block_ids": [1]}


@pytest.mark.parametrize(
    ("before_s", "near"),
    [(43_200, False), (901, False), (900, True), (1, True), (0, True), (-30, True), (-59, True), (-60, False)],
)
def test_what_is_near(before_s: float, near: bool):
    """Clocks of machines differ by less than a minute, everywhere else: here it was over after 5 s of the router's own."""
    assert is_near(NIGHT + 1 - before_s) is near


def prefills(reference: dict[str, Any]) -> Any:
    """As vLLM and the torch engine do: the prompt's tokens are told to whoever asks."""

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        told = {"prompt_token_ids": [5, 6, 7]} if body.get("return_token_ids") else {}
        answer(writer, 200, {"choices": [], "kv_transfer_params": reference, **told})
        return True

    return behave


@pytest.mark.parametrize(
    ("wall", "path", "reference", "asked", "given"),
    [
        (NIGHT, "/v1/chat/completions", VLLM, True, [5, 6, 7]),
        (NOON, "/v1/chat/completions", VLLM, False, None),
        (NIGHT, "/v1/completions", VLLM, False, None),
        (NIGHT, "/v1/chat/completions", {**VLLM, "lease_id": "lease-1"}, False, None),
    ],
    ids=["vllm", "noon", "no-template", "torch"],
)
def test_towards_midnight_the_decode_worker_renders_nothing_of_its_own(
    wall: float, path: str, reference: dict[str, Any], asked: bool, given: list[int] | None
):
    """KV of `today is the 26th` was read for a prompt with the 27th in it, and lay in the decode worker's cache for that."""

    async def go(rig: Rig) -> None:
        rig.prefill[0].behave = prefills(reference)
        rig.context.wall = lambda: wall
        more: list[dict[str, Any]] = [{}, {}, {"return_token_ids": False}]
        for text, one in zip("xyz", more, strict=True):  # the first tells what engine it is
            turns = {"messages": [{"role": "user", "content": text * 2000}]} if "chat" in path else {"prompt": text * 2000}
            assert (await rig.post({"model": "m", **turns, **one}, path))[0] == 200
        assert len(rig.prefill[0].seen) == len(rig.decode[0].seen) == 3
        for prefill, decode in zip(rig.prefill[0].seen[1:], rig.decode[0].seen[1:], strict=True):
            assert prefill.get("return_token_ids", False) is asked
            assert decode["kv_transfer_params"].get("prompt_token_ids") == given
            assert decode["kv_transfer_params"]["remote_block_ids"] == [1]
            assert decode.get("return_token_ids") in (None, False), "the client's own"

    run(go)


@pytest.mark.parametrize(
    ("answered", "found"),
    [
        ({"kv_transfer_params": VLLM, "prompt_token_ids": [1]}, {**VLLM, "prompt_token_ids": [1]}),
        ({"kv_transfer_params": VLLM, "prompt_token_ids": None}, VLLM),
        ({"kv_transfer_params": {}, "prompt_token_ids": [1]}, {}),
        ({"kv_transfer_params": {**VLLM, "lease_id": "l"}, "prompt_token_ids": [1]}, {**VLLM, "lease_id": "l"}),
        ({"kv_transfer_params": None, "prompt_token_ids": [1]}, None),
    ],
)
def test_a_reference_with_its_prompt(answered: dict[str, Any], found: dict[str, Any] | None):
    raw = json.dumps(answered).encode()
    told = reference_of(raw, ids=True)
    assert (None if told is None else json.loads(told)) == found
    plain = reference_of(raw)
    assert (None if plain is None else json.loads(plain)) == answered["kv_transfer_params"]
