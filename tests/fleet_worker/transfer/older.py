"""The side channel as workers spoke it before greetings were proven: the messages of ff91e1d3, and what a greeting led to."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class OldHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello", forbid_unknown_fields=True):
    call: int
    version: int
    compat: str
    block_bytes: int
    block_tokens: int


class OldWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome", forbid_unknown_fields=True):
    call: int
    engine_id: str
    epoch: str
    agent: bytes
    base_address: int
    block_bytes: int
    num_blocks: int


class OldRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused", forbid_unknown_fields=True):
    call: int
    reason: str
    message: str = ""


class OldGranted(msgspec.Struct, frozen=True, kw_only=True, tag="granted", forbid_unknown_fields=True):
    call: int


OldMessage = OldHello | OldWelcome | OldRefused | OldGranted
ENCODER = msgspec.msgpack.Encoder()
DECODER: msgspec.msgpack.Decoder[OldMessage] = msgspec.msgpack.Decoder(OldMessage)
OLD_VERSION = 1
Reply = Callable[[bytes], bytes | None]
"""A frame and its answer; None: it was dropped, and who asked waits to its deadline."""


def old_owner(welcome: OldWelcome, compat: str, block_tokens: int) -> Reply:
    """Greets everybody who fits."""

    def reply(frame: bytes) -> bytes | None:
        try:
            asked = DECODER.decode(frame)
        except msgspec.MsgspecError:
            return None
        if not isinstance(asked, OldHello):
            return None
        mine = (OLD_VERSION, compat, welcome.block_bytes, block_tokens)
        theirs = (asked.version, asked.compat, asked.block_bytes, asked.block_tokens)
        if mine != theirs:
            words = f"protocol version: prefill has {OLD_VERSION}, decode has {asked.version}"
            return ENCODER.encode(OldRefused(call=asked.call, reason="incompatible", message=words))
        return ENCODER.encode(msgspec.structs.replace(welcome, call=asked.call))

    return reply


def old_reader(reply: Reply, compat: str, block_bytes: int, block_tokens: int) -> str:
    """What became of its greeting: welcome, peer (a 503: something else came), the reason of a refusal (a 400), or timeout."""
    hello = OldHello(call=1, version=OLD_VERSION, compat=compat, block_bytes=block_bytes, block_tokens=block_tokens)
    frame = reply(ENCODER.encode(hello))
    try:
        answer = DECODER.decode(frame or b"")
    except msgspec.MsgspecError:
        return "timeout"
    if isinstance(answer, OldGranted):
        return "peer"
    return answer.reason if isinstance(answer, OldRefused) else "welcome"
