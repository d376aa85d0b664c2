"""Answers in the shape of OpenAI's Responses API: one response, or the numbered events of its stream."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from fleet_router.dialect.calls import Calls
from fleet_router.dialect.chat import Completion, Message, ToolCall, Usage
from fleet_router.dialect.responses_request import ResponsesRequest, chat_request, read
from fleet_router.dialect.translation import ENDED, ChatTranslation, event
from fleet_router.errors import RequestError

SERVER_ERRORS: Final = 500
INCOMPLETE: Final = {
    "length": {"reason": "max_output_tokens"}, "content_filter": {"reason": "content_filter"},
    **{reason: {"reason": "content_filter", "message": words} for reason, words in ENDED.items()},
}  # fmt: skip
"""`incomplete_details` by finish_reason. OpenAI has two reasons; an answer that was ended for what it was has the second, and
words of ours beside it."""


class Responses(ChatTranslation):
    """One call of /v1/responses."""

    image: ClassVar = "input_image"
    names: ClassVar = {
        "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens", "messages": "input", "prompt": "input",
        "response_format": "text.format", "reasoning_effort": "reasoning.effort",
    }  # fmt: skip

    def __init__(self, body: bytes, request_id: str) -> None:
        super().__init__(request_id)
        asked = read(body)
        self.stream = bool(asked.stream)
        self.fields = chat_request(asked)
        self._told_back = told_back(asked)
        self._usage: Usage | None = None
        self._created = 0
        self._reason: str | None = None
        self._number = -1
        """Of the last event."""
        self._output: list[dict[str, Any]] = []
        """Items; the last one is being sent while `_open` says which kind it is."""
        self._open = ""
        self._said: list[str] = []
        """Text or arguments of the last one, until it is closed: to put them together at each piece is to copy them at each."""
        self._calls = Calls()

    # -- streamed ---------------------------------------------------------------------------------------------------
    def chunk(self, chunk: Completion) -> bytes:
        """Deltas of the item that is open; another kind closes it and opens its own."""
        self._usage = chunk.usage or self._usage
        told = b"" if self._created else self._begin(chunk.created)
        choice = chunk.choice
        if choice is None:
            return told
        self._reason = choice.finish_reason or self._reason
        delta = choice.delta
        if delta.thought or delta.content:
            told += self._pieces(self._calls.said(delta))
        return told + b"".join(self._pieces(self._calls.feed(call)) for call in delta.tool_calls or ())

    def _pieces(self, found: list[ToolCall | Message]) -> bytes:
        return b"".join(self._call(piece) if isinstance(piece, ToolCall) else self._say(piece) for piece in found)

    def _say(self, delta: Message) -> bytes:
        told = self._thought(delta.thought) if delta.thought else b""
        return told + (self._text(delta.content) if delta.content else b"")

    def _begin(self, created: int) -> bytes:
        self._created = created or 1
        response = self._response("in_progress", [])
        return self._tell("response.created", response=response) + self._tell("response.in_progress", response=response)

    def _tell(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event(kind, {"type": kind, "sequence_number": self._number, **fields})

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _item(self, kind: str, item: dict[str, Any]) -> bytes:
        told = self._close()
        self._open = kind
        self._output.append(item)
        return told + self._tell("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self.request_id}_{len(self._output)}"

    def _text(self, text: str) -> bytes:
        told = b""
        if self._open != "text":
            told = self._item("text", {**message_item(self._id("msg"), ""), "status": "in_progress", "content": []})
            self._output[-1]["content"] = [text_part("")]
            told += self._tell("response.content_part.added", **self._at, content_index=0, part=text_part(""))
        self._said.append(text)
        return told + self._tell("response.output_text.delta", **self._at, content_index=0, delta=text, logprobs=[])

    def _thought(self, text: str) -> bytes:
        told = b""
        if self._open != "reasoning":
            told = self._item("reasoning", {**reasoning_item(self._id("rs"), ""), "status": "in_progress", "content": []})
            self._output[-1]["content"] = [thought_part("")]
            told += self._tell("response.content_part.added", **self._at, content_index=0, part=thought_part(""))
        self._said.append(text)
        return told + self._tell("response.reasoning_text.delta", **self._at, content_index=0, delta=text)

    def _call(self, call: ToolCall) -> bytes:
        told = b""
        if self._open != f"call {call.index}":
            item = {**call_item(self._id("fc"), call), "status": "in_progress", "arguments": ""}
            told = self._item(f"call {call.index}", item)
        if call.function.arguments:
            self._said.append(call.function.arguments)
            told += self._tell("response.function_call_arguments.delta", **self._at, delta=call.function.arguments)
        return told

    def _put_together(self) -> None:
        """What was said of the last item, into it."""
        said, self._said = "".join(self._said), []
        if self._open.startswith("call"):
            self._output[-1]["arguments"] += said
        elif self._open:
            self._output[-1]["content"][0]["text"] += said

    def _close(self) -> bytes:
        self._put_together()
        kind, self._open = self._open, ""
        if not kind:
            return b""
        item = self._output[-1]
        item["status"] = status_of(self._reason)
        if kind in ("text", "reasoning"):
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
            name = "output_text" if kind == "text" else "reasoning_text"
            told = self._tell(f"response.{name}.done", **self._at, content_index=0, text=part["text"], **more)
            told += self._tell("response.content_part.done", **self._at, content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            told = self._tell("response.function_call_arguments.done", **self._at, **done)
        return told + self._tell("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def finished(self) -> bytes:
        """The last item's end and the whole response."""
        told = b"" if self._created else self._begin(0)
        told += self._pieces(self._calls.rest()) + self._close()
        status = status_of(self._reason)
        return told + self._tell(f"response.{status}", response=self._response(status, self._output))

    def failed(self, error: RequestError) -> bytes:
        """response.failed, and no response.completed."""
        told = b"" if self._created else self._begin(0)
        self._put_together()
        code = "server_error" if error.status >= SERVER_ERRORS else "invalid_prompt"
        response = {**self._response("failed", self._output), "error": {"code": code, "message": str(error)}}
        return told + self._tell("response.failed", response=response)

    # -- whole ------------------------------------------------------------------------------------------------------
    def whole(self, answer: Completion) -> bytes:
        """The response."""
        choice = answer.choice
        if choice is None:
            raise RequestError(502, "the worker's answer has no choice")
        self._usage, self._created, self._reason = answer.usage, answer.created, choice.finish_reason
        status = status_of(choice.finish_reason)
        self._add(choice.message)
        for last in self._output[-1:]:  # what cut the answer cut this one alone
            last["status"] = status
        return msgspec.json.encode(self._response(status, self._output))

    def _add(self, message: Message) -> None:
        if message.thought:
            self._output.append(reasoning_item(self._id("rs"), message.thought))
        if message.content:
            self._output.append(message_item(self._id("msg"), message.content))
        for call in message.tool_calls or ():
            self._output.append(call_item(self._id("fc"), call))

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        usage = self._usage if status != "in_progress" else None
        return {
            "id": f"resp_{self.request_id}", "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": INCOMPLETE.get(self._reason or "") if status == "incomplete" else None,
            "output": output, "previous_response_id": None, "store": False, "truncation": "disabled",
            "usage": usage_of(usage) if usage is not None else None, **self._told_back,
        }  # fmt: skip


