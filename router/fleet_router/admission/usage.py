"""Tokens of a request: an estimate before it runs, the engine's own count from the last bytes of its answer.

Nothing here parses JSON: an answer's `usage` is looked for in its last bytes, a stream that has none is counted by its events.
"""

from __future__ import annotations

import re
from typing import Final

from fleet_router.request import BYTES_PER_TOKEN

TAIL_BYTES: Final = 4096
_USAGE: Final = re.compile(rb'(?<!\\)"usage"\s*:\s*\{([^{}]*)')
"""Up to the first inner object: the details stand behind the totals. A model's own text has its quotes escaped."""
_INPUT: Final = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})\b')
_OUTPUT: Final = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})\b')


def estimated(prompt: bytes) -> int:
    """Tokens of a prompt as it stands in the body: exact for a list of token ids, else by its bytes; at least 1."""
    if prompt[:1] == b"[" and prompt[1:2].isdigit():
        return prompt.count(b",") + 1
    return max(1, int(len(prompt) / BYTES_PER_TOKEN))


def usage_of(tail: bytes) -> tuple[int, int] | None:
    """(input, output) tokens of the last `usage` in these bytes; None when there is none (usage: null counts as none)."""
    at = tail.rfind(b'"usage"', max(0, len(tail) - TAIL_BYTES))
    if at < 0:
        return None
    found = _USAGE.match(tail, at)
    if found is None:
        return None
    prompt = _INPUT.search(found[1])
    output = _OUTPUT.search(found[1])
    return (int(prompt[1]), int(output[1]) if output is not None else 0) if prompt is not None else None
