"""What a fake worker says to a chat request: text, thoughts, calls of functions, and usage; whole or in chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.fleet_router.fake_worker import answer

Behave = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[bool]]
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 5}}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
TEXT: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo."}]
CALLS: list[dict[str, Any]] = [
    {"content": "Let me see."},
    {"tool_calls": [{**CALL, "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Bonn"}'}}]},
]
THOUGHT: list[dict[str, Any]] = [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Yes"}]


def events(deltas: list[dict[str, Any]], finish: str = "stop", stop: str | None = None, *, end: bool = True) -> list[bytes]:
    """The chunks of a chat stream."""
    last = {"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": stop}
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas] + ([[last], []] if end else [])
    chunks: list[dict[str, Any]] = [{"id": "c", "created": 1700000000, "choices": choice} for choice in choices]
    if end:
        chunks[-1]["usage"] = USAGE
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + ([b"data: [DONE]\n\n"] if end else [])


def says(
    deltas: list[dict[str, Any]], finish: str = "stop", stop: str | None = None, *, piece: int = 0, end: bool = True
) -> Behave:
    """A behaviour: streamed as asked, in pieces of `piece` bytes when that is not 0; without `end` the stream ends early."""

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if body.get("kv_transfer_params", {}).get("do_remote_decode"):
            return False
        if not body.get("stream"):
            answer(writer, 200, whole(deltas, finish, stop))
            return True
        data = b"".join(events(deltas, finish, stop, end=end))
        step = piece or len(data)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(data), step):
            part = data[at : at + step]
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True

    return behave


def whole(deltas: list[dict[str, Any]], finish: str = "stop", stop: str | None = None) -> dict[str, Any]:
    """The same answer in one piece."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
    if thought := "".join(delta.get("reasoning_content") or "" for delta in deltas):
        message["reasoning_content"] = thought
    if any("tool_calls" in delta for delta in deltas):
        message["tool_calls"] = [CALL]
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop}
    return {"id": "c", "created": 1700000000, "choices": [choice], "usage": USAGE}
