"""vLLM is asked for a grammar before any client can: its first one decides how all are compiled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from fleet_worker.agent.engine_client import EngineClient

Asked = list[tuple[str, dict[str, Any]]]


def asked_of(answers: dict[str, int], *, ranks: int = 1, told: list[str | None] | None = None) -> tuple[str | None, Asked]:
    """What a first token says of an engine that answers so, and what it was asked. 0: it breaks off."""
    seen: Asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        seen.append((request.url.path, body))
        if told is not None:
            told.append(request.headers.get("x-data-parallel-rank"))
        status = answers.get(request.url.path, 200) if "response_format" in body else answers.get("first", 200)
        if status == 0:
            raise httpx.ReadError("broken off")
        return httpx.Response(status, json={})

    async def go() -> str | None:
        client = EngineClient("http://engine", compiling=ranks)
        await client._http.aclose()
        client._http = httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer))
        try:
            return await client.first_token("m")
        finally:
            await client.close()

    return asyncio.run(go()), seen


def test_the_first_grammar_is_ours_and_behind_the_first_token():
    """A client's schema with `multipleOf` came first: until the next start every `tool_choice` required or named was 500 there,
    for everybody (vLLM 0.32 takes one compiler for all)."""
    problem, ((_, first), (path, body)) = asked_of({})
    assert problem is None
    assert "response_format" not in first
    assert (path, body["max_tokens"], body["response_format"]["type"]) == ("/v1/chat/completions", 1, "json_schema")


@pytest.mark.parametrize("status", [400, 500, 0])
def test_a_model_without_a_template_is_asked_for_a_completion(status: int):
    problem, seen = asked_of({"/v1/chat/completions": status})
    assert (problem, [path for path, _ in seen]) == (None, ["/v1/completions", "/v1/chat/completions", "/v1/completions"])
    assert "response_format" in seen[2][1]


def test_what_cannot_be_had_keeps_no_worker_from_serving():
    assert asked_of({"/v1/chat/completions": 400, "/v1/completions": 0})[0] is None


def test_without_a_first_token_no_grammar_is_asked_for():
    problem, seen = asked_of({"first": 500})
    assert (problem, len(seen)) == ("HTTP 500: {}", 1)


def test_the_torch_engine_has_no_grammars():
    assert [path for path, _ in asked_of({}, ranks=0)[1]] == ["/v1/completions"]


def test_each_data_parallel_rank_is_asked():
    """Each is an engine of its own, with a compiler of its own."""
    told: list[str | None] = []
    problem, seen = asked_of({}, ranks=3, told=told)
    assert (problem, told, len(seen)) == (None, [None, "0", "1", "2"], 4)
