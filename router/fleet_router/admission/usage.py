"""Tokens of a request: an estimate before it runs, the engine's own count from the last bytes of its answer.

No answer is parsed here: its `usage` is looked for in the bytes. Streams are asked for one where tokens are counted; one that has
none after all is counted by its events.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from fleet_router.ask import Ask
from fleet_router.lengths import BESIDE, PICTURE, SOUND, beside_bytes
from fleet_router.request import BYTES_PER_TOKEN, with_fields

EMBEDDED: Final[tuple[str, ...]] = ("input", "messages")
_NULL: Final = msgspec.Raw(b"null")
TAIL_BYTES: Final = 4096
SPLIT_BYTES: Final = 256
"""Of the read before: `usage` may be cut in two."""
SHORT_BYTES: Final = 32
"""A read of [DONE] or of a body's end; no `usage` is so short."""
TOLD: Final = b'"prompt_tokens"'
"""In an event that tells it."""
TOLD_LAST: Final = b'"completion_tokens"'
"""The same: a proxy may cut one of them in two."""
EITHER: Final = b'_tokens"'
"""In both."""
OPTIONS: Final = "stream_options"
USAGE: Final = b'{"include_usage":true}'
ASKED: Final = b',"stream_options":' + USAGE + b"}"
EVENT: Final = b"\ndata: "
"""Of a stream. Inside JSON a line break is escaped, so that text cannot look like an event."""
MEDIUM_TOKENS: Final = 1_024
"""What a picture or a sound is taken for: its bytes say nothing of its tokens."""
MEDIUM_LEAST_BYTES: Final = 1_024
"""Of a prompt with one: in less, a picture or a sound takes too little to matter."""
_MEDIUM_MARK: Final = b'"data'
_MEDIUM: Final = re.compile(rb'"(?:data:[^",]{0,128},|data"\s*:\s*")[^"]*"')
"""A data: URL, and the `data` of input_audio."""
_SPACED: Final = re.compile(rb"\s*:\s*(\d{1,9})(?!\d)")
_BEHIND_NAME: Final = frozenset(b": \t\r\n")
_BACKSLASH: Final = ord("\\")
_USUAL: Final = re.compile(
    rb'"usage":\s?\{"prompt_tokens":\s?(\d{1,9}),\s?"total_tokens":\s?\d{1,9},\s?"completion_tokens":\s?(\d{1,9})[,}]'
)
"""As vLLM writes it, with spaces or without: found at once."""
_USAGE: Final = b'"usage":{"prompt_tokens":'
_TOTAL: Final = b',"total_tokens":'
_WRITTEN: Final = b',"completion_tokens":'
DIGITS_MOST: Final = 9
TOKENS_MOST: Final = 10**DIGITS_MOST
USUAL_MOST_BYTES: Final = len(_USAGE) + len(_TOTAL) + len(_WRITTEN) + 3 * DIGITS_MOST + 1
"""Of one that is written so, to the byte behind it."""
_ZERO: Final = ord("0")
_ENDS: Final = b",}"
BETWEEN: Final = re.compile(rb"\r\n[0-9a-fA-F]{1,8}(?:;[^\r\n]*)?\r\n")
"""Between two chunks of a body (RFC 9112, 7.1): proxies cut where they like."""
_CRLF: Final = b"\r\n"
CR: Final = 13
LF: Final = 10
NO_DIGIT: Final = 16
_HEX_VALUES: Final = bytes(int(chr(c), 16) if chr(c) in "0123456789abcdefABCDEF" else NO_DIGIT for c in range(256))
DIGITS_OF_A_CHUNK: Final = 8
"""Of its size: no chunk of gigabytes."""
_ENDS_EVENT: Final = b"\n\n\r\n"
"""Of a chunk that ends with an event as engines write it."""
_ENDS_BODY: Final = b"\r\n0\r\n\r\n"
NEAR_BYTES: Final = 1_024
"""The names of a usage stand so near to a read's end: behind them come its details, [DONE] and the end of the body."""
_OBJECT: Final = re.compile(rb"\s*:\s*\{")


def estimated_of(ask: Ask) -> int:
    """Tokens of a request's prompt, with what a template writes into it; of one that a worker answers alone, of what is to be
    embedded: a list of ids is one only by itself, and a picture stands for fewer tokens than its bytes."""
    if ask.prompt:
        tokens = estimated(ask.prompt)
        return tokens if BESIDE.isdisjoint(ask.fields) else tokens + int(beside_bytes(ask.fields) / BYTES_PER_TOKEN)
    given = [bytes(ask.fields[name]) for name in EMBEDDED if name in ask.fields and ask.fields[name] != _NULL]
    return sum(map(estimated, given)) if given else estimated(b"".join(map(bytes, ask.fields.values())))


