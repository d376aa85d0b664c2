"""A body → what the engine needs of it: its fields, the hand-off that it names, its prompt as tokens. Pure but for the time it
takes: small bodies are read on the server's own loop, others in a thread, large ones in another process (`reader.py`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from fleet_wire.kv import KvReference
from fleet_worker.engine import protocol as wire
from fleet_worker.engine import tokens
from fleet_worker.engine.errors import BadRequestError, EngineError, UnknownModelError
from fleet_worker.engine.text import Text
from fleet_worker.engine.today import now_said

What = Literal["completion", "chat", "tokenize", "detokenize"]
KINDS: Final[Mapping[str, type[wire.CompletionRequest] | type[wire.ChatRequest]]] = {
    "completion": wire.CompletionRequest, "chat": wire.ChatRequest,
}  # fmt: skip
TELLS: Final[Mapping[str, Callable[..., dict[str, Any]]]] = {"tokenize": tokens.tokenize, "detokenize": tokens.detokenize}
NO_MESSAGES: Final = [wire.ChatMessage(role="user")]
UINT32: Final = "I"
"""As arrays have token ids."""


class Terms(msgspec.Struct, frozen=True):
    """What the engine serves."""

    served: tuple[str, ...]
    vocabulary: int
    longest: int
    """Tokens, prompt plus output."""


class Read(msgspec.Struct, frozen=True):
    """A request for tokens. Of a prompt that is longer than any request may be `tokens` are not told, only their count."""

    asked: wire.Request
    kv: wire.KvParams
    reference: KvReference | None
    count: int
    tokens: Sequence[int]
    said_at: str = ""
    """What time it was for the template that wrote the prompt; empty: none that asks."""


def read_request(raw: bytes, what: What, text: Text, terms: Terms) -> Read:
    """BadRequestError; who asks for another model is told before anything is tokenised."""
    asked = wire.parse(raw, KINDS[what])
    check_model(asked.model, terms.served)
    wire.check_stops(asked)
    kv, reference = wire.kv_of(asked)
    said_at = _said_at(text, reference) if isinstance(asked, wire.ChatRequest) else ""
    prompt = _prompt(asked, text, terms.vocabulary, said_at)
    return Read(asked, kv, reference, len(prompt), prompt if len(prompt) <= terms.longest else (), said_at)


def _said_at(text: Text, reference: KvReference | None) -> str:
    """Whoever decodes asks what time it was when the prompt was prefilled."""
    if not text.asks_the_day:
        return ""
    return now_said() if reference is None else reference.said_at


def check_model(model: str, served: Sequence[str]) -> None:
    """UnknownModelError."""
    if model not in served:
        raise UnknownModelError(f"The model `{model[: wire.MAX_TOLD]}` does not exist.", "model")


def _prompt(asked: wire.Request, text: Text, vocabulary: int, said_at: str) -> list[int]:
    if isinstance(asked, wire.ChatRequest):
        said = text.render_chat(_rows(asked, text), said_at=said_at, effort=asked.reasoning_effort)
        return text.encode(said, add_special=False)
    if isinstance(asked.prompt, str):
        return text.encode(asked.prompt)
    if any(token >= vocabulary for token in asked.prompt):
        raise BadRequestError(f"prompt holds token ids outside 0..{vocabulary - 1}", "prompt")
    return asked.prompt


def _rows(asked: wire.ChatRequest, text: Text) -> list[dict[str, Any]]:
    return wire.text_messages(asked.messages, in_parts=text.takes_parts)


def tell(raw: bytes, what: What, text: Text, terms: Terms) -> bytes:
    """JSON of what /tokenize or /detokenize answers."""
    return msgspec.json.encode(TELLS[what](raw, text, terms.served, terms.longest))


# -- between two processes --------------------------------------------------------------------------------------------
class Told(msgspec.Struct, frozen=True):
    """What came of one body: an error of the request, JSON to hand on, or a Read whose prompt is in `tokens` alone."""

    error: tuple[str, str, str | None] | None = None
    """Class, message, param."""
    answer: bytes = b""
    asked: bytes = b""
    kv: wire.KvParams = wire.KvParams()
    reference: KvReference | None = None
    count: int = 0
    tokens: bytes = b""
    said_at: str = ""


ERRORS: Final = {kind.__name__: kind for kind in (BadRequestError, UnknownModelError)}


def packed(raw: bytes, what: What, text: Text, terms: Terms) -> Told:
    """All that a body is read for, small enough to be unpacked at once: a prompt of 4 MB is its few tokens, or their count."""
    try:
        if what in TELLS:
            return Told(answer=tell(raw, what, text, terms))
        read = read_request(raw, what, text, terms)
    except BadRequestError as error:
        return Told(error=(type(error).__name__, str(error), error.param))
    prompt = {"messages": NO_MESSAGES} if isinstance(read.asked, wire.ChatRequest) else {"prompt": ""}
    asked = msgspec.structs.replace(read.asked, kv_transfer_params=msgspec.Raw(b"null"), **prompt)
    ids = array(UINT32, read.tokens).tobytes()
    body = msgspec.json.encode(asked)
    return Told(asked=body, kv=read.kv, reference=read.reference, count=read.count, tokens=ids, said_at=read.said_at)


def unpacked(told: Told, what: What) -> Read | bytes:
    """The answer to hand on, or the request; the error is raised."""
    if told.error is not None:
        kind, message, param = told.error
        raise ERRORS.get(kind, BadRequestError)(message, param)
    if what in TELLS:
        return told.answer
    if not told.asked:
        raise EngineError("a body was read, and nothing came of it")
    asked = msgspec.json.decode(told.asked, type=KINDS[what])
    return Read(asked, told.kv, told.reference, told.count, array(UINT32, told.tokens), told.said_at)
