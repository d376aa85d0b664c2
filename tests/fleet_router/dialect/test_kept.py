"""What a request in another dialect keeps while it waits and while its answer comes."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from fleet_router.dialect.routes import translation_of

MANY = 20_000
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * (MANY // 2)
TOOLS = [{"type": "function", "name": f"f{i}", "parameters": {"type": "object", "properties": {"a": {}}}} for i in range(2_000)]
SCHEMAS = [{"name": f"f{i}", "input_schema": {"type": "object", "properties": {"a": {}}}} for i in range(2_000)]
BODIES: list[tuple[bytes, dict[str, Any]]] = [
    (b"/v1/messages", {"model": "m", "max_tokens": 8, "messages": TURNS, "tools": SCHEMAS}),
    (b"/v1/messages/count_tokens", {"model": "m", "messages": TURNS, "tools": SCHEMAS}),
    (b"/v1/responses", {"model": "m", "input": TURNS, "tools": TOOLS, "instructions": "c" * 100, "metadata": {"d": "e" * 500}}),
]


@pytest.mark.parametrize(("path", "asked"), BODIES, ids=[path.decode() for path, _ in BODIES])
def test_what_was_parsed_of_it_is_let_go_with_its_body(path: bytes, asked: dict[str, Any]):
    """The queue counts a request's bytes; what was parsed of them stayed beside, seven times as much, to its end."""
    body = json.dumps(asked).encode()
    translation_of(path, body, "warm")
    tracemalloc.start()
    try:
        translation = translation_of(path, body, "r")
        assert translation is not None
        assert tracemalloc.get_traced_memory()[0] > 2 * len(body)
        assert len(json.loads(translation.take_body())["messages"]) >= MANY
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < len(body) / 2, f"{kept} bytes for {len(body)}"


def test_a_response_says_its_request_again():
    """From what is kept."""
    asked = {
        "model": "m", "input": "a", "instructions": "b", "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.25, "user": "c",
        "tools": TOOLS[:2], "tool_choice": {"type": "function", "name": "f1"}, "parallel_tool_calls": False,
        "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}, "metadata": {"d": "e"},
    }  # fmt: skip
    translation = translation_of(b"/v1/responses", json.dumps(asked).encode(), "r")
    assert translation is not None
    sent = json.loads(translation.take_body())
    translation.feed(
        b'{"choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"x"}}],'
        b'"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}'
    )
    told = json.loads(translation.end())
    assert sent["messages"] == [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]
    for name in ("model", "instructions", "max_output_tokens", "temperature", "top_p", "user", "parallel_tool_calls", "metadata"):
        assert told[name] == asked[name]
    assert [tool["name"] for tool in told["tools"]] == ["f0", "f1"]
    assert (told["tool_choice"]["name"], told["reasoning"]["effort"], told["text"]["format"]["type"]) == (
        "f1",
        "low",
        "json_object",
    )
    assert told["output"][0]["content"][0]["text"] == "x"
