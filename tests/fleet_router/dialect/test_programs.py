"""Requests of real programs, whole, as they send them: what the worker is asked of each, and what the program is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_router.dialect.routes import translation_of
from fleet_router.errors import RequestError
from tests.fleet_router.chat_worker import CALLS, says
from tests.fleet_router.rig import Rig, run

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
ITEM_TOOL = {"type": "function", **FUNCTION, "strict": False}
CHAT_TOOL = {"type": "function", "function": {**FUNCTION, "strict": False}}
CALLED = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}
KEPT = {"type": "ephemeral", "ttl": "1h"}
CLEARS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


def said(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    """An item of a response's input."""
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CODEX = {
    "model": "m", "instructions": "You are Codex.", "tools": [ITEM_TOOL], "tool_choice": "auto", "parallel_tool_calls": False,
    "input": [
        said("developer", "<permissions>"), said("user", "<environment_context>"), said("user", "Weather?"),
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "weather", "arguments": '{"city":"Ulm"}', "call_id": "call_0"},
        {"type": "function_call_output", "call_id": "call_0", "output": "rain"},
    ],
    "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199", "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "8d1f", "x-codex-window-id": "0199:0"},
}  # fmt: skip
AI_SDK = {
    "model": "m", "stream": True, "store": False, "include": ["reasoning.encrypted_content"], "tools": [ITEM_TOOL],
    "tool_choice": "auto", "max_tool_calls": 9, "prompt_cache_retention": "24h", "safety_identifier": "u", "service_tier": "auto",
    "input": [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "id": "msg_1"},
        {"type": "function_call", "call_id": "call_0", "name": "weather", "arguments": '{"city":"Ulm"}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "call_0", "output": [{"type": "input_text", "text": "rain"}]},
    ],
}  # fmt: skip
AGENTS_SDK = {
    "model": "m", "instructions": "Be brief.", "input": [{"role": "user", "content": "Weather?", "type": None}],
    "include": [], "tools": [ITEM_TOOL], "stream": False, "store": None, "prompt": None, "conversation": None,
    "previous_response_id": None, "truncation": None, "stream_options": None, "max_tool_calls": None, "context_management": None,
    "prompt_cache_retention": None, "parallel_tool_calls": None, "reasoning": {"effort": None, "summary": None}, "metadata": None,
}  # fmt: skip
OPENAI_SDK = {
    "model": "m", "input": "Weather?", "stream": True, "stream_options": {"include_obfuscation": False}, "tools": [ITEM_TOOL],
    "prompt_cache_options": {"mode": "implicit"},
}  # fmt: skip
CLAUDE_CODE = {
    "model": "m", "max_tokens": 64, "stream": True, "metadata": {"user_id": "user_0_account__session_0"},
    "system": [{"type": "text", "text": "You are Claude Code.", "cache_control": KEPT}],
    "tools": [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA, "eager_input_streaming": True}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Ulm"}, "caller": {"type": "direct"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_0", "content": "rain", "is_error": False, "cache_control": KEPT},
        ]},
    ],
    "thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "high"},
    "context_management": CLEARS, "diagnostics": {"previous_message_id": None}, "speed": "standard",
}  # fmt: skip
NULLS = {
    "model": "m", "max_tokens": 64, "stream": None, "service_tier": "auto", "stop_sequences": None, "container": None,
    "context_management": None, "inference_geo": None, "mcp_servers": None, "tool_choice": None, "output_format": None,
    "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": None},
            {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Ulm"}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": None, "is_error": None}]},
    ],
    "tools": [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA, "type": None, "cache_control": None}],
}  # fmt: skip
OPEN_WEBUI = {
    "model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": None, "response_format": None,
    "messages": [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "call_0", "content": [{"type": "text", "text": "rain"}]},
    ],
    "tools": [CHAT_TOOL], "parallel_tool_calls": None, "reasoning_effort": "low", "store": False, "metadata": {"chat": "1"},
    "user": "ann", "safety_identifier": "a", "prompt_cache_key": "c", "n": None, "stop": None, "logprobs": None,
    "max_tokens": None, "service_tier": "auto", "verbosity": "low",
}  # fmt: skip
ASKS = {"role": "user", "content": "Weather?"}
ANSWERED = [{"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "tool_call_id": "call_0", "content": "rain"}]
BRIEF = {"role": "system", "content": "Be brief."}
PLAIN_TOOL = {"type": "function", "function": FUNCTION}
SENT: list[Any] = [
    pytest.param(RESPONSES, CODEX, {
        "messages": [{"role": "system", "content": "You are Codex.\n\n<permissions>"},
                     {"role": "user", "content": "<environment_context>"}, ASKS, *ANSWERED],
        "tools": [CHAT_TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "reasoning_effort": "medium",
    }, id="codex"),
    pytest.param(RESPONSES, AI_SDK, {
        "messages": [BRIEF, ASKS, {**ANSWERED[0], "content": "I look."}, ANSWERED[1]],
        "tools": [CHAT_TOOL], "tool_choice": "auto",
    }, id="ai-sdk"),
    pytest.param(RESPONSES, AGENTS_SDK, {"messages": [BRIEF, ASKS], "tools": [CHAT_TOOL]}, id="agents-sdk"),
    pytest.param(RESPONSES, OPENAI_SDK, {"messages": [ASKS], "tools": [CHAT_TOOL]}, id="openai-sdk"),
    pytest.param(f"{MESSAGES}?beta=true", CLAUDE_CODE, {
        "messages": [{"role": "system", "content": "You are Claude Code."}, ASKS, {**ANSWERED[0], "reasoning": "Hm."},
                     ANSWERED[1]],
        "tools": [PLAIN_TOOL], "max_tokens": 64, "reasoning_effort": "high",
    }, id="claude-code"),
    pytest.param(MESSAGES, NULLS, {
        "messages": [ASKS, {**ANSWERED[0], "reasoning": "Hm."}, {**ANSWERED[1], "content": ""}], "tools": [PLAIN_TOOL],
        "max_tokens": 64,
    }, id="anthropic-nulls"),
]  # fmt: skip


def call_of(path: str, streamed: bool, body: bytes) -> tuple[Any, ...]:
    """(name, arguments, usage) as the program reads the call out of what it is told."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: ") and line != b"data: [DONE]"]
    if path == RESPONSES:
        response = events[-1]["response"] if streamed else json.loads(body)
        call = response["output"][-1]
        return call["name"], json.loads(call["arguments"]), response["usage"]["output_tokens"]
    if not streamed:
        message = json.loads(body)
        return message["content"][-1]["name"], message["content"][-1]["input"], message["usage"]["output_tokens"]
    (name,) = (one["content_block"]["name"] for one in events if one.get("content_block", {}).get("type") == "tool_use")
    pieces = [one["delta"].get("partial_json", "") for one in events if one["type"] == "content_block_delta"]
    return name, json.loads("".join(pieces)), events[-2]["usage"]["output_tokens"]


@pytest.mark.parametrize(("path", "asked", "sent"), SENT)
def test_a_program_gets_what_it_asks_for(path: str, asked: dict[str, Any], sent: dict[str, Any]):
    """Each was refused for a field that is null, only informs, or asks for what is done anyway."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(CALLS, "tool_calls")
        status, body = await rig.post(asked, path)
        assert status == 200, body
        streamed = bool(asked["stream"])
        assert call_of(path.partition("?")[0], streamed, body.replace(b"\r\n", b"\n")) == ("weather", {"city": "Bonn"}, 4)
        told = rig.decode[0].seen[-1]
        options = {"stream_options": {"include_usage": True}} if streamed else {}
        assert told | {"model": "m", "stream": streamed, **options, **sent} == told
        assert told.keys() - {"model", "stream", "max_tokens", "max_completion_tokens", *options} == sent.keys() - {"max_tokens"}

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("roles", "sent"),
    [
        ("sdud", "Zu"),
        ("udu", "Zuu"),
        ("d", "Z"),
        ("susu", "susu"),  # whoever says system where it stands means it there
    ],
)
def test_what_developers_say_stands_at_the_beginning(roles: str, sent: str):
    """Of several messages of the system, or of one further down, chat templates that take one at the beginning (Qwen3.5's,
    Llama's) refuse the conversation or leave them out. vLLM puts them together for a developer's, which we told as a system's."""
    names = {"s": "system", "d": "developer", "u": "user"}
    items = [said(names[role], f"{number}") for number, role in enumerate(roles)]
    one = translation_of(RESPONSES.encode(), json.dumps({"model": "m", "input": items}).encode(), "r")
    assert one is not None
    told = json.loads(one.take_body())["messages"]
    assert [message["role"] for message in told] == [{**names, "Z": "system"}[role] for role in sent]
    if sent[0] == "Z":
        assert told[0]["content"] == "\n\n".join(f"{number}" for number, role in enumerate(roles) if role in "sd")


def test_a_chat_goes_on_as_it_came():
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(CALLS, "tool_calls")
        status, _ = await rig.post(OPEN_WEBUI, CHAT)
        told = rig.decode[0].seen[-1]
        assert (status, {name: told.get(name) for name in OPEN_WEBUI if name != "max_tokens"}) == (
            200, {name: value for name, value in OPEN_WEBUI.items() if name != "max_tokens"},
        )  # fmt: skip

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("path", "asked", "more", "words"),
    [
        (RESPONSES, CODEX, {"conversation": "conv_1"}, "conversation: this router stores no responses"),
        (RESPONSES, CODEX, {"conversation": {"id": "conv_1"}}, "conversation: this router stores no responses"),
        (RESPONSES, CODEX, {"prompt": {"id": "pmpt_1"}}, "prompt: this router stores no prompts"),
        (RESPONSES, CODEX, {"previous_response_id": "resp_1"}, "previous_response_id: this router stores no responses"),
        (
            RESPONSES, AI_SDK, {"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}]},
            "input[1]: an item_reference is not served: this router stores no responses: send the whole conversation",
        ),
        (RESPONSES, CODEX, {"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs is not served"),
        (RESPONSES, CODEX, {"tools": [{"type": "web_search", "external_web_access": False}]}, "tools[0].type: Invalid enum"),
        (RESPONSES, CODEX, {"context_management": [{"type": "compaction"}]}, "context_management is no field"),
        (RESPONSES, CODEX, {"model": None}, "model is required"),
        (
            MESSAGES, CLAUDE_CODE, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type: Invalid enum value 'clear_tool_uses_20250919'; allowed are clear_thinking_",
        ),
        (MESSAGES, CLAUDE_CODE, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type: Invalid enum value"),
        (MESSAGES, CLAUDE_CODE, {"mcp_servers": [{"type": "url"}]}, "mcp_servers is no field"),
        (MESSAGES, CLAUDE_CODE, {"messages": [{"role": "user", "content": []}]}, "messages: nothing is said in them"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(path: str, asked: dict[str, Any], more: dict[str, Any], words: str):
    with pytest.raises(RequestError) as refused:
        translation_of(path.encode(), json.dumps({**asked, **more}).encode(), "r")
    assert (refused.value.status, str(refused.value)[: len(words)]) == (400, words)


def test_a_body_of_nulls_that_ends_within_is_told_as_before():
    with pytest.raises(RequestError, match=r"container is no field"):
        translation_of(MESSAGES.encode(), b'{"container": null, "model": "m"', "r")
