"""An engine's answer as it is judged, and without what the client did not ask for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fleet_router.cascade.judge import ANY_JSON, Answer
from fleet_router.cascade.reading import answer_of, json_kinds_of, payloads_of, with_logprobs, without_logprobs
from fleet_router.config import RouterConfig
from fleet_router.request import decode_body, parse_body

CONFIG = RouterConfig(fleet="f", served_name="m")
TOLD = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": []}, {"token": "b", "logprob": -1, "top_logprobs": []}]}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


def chunk(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None, **choice}]}


def stream(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in chunks) + b"data: [DONE]\n\n"


WHOLE = [
    ({"choices": [{"text": "ab", "finish_reason": "stop"}]}, Answer("ab", "stop")),
    (
        {"choices": [{"text": "ab", "finish_reason": "stop", "logprobs": {"token_logprobs": [None, -2]}}]},
        Answer("ab", "stop", logprobs=[-2.0]),
    ),
    (
        {"choices": [{"message": {"content": "ab"}, "finish_reason": "length", "logprobs": TOLD}]},
        Answer("ab", "length", logprobs=[-0.5, -1.0]),
    ),
    (
        {"choices": [{"message": {"content": None, "tool_calls": [CALL]}, "finish_reason": "tool_calls"}]},
        Answer("", "tool_calls", calls=True),
    ),
    ({"choices": []}, Answer()),
]
STREAMED = [
    (
        [chunk(delta={"role": "assistant"}), chunk(delta={"content": "a"}), chunk(delta={"content": "b"}, finish_reason="stop")],
        Answer("ab", "stop"),
    ),
    ([chunk(delta={"content": "a"}, logprobs=TOLD), chunk(delta={})], Answer("a", "", logprobs=[-0.5, -1.0])),
    ([chunk(text="a"), chunk(text="b", finish_reason="stop"), {"choices": [], "usage": {}}], Answer("ab", "stop")),
    ([chunk(delta={"tool_calls": [CALL]}, finish_reason="tool_calls")], Answer("", "tool_calls", calls=True)),
]


@pytest.mark.parametrize(("body", "expected"), WHOLE)
def test_a_whole_answer(body: dict[str, Any], expected: Answer):
    assert answer_of(payloads_of(json.dumps(body).encode(), stream=False)) == expected


@pytest.mark.parametrize(("chunks", "expected"), STREAMED)
def test_a_streamed_answer(chunks: list[dict[str, Any]], expected: Answer):
    assert answer_of(payloads_of(stream(*chunks), stream=True)) == expected


@pytest.mark.parametrize(
    "body", [b'{"choices": "what?"}', b'{"choices": [{"message": "hm"}]}', b"[]", b"no", b'{"choices": [1]}']
)
def test_what_is_no_answer(body: bytes):
    with pytest.raises(msgspec.DecodeError):
        answer_of([body])


@pytest.mark.parametrize(("chat", "value"), [(True, b"true"), (False, b"1")], ids=["chat", "text"])
def test_log_probabilities_are_asked_for_once(chat: bool, value: bytes):
    said = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    ask = parse_body(json.dumps({"model": "m", **said}).encode(), chat, CONFIG)
    more, ours = with_logprobs(ask, chat=chat)
    assert ours
    assert json.loads(decode_body(more, None))["logprobs"] == json.loads(value)
    assert "logprobs" not in json.loads(decode_body(ask, None))  # the next tier is asked what the client asked
    for given, mine in (("2", False), ("true", False), ("null", True), ("false", True)):
        asked = parse_body(
            json.dumps({"model": "m", **said})[:-1].encode() + b',"logprobs":' + given.encode() + b"}", chat, CONFIG
        )
        more, ours = with_logprobs(asked, chat=chat)
        assert ours == mine
        assert json.loads(decode_body(more, None))["logprobs"] == json.loads(value if mine else given)


def test_log_probabilities_nobody_asked_for_are_taken_out():
    body = {"id": "i", "choices": [{"message": {"content": "ä"}, "finish_reason": "stop", "logprobs": TOLD}], "usage": {"x": 1}}
    told = json.loads(without_logprobs(payloads_of(json.dumps(body).encode(), stream=False), stream=False))
    assert told == {**body, "choices": [{"message": {"content": "ä"}, "finish_reason": "stop", "logprobs": None}]}
    chunks = [chunk(delta={"content": "a"}, logprobs=TOLD), chunk(delta={}, finish_reason="stop")]
    bare = [chunk(delta={"content": "a"}, logprobs=None), chunks[1]]
    out = without_logprobs(payloads_of(stream(*chunks), stream=True), stream=True)
    assert [json.loads(part) for part in payloads_of(out, stream=True)] == bare
    assert out.endswith(b"data: [DONE]\n\n")


def schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, ANY_JSON),
        ({"response_format": {"type": "json_schema", "json_schema": 7}}, ANY_JSON),
        (schema({"type": "object"}), {"object"}),
        (schema({"type": ["array", "null"]}), {"array", "null"}),
        (schema({"anyOf": [{"type": "object"}]}), ANY_JSON),
        (schema({"type": "objekt"}), ANY_JSON),
        (schema({"type": ["object", "objekt"]}), ANY_JSON),
        (schema({"type": []}), ANY_JSON),
        (schema({"type": [7]}), ANY_JSON),
        (schema({"type": [{}]}), ANY_JSON),
        (schema(True), ANY_JSON),
        ({"response_format": "json"}, None),
        ({"response_format": None}, None),
    ],
)
def test_who_wants_which_json(fields: dict[str, Any], expected: set[str] | None):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    assert json_kinds_of(parse_body(json.dumps(body).encode(), True, CONFIG)) == expected
