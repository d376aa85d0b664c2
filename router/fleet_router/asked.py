"""The few JSON documents of clients and workers that are read.

Apart from the compiled modules: the compiler (mypyc) does not hand a class's keywords to msgspec, and what is declared here would
not be there.
"""

from __future__ import annotations

from typing import Final

import msgspec

_NULL: Final = msgspec.Raw(b"null")
_NOTHING: Final = msgspec.Raw()


class SaidBy(msgspec.Struct, gc=False):
    """Of a conversation; its template is the engine's, but all know a role."""

    role: msgspec.Raw = msgspec.Raw()


class Said(msgspec.Struct, gc=False):
    """The same, for its length."""

    content: msgspec.Raw = _NULL


class Part(msgspec.Struct, gc=False):
    """Of a message: all but text has a length of its own."""

    text: msgspec.Raw = _NULL


class Anything(msgspec.Struct, gc=False):
    """A JSON object that is only gone through."""


class Prefilled(msgspec.Struct):
    """A prefill answer."""

    kv_transfer_params: msgspec.Raw = _NULL
    prompt_token_ids: msgspec.Raw = _NULL


class Leased(msgspec.Struct):
    """A reference to KV that our worker gave."""

    lease_id: str = ""


class Tokenised(msgspec.Struct):
    """An answer to /tokenize."""

    tokens: list[int] = []


class MayBeLarge(msgspec.Struct, gc=False):
    """What may be long, or has a bound of its own that names it; anything else is passed over, which costs next to nothing."""

    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    functions: msgspec.Raw = _NOTHING
    logit_bias: msgspec.Raw = _NOTHING
    stop: msgspec.Raw = _NOTHING
    bad_words: msgspec.Raw = _NOTHING
    stop_token_ids: msgspec.Raw = _NOTHING
    allowed_token_ids: msgspec.Raw = _NOTHING
    logprob_token_ids: msgspec.Raw = _NOTHING
    response_format: msgspec.Raw = _NOTHING
    structured_outputs: msgspec.Raw = _NOTHING
    guided_json: msgspec.Raw = _NOTHING
    guided_regex: msgspec.Raw = _NOTHING
    guided_choice: msgspec.Raw = _NOTHING
    guided_grammar: msgspec.Raw = _NOTHING
    chat_template_kwargs: msgspec.Raw = _NOTHING
    prompt_embeds: msgspec.Raw = _NOTHING
    chat_template: msgspec.Raw = _NOTHING
    media_io_kwargs: msgspec.Raw = _NOTHING
    mm_processor_kwargs: msgspec.Raw = _NOTHING
    repetition_detection: msgspec.Raw = _NOTHING
