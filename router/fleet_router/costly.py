"""Fields of a request whose price at an engine grows with what a client writes: bounded before any worker sees them; and those
that have an engine run something of the client's or answer in another way than we can follow: refused by name, never left out,
because an answer to something else than was asked is worse than none. Samplers' numbers are among them: 1e400 is infinity to an
engine that reads JSON as Python does, and what comes of a division by it is no probability.

Engines bound some of them late or not at all (vLLM takes 16,384 choices; CVE-2026-34756 and others). What they mean is theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from fleet_router.errors import RequestError
from fleet_wire.unreadable import UNREADABLE

CHOICES_MOST: Final = 8
STOPS_MOST: Final = 64
STOP_BYTES_MOST: Final = 8_192
"""Of all stop strings together."""
IDS_MOST: Final = 1_024
"""Token ids of a list, tokens with a bias."""
ENDS_MOST: Final = 96
"""Token ids to stop at, with `min_tokens`: vLLM 0.32 on a GPU keeps 128 with its model's own ones, and dies of more."""
LIST_BYTES_MOST: Final = 65_536
LOGPROBS_MOST: Final = 20
GRAMMAR_BYTES_MOST: Final = 65_536
"""Of a schema, a regular expression, a grammar: engines compile them."""
NUMBER_TO_COUNT: Final = re.compile(rb"[0-9]{3}")
"""Without one, no integer of more than 64 bits, nor arrays that are too long for an engine."""
ITEM_COUNTS: Final[tuple[str, ...]] = ("minItems", "maxItems")
ITEMS_MOST: Final = 65_536
"""Of all arrays of a schema together: 0.2 s and 100 MB of an engine; a million of maxItems took 13 s of its loop."""
REPEATED: Final = re.compile(r"\{([0-9]*)(?:,([0-9]*))?\}")
"""{3}, {3,}, {1,3}."""
REPEATS_MOST: Final = 2_048
"""Of all patterns of a schema together: vLLM's loop stands still for the square of it, 1 s; {9000} took 10 s and more."""
SCHEMA_IN_TEXT: Final = "json"
"""Of `structured_outputs`."""
LEAST_INTEGER: Final = -(2**63)
MOST_INTEGER: Final = 2**64 - 1
"""Those that msgpack has."""
DIGITS_MOST: Final = 19
"""Of a number in a string, which vLLM reads as one: with more it may be none of them."""
TOOLS_BYTES_MOST: Final = 262_144
TEMPLATE_BYTES_MOST: Final = 65_536
REPETITION_MOST: Final[Mapping[str, int]] = {"max_pattern_size": 64, "min_count": 16}
"""Of vLLM's own detector, which compares a whole answer with itself at each token, in the loop that all share, up to such a size:
half a second a token behind 4,096 of them."""
NOT_A_TEMPLATES: Final = frozenset({
    "chat_template", "tokenize", "conversation", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "tokenizer", "model_config",
})  # fmt: skip
"""Arguments of transformers' apply_chat_template: with one of these in `chat_template_kwargs` a client's own template runs, or
the tokenizer in the engine's loop (CVE-2025-61620, CVE-2025-62426)."""

_NUMBER: Final = msgspec.json.Decoder(int | bool | None)
_STOPS: Final = msgspec.json.Decoder(str | list[str] | None)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw] | None)
_FLAG: Final = msgspec.json.Decoder(bool | None)
_ARGUMENTS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_FLOAT: Final = msgspec.json.Decoder(float | None)
_COUNTS: Final = msgspec.json.Decoder(dict[str, int | None] | None)
_ANYTHING: Final = msgspec.json.Decoder(Any)
_BIASES: Final = msgspec.json.Decoder(dict[str, float] | None)
_PLAIN: Final = msgspec.json.Decoder(int | float | str | bool | None)


def _number(most: int) -> Callable[[str, msgspec.Raw], None]:
    def check(name: str, raw: msgspec.Raw) -> None:
        found = _NUMBER.decode(raw)
        if found is not None and not 0 <= found <= most:  # -1 is the whole vocabulary (vLLM's logprobs)
            raise _too_much(name, f"is {found}; allowed are {'0' if found < 0 else 'up'} to {most}")

    return check


