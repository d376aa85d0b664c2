"""Which path speaks which dialect, and the shape of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from fleet_router.ask import Ask
from fleet_router.config import RouterConfig
from fleet_router.dialect.count import CountTokens
from fleet_router.dialect.messages import Messages, error_object, named
from fleet_router.dialect.responses import Responses
from fleet_router.dialect.translation import CHAT, Translation
from fleet_router.errors import RequestError, error_json
from fleet_router.request import parse_alone, parse_body

ANTHROPIC: Final = b"/v1/messages"
TRANSLATED: Final[Mapping[bytes, type[Messages] | type[Responses] | type[CountTokens]]] = {
    ANTHROPIC: Messages, b"/v1/messages/count_tokens": CountTokens, b"/v1/responses": Responses,
}  # fmt: skip
ALONE: Final = frozenset({b"/tokenize", b"/detokenize", b"/v1/embeddings"})
"""Answered by one worker as they are."""
COUNTING: Final = frozenset({b"/tokenize", b"/detokenize"})
"""Of these: nothing runs on the model."""


def translation_of(path: bytes, body: bytes, request_id: str) -> Translation | None:
    """None for paths that workers know; RequestError 400."""
    kind = TRANSLATED.get(path)
    return kind(body, request_id) if kind is not None else None


def ask_of(translation: Translation, config: RouterConfig) -> Ask:
    """The request that a worker gets; RequestError 400 in the client's words. It can be made once."""
    try:
        if translation.path == CHAT:
            return parse_body(translation.take_body(), True, config)
        return parse_alone(translation.take_body(), config, counts=translation.path in COUNTING)
    except RequestError as error:
        raise translation.renamed(error) from error


def names_of(url: bytes, request_id: str) -> str:
    """Header lines by which clients of this URL know an answer, each with its line break behind it."""
    more = named(request_id) if url.startswith(ANTHROPIC) else ()
    return f"x-request-id: {request_id}\r\n" + "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in more)


def error_body(url: bytes, error: RequestError, request_id: str) -> bytes:
    """An error in the shape that clients of this URL read."""
    if url.startswith(ANTHROPIC):
        return msgspec.json.encode(error_object(error, request_id))
    return error_json(error, request_id)
