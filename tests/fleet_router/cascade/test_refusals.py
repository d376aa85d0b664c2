"""What a client is told when a tier's worker refuses its request: which tier that was, in every dialect."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_router.config import TierRule
from tests.fleet_router.cascade.ladder import CHAT, TALK, Ladder, climbing, config

SAID = b'{"error":{"message":"temperature is 9","param":"temperature"}}'
ASKED: dict[str, dict[str, Any]] = {
    CHAT: TALK, "/v1/messages": {**TALK, "max_tokens": 9}, "/v1/responses": {"model": "m", "input": "x"},
}  # fmt: skip


def refusing(*, chunked: bool) -> Any:
    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SAID), SAID) if chunked else SAID
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(SAID)
        writer.write(b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\n" + framing + b"\r\n\r\n" + body)
        return True

    return behave


@pytest.mark.parametrize("path", list(ASKED))
@pytest.mark.parametrize(("headers", "tier"), [((), "small"), (("x-tier: large",), "large")], ids=["draft", "rule"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_refusal_names_the_tier_that_refused(path: str, headers: tuple[str, ...], tier: str, chunked: bool, stream: bool):
    async def go(ladder: Ladder) -> None:
        for name in ladder.tiers:
            ladder.behave(name, refusing(chunked=chunked))
        found, named, body = await ladder.talk(path, headers, **ASKED[path], stream=stream)
        error = json.loads(body)["error"]
        assert (found, named, error["message"]) == (400, tier, "temperature is 9")
        assert error.get("param") == (None if path == "/v1/messages" else "temperature")
        assert {name: count for name, count in ladder.asked.items() if count} == {tier: 1}
        assert ladder.counted()['fleet_router_requests_total{code="400"}'] == 1

    climbing(go, config(tier_rules=(TierRule(tier="large", headers={"x-tier": "large"}),)))