def _has_place(number: int) -> bool:
    """In 64 bits, as msgpack has them."""
    return LEAST_INTEGER <= number <= MOST_INTEGER


def _fits(name: str, raw: msgspec.Raw) -> None:
    """A number that vLLM does not bound before it hands it on as msgpack: what has no place there is 500 at each worker."""
    found = _PLAIN.decode(raw)
    fits = len(found) <= DIGITS_MOST if isinstance(found, str) else not isinstance(found, int) or _has_place(found)
    if not fits:
        raise _too_much(name, "has no place in 64 bits, and engines cannot take it")


def _finite(_: str, raw: msgspec.Raw) -> None:
    _FLOAT.decode(raw)


def _stops(name: str, raw: msgspec.Raw) -> None:
    _bytes(STOP_BYTES_MOST)(name, raw)
    found = _STOPS.decode(raw)
    if isinstance(found, list) and len(found) > STOPS_MOST:
        raise _too_much(name, f"has {len(found)} strings; allowed are {STOPS_MOST}")


def _ids(name: str, raw: msgspec.Raw) -> None:
    _bytes(LIST_BYTES_MOST)(name, raw)
    found = _LIST.decode(raw)
    if found is not None and len(found) > IDS_MOST:
        raise _too_much(name, f"has {len(found)} items; allowed are {IDS_MOST}")


def _biases(name: str, raw: msgspec.Raw) -> None:
    _bytes(LIST_BYTES_MOST)(name, raw)
    found = _BIASES.decode(raw)
    if found is not None and len(found) > IDS_MOST:
        raise _too_much(name, f"has {len(found)} tokens; allowed are {IDS_MOST}")


def _bytes(most: int) -> Callable[[str, msgspec.Raw], None]:
    def check(name: str, raw: msgspec.Raw) -> None:
        if (size := memoryview(raw).nbytes) > most:
            raise _too_much(name, f"has {size} bytes; allowed are {most}")

    return check


def _schema(name: str, raw: msgspec.Raw) -> None:
    """vLLM hands a schema to its engine as msgpack, and answers 500 where that has no such integer (0.32; a uint256, say): as if
    the workers were ill, each that is asked. What its first compiler does not take (minItems above 31 bits) llguidance is asked
    for, and that writes out each item of an array: minItems of 2**31 took 20 GB and the worker's life, then the next one's."""
    _bytes(GRAMMAR_BYTES_MOST)(name, raw)
    if NUMBER_TO_COUNT.search(bytes(raw)) is None:
        return
    items, repeats = 0, 0.0
    left: list[Any] = [_ANYTHING.decode(raw)]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
            left.append(_in_text(value.get(SCHEMA_IN_TEXT)))
            items += sum(most for each in ITEM_COUNTS if isinstance(most := value.get(each), int) and most > 0)
            repeats += _repeats(value)
        elif isinstance(value, list):
            left += value
        elif isinstance(value, int) and not _has_place(value):
            raise _too_much(name, "holds an integer that has no place in 64 bits, which engines cannot take")
    if items > ITEMS_MOST:
        raise _too_much(name, f"counts {items} items in minItems and maxItems together; allowed are {ITEMS_MOST}")
    if repeats > REPEATS_MOST:
        raise _too_much(name, f"repeats {repeats:.0f} times in its patterns together; allowed are {REPEATS_MOST}")


def _repeats(schema: dict[str, Any]) -> float:
    """What its own patterns repeat."""
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    patterns = [pattern] if isinstance(pattern, str) else []
    if isinstance(named, dict):
        patterns += named
    return sum(float(found[2] or found[1] or 0) for one in patterns for found in REPEATED.finditer(one))


def _in_text(value: Any) -> Any:
    """A schema that is text; what is none is the engine's to refuse."""
    if not isinstance(value, str):
        return None
    try:
        return _ANYTHING.decode(value)
    except UNREADABLE:
        return None


