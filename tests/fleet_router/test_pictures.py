"""Prompts with pictures: what their bytes say of tokens, and what they may not teach of others'."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.config import HttpBounds, TierRule
from fleet_router.workers import WorkerTable
from tests.fleet_router.fake_worker import REFERENCE, answer
from tests.fleet_router.rig import CONFIG, LONG, Rig, run

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 300_000}}
TEXT = {"type": "text", "text": "x" * 400}
CHAT = "/v1/chat/completions"
LARGE = msgspec.structs.replace(CONFIG, bounds=HttpBounds(body_bytes=1_000_000))


def said(*parts: Any) -> bytes:
    return json.dumps([{"role": "user", "content": list(parts)}]).encode()


@pytest.mark.parametrize(
    ("prompt", "least", "most"),
    [
        (said(PICTURE, TEXT), 1_024, 1_400), (said(TEXT), 90, 130), (b"[1,2,3]", 3, 3), (b"", 1, 1), 
        (b'"' + b"x" * 400 + b'"', 100, 101),
    ],
)  # fmt: skip
def test_a_picture_is_so_many_tokens_for_rules_and_thresholds_too(prompt: bytes, least: int, most: int):
    """One of 300 KB was taken for 75,000 tokens of text: it went to the tier for long prompts."""
    assert least <= WorkerTable().tokens_of(prompt) <= most


def counts(tokens: int) -> Any:
    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if "do_remote_decode" not in body.get("kv_transfer_params", {}):
            return False
        answer(writer, 200, {"choices": [], "kv_transfer_params": REFERENCE, "usage": {"prompt_tokens": tokens}})
        return True

    return behave


@pytest.mark.parametrize(
    ("body", "path", "tokens", "learns"),
    [
        ({"messages": json.loads(said(PICTURE, TEXT))}, CHAT, 800, False), ({"prompt": LONG}, "/v1/completions", 250, True),
        ({"prompt": list(range(10_000, 10_400))}, "/v1/completions", 400, False),
        ({"prompt": LONG[:600]}, "/v1/completions", 2_000, False), ({"messages": json.loads(said(TEXT))}, CHAT, 110, True),
        ({"messages": json.loads(said(TEXT)), "tools": [{"d": LONG}]}, CHAT, 1_400, False),
        ({"messages": json.loads(said(TEXT)), "documents": [{"text": LONG}]}, CHAT, 1_400, False),
        ({"messages": json.loads(said(TEXT)), "chat_template_kwargs": {"a": LONG}}, CHAT, 1_400, False),
        ({"messages": json.loads(said(TEXT)), "chat_template_kwargs": {"enable_thinking": False}}, CHAT, 115, True),
    ],
    ids=["picture", "text", "ids", "more-tokens-than-bytes", "chat", "tools", "documents", "arguments", "switch"],
)  # fmt: skip
def test_only_text_teaches_what_a_token_of_text_is(body: dict[str, Any], path: str, tokens: int, learns: bool):
    """One picture made everybody's prompts sixteen times as short as they are; the tools of agents, whose tokens stand for bytes
    that were not counted, made them ten times as long."""

    async def go(rig: Rig) -> None:
        rig.prefill[0].behave = counts(tokens)
        value = rig.context.table.routing.bytes_per_token.value
        assert (await rig.post({"model": "m", **body}, path))[0] == 200
        assert rig.context.metrics.remote_prefills == 1
        assert (rig.context.table.routing.bytes_per_token.value != value) is learns

    run(go, config=LARGE)


def test_a_tier_for_short_prompts_gets_a_picture_with_a_question():
    rules = (TierRule(tier="small", tokens_lt=2_000), TierRule(tier="t"))

    async def go(rig: Rig) -> None:
        rig.decode[1].tier = "small"
        rig.apply([], rig.decode, msgspec.structs.replace(LARGE, tier_rules=rules))
        assert (await rig.post({"model": "m", "messages": json.loads(said(PICTURE, TEXT))}, CHAT))[0] == 200
        assert [len(worker.seen) for worker in rig.decode] == [0, 1]

    run(go, prefill=0, decode=2)


def test_prefilled_tokens_are_not_bytes_of_pictures():
    async def go(rig: Rig) -> None:
        await rig.post({"model": "m", "messages": json.loads(said(PICTURE, TEXT))}, CHAT)
        assert 1_024 <= rig.context.metrics.prefill_tokens <= 1_400

    run(go, config=LARGE)