def told_back(asked: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """What a response repeats of its request: as bytes, which take a fraction of what was parsed."""
    formed = asked.text is not None and asked.text.format is not None
    said = {
        "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens, "model": asked.model,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "temperature": asked.temperature, "text": asked.text if formed else {"format": {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto", "tools": asked.tools or [], "top_p": asked.top_p, "user": asked.user,
        "metadata": asked.metadata or {},
    }  # fmt: skip
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in said.items()}


def text_part(text: str) -> dict[str, Any]:
    """A piece of an assistant's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def thought_part(text: str) -> dict[str, Any]:
    """A piece of reasoning."""
    return {"type": "reasoning_text", "text": text}


def message_item(name: str, text: str) -> dict[str, Any]:
    """The assistant speaks."""
    return {"id": name, "type": "message", "status": "completed", "role": "assistant", "content": [text_part(text)]}


def reasoning_item(name: str, text: str) -> dict[str, Any]:
    """The assistant thinks."""
    return {"id": name, "type": "reasoning", "status": "completed", "summary": [], "content": [thought_part(text)]}


def call_item(name: str, call: ToolCall) -> dict[str, Any]:
    """The assistant calls a function."""
    function = {"call_id": call.id or "", "name": call.function.name or "", "arguments": call.function.arguments or ""}
    return {"id": name, "type": "function_call", "status": "completed", **function}


def status_of(reason: str | None) -> str:
    """Of a response whose last choice ended so."""
    return "incomplete" if reason in INCOMPLETE else "completed"


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage of a response. Who writes to a cache pays nothing for it here."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }  # fmt: skip
