"""Errors of translated requests: in the dialect's shape, and naming fields as the client wrote them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.config import HttpBounds
from fleet_router.ending import END, framed
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, LONG, Rig, run

MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"
SCHEMA = {"format": {"type": "json_schema", "name": "n", "schema": {"a": "x" * 70_000}}}


IMAGE = "messages[3].content[12].type is 'image_url'; served: 'text'"
"""Of the torch engine, about the chat request that was made of a dialect's."""


def asked(path: str, text: str = "short", /, **more: Any) -> dict[str, Any]:
    turns = {"messages": [{"role": "user", "content": text}]}
    said = {RESPONSES: {"input": text}, MESSAGES: {**turns, "max_tokens": 9}, COUNT: turns}[path]
    return {"model": "m", **said, **more}


def refusing(param: Any, message: str, *, chunked: bool = False, status: int = 400) -> Any:
    """A worker that answers with OpenAI's error object."""

    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        body = {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}
        if not chunked:
            answer(writer, status, body)
            return True
        raw = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(raw), raw))
        return True

    return behave


def told(path: str, body: bytes) -> tuple[str, Any]:
    """(message, param) in the shape that the path's clients read; Anthropic's has no param."""
    said = json.loads(body)
    if path != RESPONSES:
        assert (said["type"], said["error"]["type"]) in {("error", "invalid_request_error"), ("error", "not_found_error")}
    return said["error"]["message"], said["error"].get("param")


@pytest.mark.parametrize(
    ("path", "more", "message", "param"),
    [
        (RESPONSES, {"text": SCHEMA}, "text.format has 70067 bytes", "text.format"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format: json_schema needs", "text.format"),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type: Invalid", "text.format.type"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens is 0", "max_output_tokens"),
        (RESPONSES, {"input": []}, "input is empty", "input"),
        (RESPONSES, {"input": [{"type": "reasoning"}]}, "input is empty", "input"),
        (RESPONSES, {"stop": ["x"]}, "stop is no field of this request", "stop"),
        (RESPONSES, {"input": [{"type": "message", "role": "user"}]}, "input[0].content is required", "input"),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name is required", "tools[0].name"),
        (RESPONSES, {"x" * 9_000: 1}, "x" * 200 + " is no field", "x" * 200),
        (MESSAGES, {"seed": 1}, "seed is no field of this request", None),
        (MESSAGES, {"max_tokens": 0}, "max_tokens is 0", None),
        (MESSAGES, {"messages": []}, "messages is empty", None),
        (MESSAGES, {"stop_sequences": ["x"] * 70}, "stop_sequences has 70 strings", None),
    ],
)
def test_what_the_router_refuses_it_names_as_the_client_wrote_it(
    path: str, more: dict[str, Any], message: str, param: str | None
):
    async def go(rig: Rig) -> None:
        status, body = await rig.post(asked(path, **more), path)
        found, named = told(path, body)
        assert (status, named) == (400, param)
        assert found.startswith(message), found

    run(go, config=msgspec.structs.replace(CONFIG, bounds=HttpBounds(body_bytes=200_000)))


@pytest.mark.parametrize("text", ["short", LONG], ids=["decode", "prefill"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize(
    ("path", "worker", "expected"),
    [
        (RESPONSES, ("response_format", "response_format is not supported"), ("text.format is not supported", "text.format")),
        (RESPONSES, ("response_format", "response_format.type: no"), ("text.format.type: no", "text.format")),
        (RESPONSES, ("max_tokens", "max_tokens is 9"), ("max_output_tokens is 9", "max_output_tokens")),
        (RESPONSES, ("max_completion_tokens", "too many"), ("too many", "max_output_tokens")),
        (RESPONSES, ("reasoning_effort", "reasoning_effort: no"), ("reasoning.effort: no", "reasoning.effort")),
        (RESPONSES, ("messages", "messages[0]: no"), ("input[0]: no", "input")),
        (RESPONSES, ("prompt", "your prompt is long"), ("your prompt is long", "input")),
        (RESPONSES, ("tools", "tools: no"), ("tools: no", "tools")),
        (RESPONSES, ("temperature", "temperature is 9"), ("temperature is 9", "temperature")),
        (RESPONSES, (None, "no"), ("no", None)),
        (RESPONSES, (7, "no"), ("no", None)),
        (MESSAGES, ("stop", "stop takes 4"), ("stop_sequences takes 4", None)),
        (MESSAGES, ("stop", "stopped: no"), ("stopped: no", None)),
        (MESSAGES, ("messages", IMAGE), ("messages[].content[].type is 'image'; served: 'text'", None)),
        (RESPONSES, ("messages", IMAGE), ("input[].content[].type is 'input_image'; served: 'text'", "input")),
        (MESSAGES, ("prompt", "prompt holds 9"), ("messages holds 9", None)),
        (MESSAGES, ("reasoning_effort", "reasoning_effort is none"), ("thinking is none", None)),
        (MESSAGES, ("continue_final_message", "continue_final_message is no"), ("an assistant's last turn is no", None)),
        (
            MESSAGES,
            ("parallel_tool_calls", "parallel_tool_calls is not supported"),
            ("tool_choice.disable_parallel_tool_use is not supported", None),
        ),
    ],
)
def test_what_a_worker_refuses_is_told_in_the_clients_words(
    path: str, worker: tuple[Any, str], expected: tuple[str, str | None], chunked: bool, text: str
):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = rig.prefill[0].behave = refusing(*worker, chunked=chunked)
        for stream in (False, True):
            status, body = await rig.post(asked(path, text, stream=stream), path)
            assert (status, told(path, body)) == (400, expected)
        assert len(rig.prefill[0].seen) == (2 if text == LONG else 0)
        assert [worker.breaker.failures for worker in rig.context.table.workers.values()] == [0, 0]

    run(go)


def test_what_a_worker_does_not_count_is_told_in_the_clients_words():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = refusing("continue_final_message", "continue_final_message is not supported")
        status, body = await rig.post(asked(COUNT), COUNT)
        assert (status, told(COUNT, body)) == (400, ("an assistant's last turn is not supported", None))

    run(go)


@pytest.mark.parametrize(("path", "kind"), [(MESSAGES, "invalid_request_error"), (RESPONSES, "invalid_prompt")])
@pytest.mark.parametrize("param", [None, "thinking_token_budget"])
def test_a_refusal_behind_a_streams_head_is_the_clients(path: str, kind: str, param: str | None):
    """vLLM begins a stream before its engine has looked: thoughts in tokens of a model without a reasoning parser were
    `api_error`, `the worker broke the stream off` and a piece of JSON, which clients send again and again."""

    async def go(rig: Rig) -> None:
        error = {"message": "thinking_token_budget is set", "type": "BadRequestError", "param": param, "code": 400}

        async def refuses(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(framed(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"error": error}).encode()) + END)
            return True

        rig.decode[0].behave = refuses
        _, body = await rig.post(asked(path, stream=True), path)
        last = json.loads(body.rpartition(b"data: ")[2].split(b"\n")[0])
        found = last["error"] if path == MESSAGES else last["response"]["error"]
        words = "thinking.budget_tokens is set" if param and path == MESSAGES else "thinking_token_budget is set"
        assert (found.get("type") or found["code"], found["message"]) == (kind, words)
        assert rig.context.table.by_role["decode"][0].breaker.failures == 0

    run(go, prefill=0)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, COUNT])
