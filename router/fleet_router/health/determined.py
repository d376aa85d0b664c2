"""Which requests give the same tokens wherever they run. Asked of each stream, and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

KNOWN: Final = frozenset({
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "return_token_ids", "user", "metadata", "store",
    "service_tier", "n", "cache_salt", "presence_penalty", "frequency_penalty", "repetition_penalty",
})  # fmt: skip
"""With another field that says something the answer may depend on what we do not know, or hold what we could not compare."""
GREEDY_BELOW: Final = 1e-5
_NULL: Final = msgspec.Raw(b"null")
_FLOAT: Final = msgspec.json.Decoder(float)


def determined(fields: Mapping[str, msgspec.Raw]) -> bool:
    """The same request gives the same tokens wherever it runs."""
    if fields.get("seed", _NULL) == _NULL and not _below(fields.get("temperature", _NULL), GREEDY_BELOW):
        return False
    if bytes(fields.get("n", _NULL)) not in (b"null", b"1"):
        return False
    return fields.keys() <= KNOWN or all(fields[name] == _NULL for name in fields.keys() - KNOWN)


def _below(raw: msgspec.Raw, bound: float) -> bool:
    try:
        return raw != _NULL and _FLOAT.decode(raw) < bound
    except msgspec.DecodeError:
        return False