def _never(why: str) -> Callable[[str, msgspec.Raw], None]:
    def check(name: str, raw: msgspec.Raw) -> None:
        if bytes(raw) != b"null":
            raise _too_much(name, f"is not served: {why}")

    return check


def _beam(name: str, raw: msgspec.Raw) -> None:
    if _FLAG.decode(raw):
        raise _too_much(name, "is not served: beams are not sampled, and their number has no bound at the engine")


def _each_token(name: str, raw: msgspec.Raw) -> None:
    """vLLM puts so many tokens into one event of a stream: one that is told nothing of between its first and its last token looks
    like a worker that has fallen silent, and whoever leaves before the end is charged for one token."""
    if (found := _NUMBER.decode(raw)) is not None and found != 1:
        raise _too_much(name, f"is {found}; allowed is 1: streams are followed token by token")


def _repetition(name: str, raw: msgspec.Raw) -> None:
    found = _COUNTS.decode(raw) or {}
    for field, most in REPETITION_MOST.items():
        if (asked := found.get(field)) is not None and not 0 <= asked <= most:
            raise RequestError(400, f"{name}.{field} is {asked}; allowed are 0 to {most}", param=name)


def _template_arguments(name: str, raw: msgspec.Raw) -> None:
    """What a template reads is the client's; what engines hand on to the tokenizer beside it is not."""
    _bytes(TEMPLATE_BYTES_MOST)(name, raw)
    for argument in _ARGUMENTS.decode(raw) or ():
        if argument in NOT_A_TEMPLATES:
            raise RequestError(400, f"{name}.{argument} is not served: only what the model's template reads is", param=name)


def _too_much(name: str, what: str) -> RequestError:
    return RequestError(400, f"{name} {what}", param=name)


_CHECKS: Final[Mapping[str, Callable[[str, msgspec.Raw], None]]] = {
    "n": _number(CHOICES_MOST), "best_of": _number(CHOICES_MOST), "stop": _stops, "bad_words": _stops,
    "stop_token_ids": _ids, "allowed_token_ids": _ids, "logprob_token_ids": _ids, "logit_bias": _biases,
    "logprobs": _number(LOGPROBS_MOST), "top_logprobs": _number(LOGPROBS_MOST), "prompt_logprobs": _number(LOGPROBS_MOST),
    "prompt_embeds": _never("tensors of clients are loaded by nobody"),
    "chat_template": _never("a conversation is rendered by the model's own template"),
    "media_io_kwargs": _never("how media are read is the engine's to decide"),
    "mm_processor_kwargs": _never("how media are read is the engine's to decide"),
    "use_beam_search": _beam, "chat_template_kwargs": _template_arguments, "stream_interval": _each_token,
    "repetition_detection": _repetition, "top_k": _fits, "thinking_token_budget": _fits,
    "response_format": _schema, "structured_outputs": _schema,
    "tools": _bytes(TOOLS_BYTES_MOST), "functions": _bytes(TOOLS_BYTES_MOST),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        _bytes(GRAMMAR_BYTES_MOST),
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"),
        _finite,
    ),
}  # fmt: skip
COSTLY: Final = frozenset(_CHECKS)


def _check_ends(fields: Mapping[str, msgspec.Raw]) -> None:
    """Both were looked at by themselves, but of who generates nothing."""
    found = _LIST.decode(fields["stop_token_ids"]) or ()
    if len(found) > ENDS_MOST and bytes(fields["min_tokens"]) not in (b"0", b"null"):
        raise _too_much("stop_token_ids", f"has {len(found)} items; with min_tokens allowed are {ENDS_MOST}")


def check_costly(fields: Mapping[str, msgspec.Raw]) -> None:
    """RequestError 400 names the first field that asks for too much, or that is of a type of which nobody could say how much."""
    for name, raw in fields.items():
        if (check := _CHECKS.get(name)) is None:
            continue
        try:
            check(name, raw)
        except UNREADABLE as error:  # also of a depth that was no end where the body was read, from higher up
            raise RequestError(400, f"{name}: {error}", param=name) from error
    if "stop_token_ids" in fields and "min_tokens" in fields:
        _check_ends(fields)