@pytest.mark.parametrize("status", [400, 404])
def test_a_workers_refusal_has_the_shape_of_the_dialect(path: str, status: int):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = refusing("tools", "tools: no", status=status)
        found, body = await rig.post(asked(path), path)
        assert (found, told(path, body)[0]) == (status, "tools: no")

    run(go)


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        (
            MESSAGES,
            {"messages": [{"role": "x", "content": ""}]},
            "messages[0].role: Invalid enum value 'x'; allowed are assistant, system, user",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "video"}]}]},
            "messages[0].content[1].type: Invalid value 'video'; "
            "allowed are image, redacted_thinking, text, thinking, tool_result, tool_use",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": 5}]}]},
            "messages[0].content[1].text: Expected `str`, got `int`",
        ),
        (
            COUNT,
            {"messages": [{"role": "x", "content": ""}]},
            "messages[0].role: Invalid enum value 'x'; allowed are assistant, system, user",
        ),
        (RESPONSES, {"tool_choice": "x"}, "tool_choice: Invalid enum value 'x'; allowed are auto, none, required"),
        (RESPONSES, {"background": True}, "background: Invalid enum value True; allowed are false"),
        (
            RESPONSES,
            {"input": [{"type": "x"}]},
            "input[0].type: Invalid enum value 'x'; allowed are function_call, function_call_output, message, reasoning",
        ),
    ],
)
def test_a_refusal_names_the_field_by_its_path_and_lists_what_it_may_say(path: str, more: dict[str, Any], message: str):
    async def go(rig: Rig) -> None:
        status, body = await rig.post(asked(path, **more), path)
        assert (status, told(path, body)[0]) == (400, message)

    run(go)
