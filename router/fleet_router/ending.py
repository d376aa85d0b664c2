"""The end of a stream that we end: its last event, and the framing of what we write ourselves."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fleet_router.admission.runaway import FINISH, Why

CHAT_PATH: Final = b"/v1/chat/completions"
END: Final = b"0\r\n\r\n"


def framed(data: bytes) -> bytes:
    """As a chunk of a body (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def last_event(why: Why, chat: bool, request_id: str, model: str) -> bytes:
    """A choice without text, whose finish_reason says why, and [DONE]."""
    finish, stop = FINISH[why]
    choice: dict[str, Any] = {"index": 0, "delta": {}} if chat else {"index": 0, "text": ""}
    choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": stop}
    kind = "chat.completion.chunk" if chat else "text_completion"
    said = {"id": request_id, "object": kind, "created": 0, "model": model, "choices": [choice]}
    return b"data: " + msgspec.json.encode(said) + b"\n\ndata: [DONE]\n\n"
