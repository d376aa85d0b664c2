"""The key that the pods of one fleet share: how its file is read, and what is made of it for each purpose. Pure.

A file holds keys, one a line: the first signs, all are accepted. So a key is changed without a moment in which two pods do not
understand each other: the next one is put behind it, later before it, later the old one is taken out.
"""

from __future__ import annotations

import hashlib
import hmac
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import Final

PEER_KEY_ENV: Final = "FLEET_PEER_KEY"
"""The file, for routers and workers. It may be missing, and come later: what needs it is off until then. Images that do not know
this variable pass over it."""
PEER_SCOPE_ENV: Final = "FLEET_PEER_SCOPE"
"""NAMESPACE/FLEET: two fleets that were given one key do not believe each other."""
HANDOFF_PROOF_ENV: Final = "FLEET_HANDOFF_PROOF"
"""`required`, for torch workers: once they have the key, KV goes to and comes from those alone that prove it. The operator says
so to workers that pair with none that knows nothing of it: it is in their compatibility hash. Without it a proof is given to
whoever asks for one, and asked of nobody. Images that do not know this variable pass over it."""
HANDOFF_REQUIRED: Final = "required"
LEAST_KEY_BYTES: Final = 32
KEY_FILE_BYTES: Final = 65_536
MOST_KEYS: Final = 8
"""Each costs whoever checks a proof one more hash."""
PROOF_BYTES: Final = 32
GOSSIP: Final = "gossip"
SEED: Final = "seed"
HANDOFF: Final = "handoff"


def parse_lines(raw: bytes, used_bytes: int = 0) -> tuple[bytes, ...]:
    """Keys of a file. ValueError when there is none, too many, one is too short, or the last one may be half of one: shorter than
    the longest one in use (`used_bytes`), and nothing ends its line. No message holds a key."""
    keys = _lines(raw)
    if not keys:
        raise ValueError("no key in it")
    if any(len(key) < LEAST_KEY_BYTES for key in keys):
        raise ValueError(f"a key is shorter than {LEAST_KEY_BYTES} bytes")
    if len(keys) > MOST_KEYS:
        raise ValueError(f"more than {MOST_KEYS} keys")
    if len(keys[-1]) < used_bytes and not raw.endswith((b"\n", b"\r")):
        raise ValueError("the last key is shorter than the one in use: half of it, unless a line break follows it")
    return tuple(keys)


def longest_key_bytes(raw: bytes) -> int:
    """Of a key file."""
    return max((len(line) for line in _lines(raw)), default=0)


def _lines(raw: bytes) -> list[bytes]:
    """Windows' editors put a mark before a file and a carriage return behind a line: neither is of a key. Files that were put
    together have such marks inside."""
    lines = (line.strip().removeprefix(BOM_UTF8).strip() for line in raw.splitlines())
    return [line for line in lines if line]


def derived(keys: Sequence[bytes], purpose: str, scope: str) -> tuple[bytes, ...]:
    """32 bytes of each key, for this purpose and fleet alone: what one of them tells says nothing of the others."""
    about = f"inferencefleet/{purpose}/v1|{scope}".encode()
    return tuple(hmac.digest(key, about, "sha256") for key in keys)


def proof(key: bytes, *parts: bytes) -> bytes:
    """Keyed BLAKE2b over the parts, each with its length before it: no two lists of parts are the same bytes."""
    made = hashlib.blake2b(key=key, digest_size=PROOF_BYTES)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.digest()


def is_proven(given: bytes, keys: Sequence[bytes], *parts: bytes) -> bool:
    """One of the keys made it. How long this takes does not depend on what is wrong."""
    return proven_by(given, keys, *parts) is not None


def proven_by(given: bytes, keys: Sequence[bytes], *parts: bytes) -> bytes | None:
    """Which of the keys made it; None: none did."""
    right = [key for key in keys if hmac.compare_digest(given, proof(key, *parts))]
    return right[0] if right else None
