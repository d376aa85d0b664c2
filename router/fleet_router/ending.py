"""The last event of a stream that we end, in the client's dialect and framed as a chunk."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fleet_router.admission.runaway import FINISH, Why

CHAT_PATH: Final = b"/v1/chat/completions"
DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def last_event(why: Why, chat: bool, request_id: str, model: str) -> bytes:
    """A choice without text, whose finish_reason says why, [DONE], and the end of the body."""
    finish, stop = FINISH[why]
    choice: dict[str, Any] = {"index": 0, "delta": {}} if chat else {"index": 0, "text": ""}
    choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": stop}
    kind = "chat.completion.chunk" if chat else "text_completion"
    said = {"id": request_id, "object": kind, "created": 0, "model": model, "choices": [choice]}
    event = b"data: " + msgspec.json.encode(said) + b"\n\n"
    return b"%x\r\n%b\r\n%b" % (len(event), event, DONE)
