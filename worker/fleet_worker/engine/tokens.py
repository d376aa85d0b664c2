"""POST /tokenize and /detokenize in vLLM's dialect: what the model would be given, without running it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, TypeVar

import msgspec

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.engine import protocol as wire
from fleet_worker.engine.errors import BadRequestError, UnknownModelError
from fleet_worker.engine.neutral import refuse_unsupported
from fleet_worker.engine.text import Text
from fleet_worker.engine.today import now_said


class TemplateArguments(msgspec.Struct, frozen=True):
    """What routers say here of a chat's `reasoning_effort`; others are passed over."""

    reasoning_effort: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True):
    """Text or messages; fields that we do not know are passed over, as vLLM does, but for those of the prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[wire.ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Default: yes for text, no for messages, whose template brings them."""
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateArguments | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """Token ids."""

    tokens: list[wire.Count]
    model: str | None = None


T = TypeVar("T")
WRITTEN: Final = ("tools", "continue_final_message", "chat_template")
"""Into a prompt, by engines that know them: a count without them is of another prompt."""
_TOP: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TOKENIZE: Final = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeRequest)


def tokenize(body: bytes, text: Text, served: Collection[str], max_model_len: int) -> dict[str, Any]:
    """count, max_model_len, tokens; BadRequestError, UnknownModelError."""
    asked, fields = _parsed(body, _TOKENIZE), _parsed(body, _TOP)
    refuse_unsupported({name: fields[name] for name in WRITTEN if name in fields})
    _check_model(asked.model, served)
    if (asked.prompt is None) == (asked.messages is None):
        raise BadRequestError("either prompt or messages is needed", "prompt")
    if asked.messages is not None:
        messages, at = wire.text_messages(asked.messages, in_parts=text.takes_parts), now_said()
        effort = asked.chat_template_kwargs.reasoning_effort if asked.chat_template_kwargs is not None else None
        said = text.render_chat(messages, add_generation_prompt=asked.add_generation_prompt, said_at=at, effort=effort)
        found = text.encode(said, add_special=asked.add_special_tokens is True)
    else:
        found = text.encode(asked.prompt or "", add_special=asked.add_special_tokens is not False)
    return {"count": len(found), "max_model_len": max_model_len, "tokens": found, "token_strs": None}


def detokenize(body: bytes, text: Text, served: Collection[str], _: int) -> dict[str, Any]:
    """prompt; BadRequestError, UnknownModelError."""
    asked = _parsed(body, _DETOKENIZE)
    _check_model(asked.model, served)
    try:
        return {"prompt": text.spell(asked.tokens)}
    except OverflowError as error:
        raise BadRequestError("tokens holds ids that no vocabulary has", "tokens") from error


def _check_model(model: str | None, served: Collection[str]) -> None:
    """An adapter has the tokens of its model."""
    if model is not None and model not in served:
        raise UnknownModelError(f"The model `{model[: wire.MAX_TOLD]}` does not exist.", "model")


def _parsed(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error)) from error
    except UNREADABLE as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
