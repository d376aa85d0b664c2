"""What the clients in Python have in common: a line of JSON in is one request to make, a line of JSON out is what came of it.

In: {key, model, messages, max_tokens, stream, tools, seed, retries, stop_after}. Out: {text, calls, usage, finish, pieces}, or
{stopped} when the client left after so many pieces, or {error: {types, status, code, param, request_id, retry_after}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

Asked = dict[str, Any]


def serve(ask: Callable[[Asked], dict[str, Any]]) -> None:
    """Until standard input ends."""
    for line in sys.stdin:
        try:
            found = ask(json.loads(line))
        except Exception as error:
            found = {"error": told(error)}
        print(json.dumps(found), flush=True)


def told(error: Exception) -> dict[str, Any]:
    """An exception of OpenAI's SDK, or of who builds on it."""
    body = getattr(error, "body", None) or {}
    body = body if isinstance(body, dict) else {}
    response = getattr(error, "response", None)
    return {
        "types": [kind.__name__ for kind in type(error).__mro__], "status": getattr(error, "status_code", None),
        "message": str(error)[:500],
        "code": getattr(error, "code", None) or body.get("code"), "param": getattr(error, "param", None) or body.get("param"),
        "request_id": getattr(error, "request_id", None) or body.get("request_id"),
        "retry_after": response.headers.get("retry-after") if response is not None else None,
    }  # fmt: skip


def joined(chunks: list[Any]) -> dict[str, Any]:
    """Chunks of a chat stream, as OpenAI's SDK has them, put together."""
    text, finish, calls, usage = "", None, {}, None
    for chunk in chunks:
        usage = _usage(getattr(chunk, "usage", None)) or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(call.index, {"name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
    return {"text": text, "calls": list(calls.values()), "usage": usage, "finish": finish, "pieces": len(chunks)}


def whole(answer: Any) -> dict[str, Any]:
    """An answer in one piece, as OpenAI's SDK has it."""
    choice = answer.choices[0]
    calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in choice.message.tool_calls or []]
    return {
        "text": choice.message.content or "", "calls": calls, "usage": _usage(answer.usage), "finish": choice.finish_reason,
        "pieces": 1,
    }  # fmt: skip


def _usage(found: Any) -> list[int] | None:
    return [found.prompt_tokens, found.completion_tokens] if found else None


def wishes(asked: Asked, *names: str) -> dict[str, Any]:
    """Those of the fields that were given."""
    return {name: asked[name] for name in names if name in asked}
