"""Messages of the KV side channel: msgpack, typed, bounded. One request, one answer, matched by `call`."""

from __future__ import annotations

import msgspec

from fleet_wire.unreadable import UNREADABLE

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", forbid_unknown_fields=True):
    """Reader to owner, once per pair: may we move KV at all?"""

    call: int
    version: int
    compat: str
    block_bytes: int
    block_tokens: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome", forbid_unknown_fields=True):
    """Owner's pool: everything that a reader needs to address it."""

    call: int
    engine_id: str
    epoch: str
    agent: bytes
    """NIXL agent metadata."""
    base_address: int
    block_bytes: int
    num_blocks: int


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew", forbid_unknown_fields=True):
    """The reader is still waiting or reading."""

    call: int
    lease_id: str
    epoch: str
    generation: int


class Confirm(msgspec.Struct, frozen=True, kw_only=True, tag="confirm", forbid_unknown_fields=True):
    """The reader has all bytes: was the lease valid all the time?"""

    call: int
    lease_id: str
    epoch: str
    generation: int


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag="granted", forbid_unknown_fields=True):
    """Yes."""

    call: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused", forbid_unknown_fields=True):
    """No, with a machine-readable reason."""

    call: int
    reason: str
    message: str = ""


Message = Hello | Welcome | Renew | Confirm | Granted | Refused
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame."""
    return _ENCODER.encode(message)


class BadFrameError(ValueError):
    """Bytes that are no message."""


def decode(frame: bytes) -> Message:
    """Parse one frame; BadFrameError on whatever else it is: too long, no msgpack, nested too deeply, text that is no UTF-8."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise BadFrameError(f"a side-channel message of {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        return _DECODER.decode(frame)
    except UNREADABLE as error:
        raise BadFrameError(f"a side-channel message that cannot be read: {error}") from error
