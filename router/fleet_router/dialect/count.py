"""Anthropic's POST /v1/messages/count_tokens through the engine's own /tokenize (vLLM's), so that its tokenizer counts."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from fleet_router.dialect.messages import LAST_TURN, error_object, named
from fleet_router.dialect.messages_request import CountRequest, count_request
from fleet_router.dialect.translation import Translation, parsed
from fleet_router.errors import RequestError
from fleet_wire.unreadable import UNREADABLE


class _Tokenized(msgspec.Struct, frozen=True):
    count: int


_TOKENIZED: Final = msgspec.json.Decoder(_Tokenized)


class CountTokens(Translation):
    """One call of /v1/messages/count_tokens."""

    path: ClassVar = b"/tokenize"
    image: ClassVar = "image"
    names: ClassVar = {"prompt": "messages", "chat_template_kwargs": "thinking", **LAST_TURN}

    def __init__(self, body: bytes, request_id: str) -> None:
        super().__init__(request_id)
        self.fields, self.named = count_request(parsed(body, CountRequest)), named(request_id)

    def end(self) -> bytes:
        """The count."""
        try:
            return msgspec.json.encode({"input_tokens": _TOKENIZED.decode(self.collected).count})
        except UNREADABLE as error:
            raise RequestError(502, f"the worker's answer has no count: {error}") from error

    def error_body(self, error: RequestError) -> bytes:
        """Anthropic's shape."""
        return msgspec.json.encode(error_object(error, self.request_id))
