"""Whatever the dialects tell is, field by field, of the types that the makers' SDKs publish: their clients pass over a field that
is missing, and whoever reads it finds nothing there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fleet_router.dialect.messages import Messages
from fleet_router.dialect.responses import Responses
from fleet_router.errors import RequestError
from tests.fleet_router.chat_worker import CALLS, TEXT, THOUGHT, events, whole

ASKED: dict[Any, dict[str, Any]] = {
    Messages: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    Responses: {
        "model": "m", "input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}, "reasoning": {"effort": "low"},
    },
}  # fmt: skip
TYPES: dict[Any, tuple[TypeAdapter[Any], TypeAdapter[Any]]] = {
    Messages: (TypeAdapter(Message), TypeAdapter(RawMessageStreamEvent)),
    Responses: (TypeAdapter(Response), TypeAdapter(ResponseStreamEvent)),
}
SAID = {"text": TEXT, "calls": CALLS, "thoughts": THOUGHT, "all": [*THOUGHT, *CALLS], "nothing": []}


def told(raw: bytes) -> Iterator[dict[str, Any]]:
    for line in raw.splitlines():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls", "content_filter", "repetition"])
@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("kind", ASKED)
def test_each_answer_and_each_event_is_of_the_published_type(kind: Any, said: str, finish: str):
    of_whole, of_event = TYPES[kind]
    one = kind(json.dumps(ASKED[kind]).encode(), "r")
    one.feed(json.dumps(whole(SAID[said], finish)).encode())
    of_whole.validate_json(one.end())
    streamed = kind(json.dumps({**ASKED[kind], "stream": True}).encode(), "r")
    for event in told(b"".join(map(streamed.feed, events(SAID[said], finish))) + streamed.end()):
        of_event.validate_python(event)


@pytest.mark.parametrize("said", SAID)
def test_each_part_of_a_response_begins_before_it_is_added_to(said: str):
    """OpenAI's client for JavaScript threw "missing content at index 0" at the first word that a model thought."""
    streamed = Responses(json.dumps({**ASKED[Responses], "stream": True}).encode(), "r")
    parts = dict[tuple[int, int], str]()
    done = dict[tuple[int, int], str]()
    for event in told(b"".join(map(streamed.feed, events(SAID[said]))) + streamed.end()):
        at = (event.get("output_index", -1), event.get("content_index", -1))
        if event["type"] == "response.content_part.added":
            parts[at] = event["part"]["text"]
        elif event["type"] in ("response.output_text.delta", "response.reasoning_text.delta"):
            parts[at] += event["delta"]
        elif event["type"] == "response.content_part.done":
            done[at] = event["part"]["text"]
    assert parts == done


def test_nor_is_a_field_missing_in_a_response_that_failed():
    streamed = Responses(json.dumps({**ASKED[Responses], "stream": True}).encode(), "r")
    raw = b"".join(map(streamed.feed, events(CALLS, end=False))) + streamed.failed(RequestError(502, "x"))
    for event in told(raw):
        TYPES[Responses][1].validate_python(event)


@pytest.mark.parametrize("text", [None, {}, {"format": None}, {"verbosity": "low"}])
def test_a_response_without_a_format_says_that_it_is_text(text: Any):
    """OpenAI has no null there: clients of strict languages could not read an answer to `text: {"verbosity": "low"}`."""
    one = Responses(json.dumps({"model": "m", "input": "hi", "text": text}).encode(), "r")
    one.feed(json.dumps(whole(TEXT)).encode())
    assert json.loads(one.end())["text"] == {"format": {"type": "text"}}
