"""Which requests give the same tokens wherever they run. Asked of each stream, and compiled."""

from __future__ import annotations

from typing import Final

import msgspec

KNOWN: Final = frozenset({
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "return_token_ids", "user", "metadata", "store",
    "service_tier", "n", "cache_salt", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "reasoning_effort",
})  # fmt: skip
"""With another field that says something the answer may depend on what we do not know, or hold what we could not compare."""
GREEDY_BELOW: Final = 1e-5
NULL: Final = b"null"
ZEROS: Final = frozenset({b"0", b"0.0"})
"""As nearly all write it: seen without a parser."""
_FLOAT: Final = msgspec.json.Decoder(float)


def determined(fields: dict[str, msgspec.Raw]) -> bool:
    """The same request gives the same tokens wherever it runs."""
    if not _is_said(fields.get("seed")) and not _is_greedy(fields.get("temperature")):
        return False
    count = fields.get("n")
    if count is not None and bytes(count) not in (NULL, b"1"):
        return False
    return all(name in KNOWN or not _is_said(value) for name, value in fields.items())


def _is_said(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw) != NULL


def _is_greedy(raw: msgspec.Raw | None) -> bool:
    if raw is None:
        return False
    text = bytes(raw)
    if text in ZEROS:
        return True
    try:
        return text != NULL and _FLOAT.decode(text) < GREEDY_BELOW
    except msgspec.DecodeError:
        return False
