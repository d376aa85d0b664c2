"""Messages of the KV side channel: msgpack, typed, bounded. One request, one answer, matched by `call`."""

from __future__ import annotations

import msgspec

from fleet_wire.kv import KvReference
from fleet_wire.unreadable import UNREADABLE

PROTOCOL_VERSION = 1
PROVEN_VERSION = 2
"""What a reader says that knows a Challenge. Workers that know none refuse this version, at once."""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", forbid_unknown_fields=True):
    """Reader to owner, once per pair: may we move KV at all? Its fields are those of version 1, which older workers read,
    too."""

    call: int
    version: int
    compat: str
    block_bytes: int
    block_tokens: int


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge", forbid_unknown_fields=True):
    """Owner to reader: prove this. Only to who said PROVEN_VERSION."""

    call: int
    challenge: bytes


class Prove(msgspec.Struct, frozen=True, kw_only=True, tag="prove", forbid_unknown_fields=True):
    """Reader to owner: the greeting, proven."""

    call: int
    version: int
    compat: str
    block_bytes: int
    block_tokens: int
    challenge: bytes
    nonce: bytes
    """Random per greeting: the answer is over it, too."""
    proof: bytes = b""
    """`proving_parts` under the key that the fleet shares."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome", forbid_unknown_fields=True, omit_defaults=True):
    """Owner's pool: everything that a reader needs to address it. Without a proof it has the bytes that it had before there was
    any."""

    call: int
    engine_id: str
    epoch: str
    agent: bytes
    """NIXL agent metadata."""
    base_address: int
    block_bytes: int
    num_blocks: int
    proof: bytes = b""
    """`welcoming_parts` under the key that the fleet shares: to whoever proved a greeting."""


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


class AskHot(msgspec.Struct, frozen=True, kw_only=True, tag="hot", forbid_unknown_fields=True):
    """New worker to one that serves: a part of what you have cached that is asked for most, under a lease. Workers that do not
    know this message drop it: no answer is an answer."""

    call: int
    version: int
    compat: str
    block_bytes: int
    block_tokens: int
    weights: str
    """Digest of the model's weights, architecture, tokenizer and template (KvReference.weights)."""
    names: str
    """How blocks are named: fleet_wire.blocks.NAMES."""
    reader: str
    """Random per new worker. One is lent to at a time."""
    start: int
    """Blocks of the owner's list that were given to this reader before; 0: the owner makes a new list."""
    most_blocks: int
    """Of the whole list."""
    stamp_ms: int = 0
    """Wall clock of the one that asks."""
    nonce: bytes = b""
    """Random per question: nobody who saw it can ask it again."""
    proof: bytes = b""
    """`asking_parts` under the key that the fleet shares; empty: it has none."""


class HotBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One cached block, and all that its name is a hash of."""

    name: bytes
    parent: bytes
    """Name of the block before it; of a first block its root, which a tenant's salt is in."""
    tokens: bytes
    """Token ids as little-endian uint32."""
    is_first: bool


class Hottest(msgspec.Struct, frozen=True, kw_only=True, tag="hottest", forbid_unknown_fields=True):
    """A part of the owner's list: parents before their children, each block with all blocks before it in this part or an earlier
    one. Adapters' blocks are never in it."""

    call: int
    blocks: tuple[HotBlock, ...]
    reference: KvReference | None
    """Where they are, in the same order; None without blocks."""
    next: int
    """`start` of the next part."""
    more: bool
    proof: bytes = b""
    """`answering_parts` under the key that the fleet shares: who took the address of a worker that has gone has none."""


Message = Hello | Challenge | Prove | Welcome | Renew | Confirm | Granted | Refused | AskHot | Hottest
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame."""
    return _ENCODER.encode(message)


def asking_parts(ask: AskHot, to: str) -> tuple[bytes, ...]:
    """What the proof of a question is over: all of it, and whom it is for, so that it is good at nobody else."""
    return b"ask", to.encode(), encode(msgspec.structs.replace(ask, proof=b""))


def answering_parts(answer: Hottest, nonce: bytes) -> tuple[bytes, ...]:
    """What the proof of an answer is over: all of it, and the question that it answers."""
    return b"answer", nonce, encode(msgspec.structs.replace(answer, proof=b""))


def proving_parts(greeting: Prove, to: str) -> tuple[bytes, ...]:
    """What the proof of a greeting is over: all of it, the owner's challenge with it, and whom it is for."""
    return b"greet", to.encode(), encode(msgspec.structs.replace(greeting, proof=b""))


def welcoming_parts(welcome: Welcome, greeting: Prove) -> tuple[bytes, ...]:
    """What the proof of a welcome is over: all of it, and the greeting that it answers."""
    return b"welcome", greeting.challenge, greeting.nonce, encode(msgspec.structs.replace(welcome, proof=b""))


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
