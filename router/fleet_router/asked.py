"""A request as it is handed from module to module, and the few JSON documents of workers that are read.

The Structs that the compiled modules pass around. They are apart because the compiler (mypyc) does not hand a class's keywords to
msgspec: what is declared frozen here would not be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from fleet_router.policy.side import Steps

_NULL: Final = msgspec.Raw(b"null")
_NOTHING: Final = msgspec.Raw()


class Ask(msgspec.Struct, frozen=True):
    """A parsed request: its fields as raw JSON, and what routing and limits need."""

    fields: dict[str, msgspec.Raw]
    prompt: bytes
    stream: bool
    original: bytes | None
    """The body as it came when nothing had to be stripped."""
    alone: bool = False
    """One worker serves it without any KV from elsewhere: nothing is generated."""
    adapter: str = ""
    """The adapter that `model` names; empty: the base model."""
    counts: bool = False
    """Alone, and it is tokenised and no more: no slot is needed for it."""
    added: bytes = b""
    """Fields of ours, in place of the last brace of `original`: a comma before and that brace behind them."""

    @property
    def size_bytes(self) -> int:
        """Roughly what keeping it costs: its values and the prompt."""
        return sum(memoryview(value).nbytes for value in self.fields.values()) + len(self.prompt)


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


class Hints(msgspec.Struct, frozen=True):
    """Nothing of it is needed."""

    session: bytes = b""
    """Value of the session header."""
    headers: Mapping[bytes, bytes] = {}
    """Those that tier rules look at, by lower-case name."""
    others: float = 1.0
    """How much the seconds of others count against this request's own."""
    local: bool = False
    """No prefill worker is to take part: they failed it, or it has nothing to hand over."""
    tokens: float = 0.0
    """Of the prompt, when they were counted; 0: estimate them."""
    blocks: Steps = ()
    """What the precise index knows of the prompt."""
    precise: int = 0
    """Workers, as bits, of which it knows all."""
    tier: str = ""
    """Only this tier may answer, the others have another model; empty: any may."""
