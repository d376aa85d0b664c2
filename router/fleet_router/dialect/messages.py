"""Answers in the shape of Anthropic's Messages API: one message, or the events of its stream."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final, NoReturn

import msgspec

from fleet_router.dialect.calls import Calls
from fleet_router.dialect.chat import Choice, Completion, Message, ToolCall, Usage
from fleet_router.dialect.messages_request import NO_THREADS, MessagesRequest, chat_request
from fleet_router.dialect.translation import ENDED, ChatTranslation, event, parsed
from fleet_router.errors import RequestError
from fleet_wire.unreadable import UNREADABLE

REASONS: Final = {
    "stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal",
    **dict.fromkeys(ENDED, "refusal"),
}  # fmt: skip
"""An answer that was ended for what it was is a refusal: its reader must not go on with it, nor ask for more of it."""
KINDS: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""docs.anthropic.com, Errors."""
NO_INPUT: Final = msgspec.Raw(b"{}")
LAST_TURN: Final = dict.fromkeys(("add_generation_prompt", "continue_final_message"), "an assistant's last turn")
CUT: Final = frozenset({"max_tokens", "stop_sequence", "refusal"})
"""Reasons of an answer that its model did not end: what it was about to say may lack its end."""


def named(request_id: str) -> list[tuple[bytes, bytes]]:
    """Where Anthropic's clients look for an answer's name."""
    return [(b"request-id", request_id.encode())]


def error_object(error: RequestError, request_id: str) -> dict[str, Any]:
    """Anthropic's error shape."""
    kind = KINDS.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.reason == NO_THREADS:
        told["details"] = {"error_code": error.reason}
    return {"type": "error", "error": told, "request_id": request_id}


class Messages(ChatTranslation):
    """One call of /v1/messages."""

    image: ClassVar = "image"
    names: ClassVar = {
        "stop": "stop_sequences", "prompt": "messages", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "thinking", "thinking_token_budget": "thinking.budget_tokens",
        "response_format": "output_config.format",
        **LAST_TURN,
    }  # fmt: skip

    def __init__(self, body: bytes, request_id: str) -> None:
        super().__init__(request_id)
        asked = parsed(body, MessagesRequest)
        self.stream = bool(asked.stream)
        self.fields = chat_request(asked)
        self._model, self.named = asked.model, named(request_id)
        self._usage = Usage()
        self._choice = Choice()
        self._begun = False
        self._calls = Calls()
        self._called = False
        """A block that uses a tool was sent."""
        self._open = ""
        """Kind and index of the block that is being sent; empty when none is."""
        self._index = -1
        self._unsaid: str | None = None
        """What came of a call's arguments while they could be none; None: they have begun."""

    # -- streamed ---------------------------------------------------------------------------------------------------
    def name_of(self, param: str) -> str:
        """An effort has two names here."""
        if param == "reasoning_effort" and self.fields.get(param) not in (None, "none"):
            return "output_config.effort"
        return super().name_of(param)

    def chunk(self, chunk: Completion) -> bytes:
        """Deltas of the block that is open; another kind closes it and opens its own."""
        self._usage = chunk.usage or self._usage
        told = b"" if self._begun else self._begin()
        choice = chunk.choice
        if choice is None:
            return told
        if choice.finish_reason is not None:
            self._choice = choice
        delta = choice.delta
        if delta.thought or delta.content:
            told += self._pieces(self._calls.said(delta))
        return told + b"".join(self._pieces(self._calls.feed(call)) for call in delta.tool_calls or ())

    def _pieces(self, found: list[ToolCall | Message]) -> bytes:
        return b"".join(self._tool(piece) if isinstance(piece, ToolCall) else self._say(piece) for piece in found)

    def _say(self, delta: Message) -> bytes:
        told = b""
        if delta.thought:
            told += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            told += self._delta({"type": "thinking_delta", "thinking": delta.thought})
        if delta.content:
            told += self._block("text", {"type": "text", "text": ""})
            told += self._delta({"type": "text_delta", "text": delta.content})
        return told

    def _tool(self, call: ToolCall) -> bytes:
        start = {"type": "tool_use", "id": call.id or "", "name": call.function.name or "", "input": {}}
        told, self._called = self._block(f"tool {call.index}", start), True
        if told:
            self._unsaid = ""
        if said := self._begun_with(call.function.arguments or ""):
            told += self._delta({"type": "input_json_delta", "partial_json": said})
        return told

    def _begun_with(self, more: str) -> str:
        """The arguments' next piece. Space or null alone are none (see `_input`): clients parse what they have at each piece, and
        would end the stream for the one, and use the tool with no object for the other."""
        if self._unsaid is None:
            return more
        said = self._unsaid + more
        none = "null".startswith(said.strip())
        self._unsaid = said if none else None
        return "" if none else said

    def _begin(self) -> bytes:
        self._begun = True
        message = {**self._message([], Choice()), "stop_reason": None}
        return event("message_start", {"type": "message_start", "message": message})

    def _block(self, kind: str, start: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        told = self._close()
        self._open, self._index = kind, self._index + 1
        opened = {"type": "content_block_start", "index": self._index, "content_block": start}
        return told + event("content_block_start", opened)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        told = self._delta({"type": "signature_delta", "signature": self.request_id}) if self._open == "thinking" else b""
        self._open = ""
        return told + event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def finished(self) -> bytes:
        """The message's reason and usage, then its end."""
        told = (b"" if self._begun else self._begin()) + self._pieces(self._calls.rest())
        reason, stop = reason_of(self._choice, calls=self._called)
        ending = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop, **details_of(self._choice)},
            "usage": usage_of(self._usage),
        }
        return told + self._close() + event("message_delta", ending) + event("message_stop", {"type": "message_stop"})

    def failed(self, error: RequestError) -> bytes:
        """An error event and no message_stop."""
        return event("error", error_object(error, self.request_id))

    def error_body(self, error: RequestError) -> bytes:
        """Anthropic's shape."""
        return msgspec.json.encode(error_object(error, self.request_id))

    # -- whole ------------------------------------------------------------------------------------------------------
    def whole(self, answer: Completion) -> bytes:
        """The message."""
        choice = answer.choice
        if choice is None:
            raise RequestError(502, "the worker's answer has no choice")
        self._usage = answer.usage or Usage()
        return msgspec.json.encode(self._message(_blocks(choice, self.request_id), choice))

    def _message(self, content: list[dict[str, Any]], choice: Choice) -> dict[str, Any]:
        reason, stop = reason_of(choice, calls=bool(choice.message.tool_calls))
        return {
            "id": f"msg_{self.request_id}", "type": "message", "role": "assistant", "model": self._model,
            "content": content, "stop_reason": reason, "stop_sequence": stop, "usage": usage_of(self._usage),
            **details_of(choice),
        }  # fmt: skip


