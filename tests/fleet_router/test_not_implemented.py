"""501: the worker has no such thing. That refuses the request, and says nothing against the worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import LONG, Rig, run

WORDS = "Tool usage is only supported for Chat Completions API"
SAID = [{"role": "user", "content": "x"}]
TOOLS = [{"name": "f", "input_schema": {}}]


async def has_no_such_thing(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    answer(writer, 501, {"error": {"message": WORDS, "type": "NotImplementedError", "param": None, "code": 501}})
    return True


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/tokenize", {"messages": SAID}, "NotImplementedError"), ("/v1/embeddings", {"input": "x"}, "NotImplementedError"),
        ("/v1/messages/count_tokens", {"messages": SAID, "tools": TOOLS}, "api_error"),
        ("/v1/chat/completions", {"messages": SAID}, "NotImplementedError"),
        ("/v1/completions", {"prompt": "x", "stream": True}, "NotImplementedError"),
        ("/v1/messages", {"messages": SAID, "max_tokens": 4, "stream": True}, "api_error"),
        ("/v1/responses", {"input": "x"}, "server_error"),
    ],
)  # fmt: skip
def test_what_no_worker_has_is_told_and_puts_nobody_out(path: str, body: dict[str, Any], kind: str):
    """Incident: vLLM with a tool parser answers 501 to /tokenize with tools. Five questions of one client for the tokens of its
    prompt put a worker out, each asked two of them, and it was told 502."""

    async def go(rig: Rig) -> None:
        for worker in rig.decode:
            worker.behave = has_no_such_thing
        for asked in range(1, 7):
            status, got = await rig.post({"model": "m", **body}, path)
            told = json.loads(got)["error"]
            assert (status, told["message"], told["type"]) == (501, WORDS, kind)
            assert sum(len(worker.seen) for worker in rig.decode) == asked
        assert [worker.breaker.until for worker in rig.context.table.by_role["decode"]] == [0.0, 0.0]
        assert rig.context.metrics.of("t", "r").errors == 0

    run(go, prefill=0, decode=2)


def test_what_no_prefill_worker_has_is_told_too():
    async def go(rig: Rig) -> None:
        rig.prefill[0].behave = has_no_such_thing
        status, got = await rig.post({"model": "m", "prompt": LONG})
        assert (status, json.loads(got)["error"]["message"], rig.decode[0].seen) == (501, WORDS, [])
        assert rig.context.metrics.of("t", "r").errors == 0

    run(go)