def estimated(prompt: bytes) -> int:
    """Tokens of a prompt as it stands in the body: exact for token ids, also in lists of a list, else by its bytes; at least
    1."""
    return int(estimated_at(prompt, BYTES_PER_TOKEN)) or 1


def estimated_at(prompt: bytes, bytes_per_token: float) -> float:
    """The same, where its text has so many bytes a token."""
    if prompt[:1] == b"[":
        if prompt[1:2].isdigit() or (prompt[1:2] == b"[" and prompt[2:3].isdigit()):
            return prompt.count(b",") + 1.0
        if len(prompt) > MEDIUM_LEAST_BYTES and prompt.find(_MEDIUM_MARK) >= 0:
            text, media = _MEDIUM.subn(b"", prompt)
            return len(text) / bytes_per_token + media * MEDIUM_TOKENS
    return len(prompt) / bytes_per_token


def only_text(prompt: bytes) -> bool:
    """Its bytes say what a token of text is: no ids, and nothing of which they say nothing."""
    return not (prompt[:1] == b"[" and prompt[1:2].isdigit()) and prompt.find(PICTURE) < 0 and prompt.find(SOUND) < 0


def usage_of(tail: bytes) -> tuple[int, int] | None:
    """(input, output) tokens of the last `usage` in these bytes; None when there is none (usage: null counts as none). A model's
    own text is no usage: its quotes are escaped."""
    at = tail.rfind(b'"usage"', -TAIL_BYTES)
    return _usage_at(tail, at) if at >= 0 else None


def usage_in(body: bytes) -> tuple[int, int] | None:
    """The same of an answer in one piece, wherever in it: vLLM puts prompt_logprobs and prompt_token_ids behind it."""
    at = body.rfind(b'"usage"')
    while at >= 0:
        if (found := _usage_at(body, at)) is not None:
            return found
        at = body.rfind(b'"usage"', 0, at)
    return None


def cut_in_two(read: bytes) -> bool:
    """Chunks may end elsewhere than behind an event, near the end of this read: a name in it may be cut then."""
    if len(read) <= NEAR_BYTES and chunks_are_events(read):
        return False
    near = max(0, len(read) - NEAR_BYTES)
    breaks = read.count(_CRLF, near)
    return breaks > 2 and _cut_elsewhere(read, near, breaks)


def cut_anywhere(read: bytes) -> bool:
    """A chunk of this read ends elsewhere than behind an event, or its events end with CRLF."""
    if chunks_are_events(read):
        return False
    breaks = read.count(_CRLF)
    return breaks > 2 and _cut_elsewhere(read, 0, breaks)


def chunks_are_events(read: bytes) -> bool:
    """This read is whole chunks, each of which ends behind an event that ends with LF, as engines write them. From size to size:
    to count what stands between costs ten times as much."""
    at, end = 0, len(read)
    while at < end:
        size, begin, digits_end = 0, at, at + DIGITS_OF_A_CHUNK
        digits_end = min(digits_end, end)
        while at < digits_end and (digit := _HEX_VALUES[read[at]]) < NO_DIGIT:
            size, at = size * 16 + digit, at + 1
        behind = at + size + 4
        if at == begin or behind > end or read[at] != CR or read[at + 1] != LF:
            return False
        if read[behind - 2] != CR or read[behind - 1] != LF:
            return False
        if size == 0:
            return behind == end
        if size < 2 or read[behind - 3] != LF or read[behind - 4] != LF:
            return False
        at = behind
    return True


def _cut_elsewhere(read: bytes, near: int, breaks: int) -> bool:
    """From `near` on, where so many `breaks` (CRLF) are, a chunk ends elsewhere than behind an event, or events end with CRLF.
    Each whole chunk has two of its framing, and one of them stands behind an event; the last one has two, behind nothing. Where
    an event ends otherwise (LF, then CRLF) it is not counted: each of those would make up for one of these breaks."""
    more = breaks - 2 * read.count(_ENDS_EVENT, near)
    return more > 2 or (more > 0 and not read.endswith(_ENDS_BODY))


