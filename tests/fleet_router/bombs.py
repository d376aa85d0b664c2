"""JSON that is meant to hurt (H5), and a good request of each dialect to put it into."""

from __future__ import annotations

import json
from typing import Any

from fleet_router.config import HttpBounds

BODY_MOST = HttpBounds().body_bytes
PATHS: dict[bytes, dict[str, Any]] = {
    b"/v1/completions": {"model": "m", "prompt": "p"},
    b"/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "p"}]},
    b"/v1/embeddings": {"model": "m", "input": "p"},
    b"/v1/messages": {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "p"}]},
    b"/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "p"}]},
    b"/v1/responses": {"model": "m", "input": "p"},
}  # fmt: skip


def deep(opening: bytes, closing: bytes, depth: int) -> bytes:
    return opening * depth + b"1" + closing * depth


BOMBS = {
    "depth-of-mib": b"[" * 800 + b'"' + b"a" * (BODY_MOST - 2_000) + b'"' + b"]" * 800,
    "depth": deep(b"[", b"]", 10_000), "objects": deep(b'{"a":', b"}", 10_000), "mib-of-depth": b"[" * (BODY_MOST - 100),
    "nan": b"NaN", "infinity": b"-Infinity", "1e400": b"1e400", "long-number": b"1" * 1_000_000,
    "float": b"1." + b"1" * 1_000_000, "surrogate": b'"\\ud800"', "null-letter": b'"\\u0000"', "half-utf8": b'"\xc3"',
    "overlong": b'"\xc0\x80"', "bom": b"\xef\xbb\xbf1",
    "mib-of-text": b'"' + b"a" * (BODY_MOST - 200) + b'"', "mib-of-escapes": b'"' + b"\\u0041" * 690_000 + b'"',
    "ids": b"[" + b"1," * 1_000_000 + b"1]", "texts": b"[" + b'"a",' * 1_000_000 + b'"a"]',
    "objects-many": b"[" + b'{"role":"user"},' * 250_000 + b'{"role":"user"}]',
    "names": b"{" + b",".join(b'"%d":1' % i for i in range(350_000)) + b"}", "same-name": b"{" + b'"a":1,' * 600_000 + b'"a":1}',
    "escapes-before-a-url": b'[{"role":"user","content":[{"type":"text","text":"\\u0041' + b"a" * 3_000_000 + b'_url"}]}]',
    "regex": b'"' + b"(a+)+" * 500_000 + b'"',
}  # fmt: skip


def with_bomb(path: bytes, field: str, bomb: bytes) -> bytes:
    """A body whose field is that."""
    rest = json.dumps({key: value for key, value in PATHS[path].items() if key != field}).encode()
    return rest[:-1] + b',"' + field.encode() + b'":' + bomb + b"}"