def _blocks(choice: Choice, signature: str) -> list[dict[str, Any]]:
    """`signature`: of thoughts, which clients do not give back without one; nobody looks at it."""
    found: list[dict[str, Any]] = []
    message = choice.message
    if message.thought:
        found.append({"type": "thinking", "thinking": message.thought, "signature": signature})
    if message.content:
        found.append({"type": "text", "text": message.content})
    for call in message.tool_calls or ():
        found.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": _input(call, choice)})
    return found


def _input(call: ToolCall, choice: Choice) -> msgspec.Raw:
    """The arguments as the model wrote them: numbers of any length, half of a surrogate pair. None where the limit cut them, or a
    stop sequence: the message says so, and its reader asks with a higher one."""
    said = (call.function.arguments or "").strip()
    if said in ("", "null"):
        return NO_INPUT
    if _is_object(said):
        return msgspec.Raw(said.encode())
    if reason_of(choice, calls=True)[0] in CUT:
        return NO_INPUT
    raise RequestError(502, f"the model's arguments for {call.function.name} are not a JSON object")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_no_number), dict)
    except UNREADABLE:
        return False


def _no_number(name: str) -> NoReturn:
    """NaN and infinities, which JSON has not."""
    raise ValueError(name)


def reason_of(choice: Choice, *, calls: bool) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence). `calls`: of a message that uses tools; engines end the call of a named one with `stop`."""
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    if calls and choice.finish_reason == "stop":
        return "tool_use", None
    return REASONS.get(choice.finish_reason or "", "end_turn"), None


def details_of(choice: Choice) -> dict[str, Any]:
    """`stop_details` of an answer that was ended for what it was."""
    why = ENDED.get(choice.finish_reason or "")
    return {} if why is None else {"stop_details": {"type": "refusal", "category": None, "explanation": why}}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached input apart from the rest."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached, "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0, "output_tokens": usage.completion_tokens,
        **({"output_tokens_details": {"thinking_tokens": usage.thought}} if usage.thought else {}),
    }  # fmt: skip
