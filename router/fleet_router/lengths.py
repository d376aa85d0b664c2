"""How long a prompt is, as far as its bytes tell: what is too long whatever the tokenizer is refused here, what surely fits is
asked of nobody. Between the two only a tokenizer can tell: the precise index, a worker's /tokenize or its prefill answer.

Text counts by its own bytes: the JSON around it, and pictures inside it, say nothing of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from fleet_router.asked import Part, Said
from fleet_router.errors import RequestError
from fleet_router.fields import LARGE_BYTES, check_values
from fleet_wire.unreadable import UNREADABLE

SAFE_BYTES_PER_TOKEN: Final = 16.0
"""No tokenizer makes fewer tokens than this of plain text (English has 4 to 5 bytes a token, Chinese written as \\uXXXX up to
12): above it a prompt is surely too long."""
TEMPLATE_TOKENS: Final = 1_024
"""What a chat template may add of its own, where it matters that prompt and answer surely fit together."""
INPUTS_MOST: Final = 131_072
"""Quotes and brackets of a large list of inputs, or items of other kinds, which are none; with more of them inputs are not looked
at one by one."""
PICTURE: Final = b"_url"
SOUND: Final = b"input_audio"
"""In messages: parts whose bytes say nothing of their tokens."""
BESIDE: Final = frozenset({"tools", "documents", "chat_template_kwargs"})
"""Fields that a template writes into the prompt: the last two as it likes."""
NEARLY_ALL: Final = 8
"""Of a prompt with so many times the bytes of what is beside it."""
TOLD_AGAIN: Final = ("echo", "prompt_logprobs", "return_token_ids", "return_prompt_text")
"""With one of these an answer tells its prompt, in one event of a stream."""
TOLD_BYTES: Final = 2_048
"""For each byte of the prompt: a token with 20 others that it might have been, and their log-probabilities."""


_SAID: Final = msgspec.json.Decoder(list[Said])
_PARTS: Final = msgspec.json.Decoder(list[Part])
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_INNER: Final = re.compile(rb"\[[^\[\]]*\]")


def told_again_bytes(fields: Mapping[str, msgspec.Raw], prompt_bytes: int) -> int:
    """How long one event of the answer may be because it tells the prompt again; 0 where nobody asked for that."""
    asked = any(bytes(fields.get(name, b"null")) not in (b"null", b"false") for name in TOLD_AGAIN)
    return TOLD_BYTES * prompt_bytes if asked else 0


def tells_prompt(fields: Mapping[str, msgspec.Raw]) -> bool:
    """The answer holds the prompt's text, its control tokens among it."""
    return any(bytes(fields.get(name, b"null")) not in (b"null", b"false") for name in ("echo", "return_prompt_text"))


def check_text(size_bytes: int, most: int, name: str) -> None:
    """RequestError 400 for text that has more than `most` tokens whatever the tokenizer."""
    if size_bytes > most * SAFE_BYTES_PER_TOKEN:
        raise RequestError(400, f"{name} has {size_bytes} bytes: longer than {most} tokens whatever the tokenizer", param=name)


def too_many(tokens: int, most: int, name: str) -> RequestError:
    """Somebody who knows has counted."""
    return RequestError(400, f"{name} has {tokens} tokens; allowed are {most}", param=name)


def check_messages(raw: bytes, most: int, name: str) -> None:
    """The same of a conversation, by the text in it. `raw`: its JSON, whose roles were read already."""
    if len(raw) > most * SAFE_BYTES_PER_TOKEN:
        check_values(raw, name)
        try:
            size_bytes = sum(_text_bytes(said.content) for said in _SAID.decode(raw))
        except UNREADABLE as error:  # inside a long text, where nobody has looked, or too deep
            raise RequestError(400, f"{name}: {error}", param=name) from error
        check_text(size_bytes, most, name)


def _text_bytes(content: msgspec.Raw) -> int:
    raw = bytes(content)
    if raw.startswith(b'"'):
        return len(raw) - 2
    if not raw.startswith(b"["):
        return 0
    try:
        return sum(_text_bytes(part.text) for part in _PARTS.decode(content))
    except msgspec.DecodeError:
        return 0  # the engine's to refuse


def check_input(raw: bytes, most: int, name: str, *, inner: bool = False) -> None:
    """Of an embedding: text, token ids, a conversation (vLLM), or a list of these; each input has the limit for itself. Lists in
    lists of lists are no input: the engine's to refuse, for to look into each of them is to copy all that is in it."""
    if len(raw) <= 2 * most:  # so many bytes are not more token ids, either
        return
    if raw.startswith(b'"'):
        check_text(len(raw) - 2, most, name)
    elif raw.startswith(b"["):
        first = raw[1:].lstrip()[:1]
        if first.isdigit():
            if (tokens := raw.count(b",") + 1) > most:
                raise too_many(tokens, most, name)
        elif first == b"{":
            check_messages(raw, most, name)
        elif not inner:
            _check_each(raw, most, name)


def _check_each(raw: bytes, most: int, name: str) -> None:
    if len(raw) > LARGE_BYTES and (raw.count(b'"') + raw.count(b"[") > INPUTS_MOST or _separate(raw) > INPUTS_MOST):
        return  # to look at each would hold everybody up: engines refuse what is longer than their context
    for one in _LIST.decode(raw):
        if memoryview(one).nbytes > 2 * most:
            check_input(bytes(one), most, name, inner=True)


def _separate(raw: bytes) -> int:
    """How many commas of a list stand in no text and in no list of it."""
    if raw.count(b",") <= INPUTS_MOST:
        return 0
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _INNER.sub(b"", b"".join(plain.split(b'"')[::2])[1:]).count(b",")


def upper_bound(fields: Mapping[str, msgspec.Raw], prompt: bytes) -> int | None:
    """Tokens that a prompt has at most: no token stands for less than a byte; None where bytes say nothing. The tokens that a
    conversation's template adds are fewer than the bytes of JSON around each message; the template's own text is not in it."""
    if prompt.find(PICTURE) >= 0 or prompt.find(SOUND) >= 0:  # `in` raises and catches an error first
        return None
    return len(prompt) if BESIDE.isdisjoint(fields) else len(prompt) + beside_bytes(fields)


def beside_bytes(fields: Mapping[str, msgspec.Raw]) -> int:
    """Of what a template may write into the prompt besides the conversation."""
    return sum(memoryview(fields[name]).nbytes for name in BESIDE if name in fields)


def nearly_all(fields: Mapping[str, msgspec.Raw], prompt: bytes) -> bool:
    """Next to nothing but `prompt` is of what the engine counts."""
    return BESIDE.isdisjoint(fields) or beside_bytes(fields) * NEARLY_ALL <= len(prompt)


def uncertain(fields: Mapping[str, msgspec.Raw], prompt: bytes, most: int, longest: int) -> bool:
    """A prompt may have more than `most` tokens, and nobody would notice: an engine refuses by itself what is longer than its
    context (`longest`; 0: not known)."""
    if longest and most >= longest:
        return False
    bound = upper_bound(fields, prompt)
    return bound is None or bound > most
