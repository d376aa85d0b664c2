"""How an emulated worker talks: what a conversation is as a prompt, when it calls a function, and the shapes of both answers."""

from __future__ import annotations

import json
from typing import Any


def flat(messages: list[dict[str, Any]]) -> str:
    """A conversation as one text. The order of fields, null or absent, text or parts of text: all the same conversation."""
    return "\n".join(f"{one['role']}: {_text(one)}{_calls(one)}" for one in messages)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _calls(message: dict[str, Any]) -> str:
    """Of an answer of the assistant; the id of what a tool's answer belongs to."""
    calls = [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or []]
    return f" {message.get('tool_call_id') or ''}{calls or ''}"


def call_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """The first function is called with the last word of what the user said, unless a tool answered already."""
    tools, messages = body.get("tools"), body.get("messages")
    if not tools or not messages or body.get("tool_choice") == "none" or messages[-1]["role"] == "tool":
        return None
    function = tools[0]["function"]
    (name, *_) = function["parameters"]["properties"]
    word = _text(messages[-1]).split()[-1]
    return {"id": f"call_{len(messages)}", "type": "function",
            "function": {"name": function["name"], "arguments": json.dumps({name: word})}}  # fmt: skip


def deltas(call: dict[str, Any]) -> list[dict[str, Any]]:
    """The call in pieces: its name, then its arguments in two halves."""
    arguments = call["function"]["arguments"]
    half = len(arguments) // 2
    first = {"index": 0, **call, "function": {"name": call["function"]["name"], "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": part}} for part in (arguments[:half], arguments[half:])]
    return [{"role": "assistant", "content": None, "tool_calls": [one]} for one in (first, *rest)]


def choice(body: dict[str, Any], text: str, *, finish: str | None, streamed: bool) -> dict[str, Any]:
    """Text as the client's question wants it."""
    found: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    if "messages" not in body:
        return found | {"text": text}
    return found | ({"delta": {"content": text}} if streamed else {"message": {"role": "assistant", "content": text}})


def envelope(body: dict[str, Any], choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
    """What is around the choices."""
    kind = "text_completion" if "messages" not in body else f"chat.completion{'.chunk' if streamed else ''}"
    return {"id": "c", "object": kind, "created": 1, "model": body["model"], "choices": choices}