def tells_usage(read: bytes) -> bool:
    """A usage may stand in this read of a stream, wherever it is cut into chunks."""
    joined = BETWEEN.sub(b"", read)
    return joined.find(TOLD) >= 0 or joined.find(TOLD_LAST) >= 0


def can_be(used: tuple[int, int]) -> bool:
    """A request may have so many (input, output) tokens: others that an engine tells are not charged."""
    return 0 <= used[0] < TOKENS_MOST and 0 <= used[1] < TOKENS_MOST


def _usage_at(tail: bytes, at: int) -> tuple[int, int] | None:
    if at > 0 and tail[at - 1] == _BACKSLASH:
        return None
    if (told := as_written(tail, at)) is not None:
        return told
    if (usual := _USUAL.match(tail, at)) is not None:
        return int(usual[1]), int(usual[2])
    if at + 7 >= len(tail) or tail[at + 7] not in _BEHIND_NAME:
        return None
    near = BETWEEN.sub(b"", bytes(memoryview(tail)[at:][:TAIL_BYTES]))  # the size of a chunk is a number, too
    if _OBJECT.match(near, 7) is None:
        return None
    prompt = _number(near, b'"prompt_tokens"')
    return None if prompt is None else (prompt, _number(near, b'"completion_tokens"') or 0)


def as_written(tail: bytes, at: int) -> tuple[int, int] | None:
    """As vLLM writes it without spaces. The pattern took 6,500 of the 160,000 instructions of a request with everything on."""
    near = tail[at : at + USUAL_MOST_BYTES]
    if near[: len(_USAGE)] != _USAGE:  # a slice each time: `startswith` at a place takes seven times as long
        return None
    prompt, at = _whole_at(near, len(_USAGE))
    if at < 0 or near[at : at + len(_TOTAL)] != _TOTAL:
        return None
    _, at = _whole_at(near, at + len(_TOTAL))
    if at < 0 or near[at : at + len(_WRITTEN)] != _WRITTEN:
        return None
    written, at = _whole_at(near, at + len(_WRITTEN))
    return (prompt, written) if 0 <= at < len(near) and near[at] in _ENDS else None


def _whole_at(tail: bytes, at: int) -> tuple[int, int]:
    """(the number that begins there, where it ends); -1 as its end: there is none, or one of more than DIGITS_MOST digits."""
    value, first, most = 0, at, min(len(tail), at + DIGITS_MOST + 1)
    while at < most and 0 <= (digit := tail[at] - _ZERO) <= 9:
        value = value * 10 + digit
        at += 1
    return value, at if first < at <= first + DIGITS_MOST else -1


def _number(tail: bytes, name: bytes) -> int | None:
    at = tail.find(name)
    found = _SPACED.match(tail, at + len(name)) if at >= 0 else None
    return int(found[1]) if found is not None else None


def used_tokens(before: bytes, tail: bytes, events: int, charged: int) -> tuple[int, int]:
    """(input, output) tokens of a stream: the engine's own count in its last two reads of some length, also where a chunk ends in
    the middle of it, else an estimate with a token per event ([DONE] is an event, too)."""
    near = before[-TAIL_BYTES:] + tail if len(tail) < TAIL_BYTES else tail[-TAIL_BYTES:]
    found = usage_of(near) if (whole := not _cut_elsewhere(near, 0, near.count(_CRLF))) else None
    if found is None and not (whole and len(near) <= TAIL_BYTES):  # without their framing more is near
        found = usage_of(BETWEEN.sub(b"", near))
    return found or (charged, events - 1 if events > 1 else 0)


def with_usage(ask: Ask) -> tuple[Ask, bool]:
    """The stream with its usage asked for, and whether that was us: events are no tokens where an engine puts several into one
    (speculative decoding, stream intervals). The client gets none of it."""
    raw = ask.fields.get(OPTIONS)
    if raw is None:
        return with_fields(ask, {OPTIONS: msgspec.Raw(USAGE)}, ASKED), True
    given: dict[str, Any] = msgspec.json.decode(raw) or {}
    if given.get("include_usage"):
        return ask, False
    wanted = given | {"include_usage": True}
    if "continuous_usage_stats" in given:
        wanted["continuous_usage_stats"] = False  # it means nothing without the other, which the client did not ask for
    value = msgspec.json.encode(wanted)
    return with_fields(ask, {OPTIONS: msgspec.Raw(value)}, b',"stream_options":' + value + b"}"), True
