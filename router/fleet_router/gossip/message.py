"""One datagram: bounded, typed, signed. Pure: bytes in, message out.

    | 16 bytes: keyed BLAKE2b of the rest | msgpack of a Message |

The key is shared by the routers of a fleet. What is signed says who sends, when and the how many-th message it is, so that nobody
who sees a datagram can use it again. Nothing is encrypted: what can be read is how busy workers are, and 64-bit hashes of prompts
that begin with the tenant's secret salt where a fleet has tenants.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from fleet_wire.peerkey import parse_lines

MAC_BYTES: Final = 16
DATAGRAM_BYTES: Final = 1_400
"""Fits an Ethernet frame also inside a tunnel: a datagram in pieces is lost when one of them is."""
SKEW_MS: Final = 30_000
"""Clocks of two routers may differ by so much, one way."""
MOST_ROWS: Final = 256
MOST_KEYS: Final = 120
"""Keys of a prompt in one hint: the first 30 KB of it."""

Number = Annotated[int, msgspec.Meta(ge=0)]
"""Msgpack itself ends at 64 bits."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Signed = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]


class Load(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one router has at one worker."""

    worker: Number
    """`name_of` its uid."""
    inflight: Count
    """Legs that run."""
    pending: Count
    """Prefills that are not seen done."""
    prefills: Number
    """Prefills that were ever sent."""
    tokens: Number
    """Uncached tokens of these."""


class Use(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one tenant has used at one router."""

    tenant: Number
    inflight: Count
    requests: Signed
    """Ever charged less what was given back."""
    tokens: Signed


class Hint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prompt that was sent to a worker."""

    worker: Number
    keys: Annotated[tuple[Number, ...], msgspec.Meta(min_length=1, max_length=MOST_KEYS)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What changed at one router, or is told once more."""

    version: Literal[1]
    sender: Number
    number: Number
    """Of this datagram, from 1 on; a receiver takes rising ones alone."""
    stamp_ms: Number
    """Wall clock of the sender."""
    age_ms: Number
    """How long the sender has been there."""
    loads: Annotated[tuple[Load, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()
    uses: Annotated[tuple[Use, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()
    hints: Annotated[tuple[Hint, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()


class Refused(Exception):
    """A datagram that is not taken; `reason` is one of REASONS. `ahead_s`: of `clock`, by how much its sender's is ahead."""

    def __init__(self, reason: str, ahead_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.ahead_s = reason, ahead_s


REASONS: Final = ("size", "signature", "format", "clock", "peers", "number")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def name_of(text: str) -> int:
    """64 bits that stand for a worker's uid or a tenant's name."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def parse_keys(raw: bytes) -> tuple[bytes, ...]:
    """Keys of a file that is for gossip alone (`parse_lines` has its form, and ValueError)."""
    return of_lines(parse_lines(raw))


def of_lines(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """As datagrams are signed with them."""
    return tuple(hashlib.sha256(key).digest() for key in keys)


def seal(message: Message, key: bytes) -> bytes:
    """The datagram."""
    body = _encoder.encode(message)
    return _mac(body, key) + body


def unseal(data: bytes, keys: Sequence[bytes], now_ms: int) -> Message:
    """Refused: not one of ours. Nothing is parsed before the signature is right."""
    if not MAC_BYTES < len(data) <= DATAGRAM_BYTES:
        raise Refused("size")
    mac, body = data[:MAC_BYTES], data[MAC_BYTES:]
    if not any(hmac.compare_digest(mac, _mac(body, key)) for key in keys):
        raise Refused("signature")
    try:
        message = _decoder.decode(body)
    except msgspec.MsgspecError:
        raise Refused("format") from None
    if abs(message.stamp_ms - now_ms) > SKEW_MS:
        raise Refused("clock", (message.stamp_ms - now_ms) / 1000)
    return message


def _mac(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=MAC_BYTES).digest()
