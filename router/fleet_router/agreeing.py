"""Whether a worker makes the tokens of a prompt that we make of it.

Its agent gives out the model's own files. An option of its engine (vLLM: --chat-template, --tokenizer) makes other tokens: blocks
named from ours would never be found, and a prompt could be refused for a length that it has not. So the engine's own /tokenize
is asked about a few samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from fleet_router.request import tokens_of
from fleet_router.tokeniser import UnreadableError
from fleet_wire.address import authority
from fleet_wire.endpoints import Endpoint

ASK_TIMEOUT_S: Final = 5.0
ANSWER_BYTES_MOST: Final = 65_536
TEXT: Final = "The quick brown fox jumps over 13 lazy dogs.\nIt's (almost) 42 o'clock."
_ASKS, _SAYS, _ORDERS = ({"role": "user", "content": TEXT}, {"role": "assistant", "content": "So it is."},
                         {"role": "system", "content": "Be brief."})  # fmt: skip
CONVERSATIONS: Final = ([_ASKS], [_ASKS, _SAYS, _ASKS], [_ORDERS, _ASKS])
"""Templates differ in what they write for each of these; one that refuses some of them says nothing there."""


class Reads(Protocol):
    """Our tokenizer."""

    lead: tuple[int, ...]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each, without special tokens."""
        ...

    def render(self, messages: bytes) -> str:
        """A conversation as the model's template has it; UnreadableError when that is not ours to know."""
        ...


class Agreement(NamedTuple):
    """The same tokens come of it; also where the worker does not say."""

    text: bool
    chat: bool


async def agreement(ours: Reads, worker: Endpoint) -> Agreement:
    """Never raises: a worker that is not there, or has no such path, says nothing."""
    told = await _told(worker, {"prompt": TEXT})
    try:
        if told and told != [*ours.lead, *ours.encode([TEXT])[0]]:
            return Agreement(text=False, chat=False)
    except UnreadableError:
        return Agreement(text=False, chat=False)
    for messages in CONVERSATIONS:
        try:
            mine = ours.encode([ours.render(msgspec.json.encode(messages))])[0]
        except UnreadableError:
            continue
        told = await _told(worker, {"messages": messages})
        if told and told != mine:
            return Agreement(text=True, chat=False)
    return Agreement(text=True, chat=True)


async def _told(worker: Endpoint, question: dict[str, object]) -> list[int]:
    """What it answers to /tokenize; empty when nothing."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return tokens_of(await _asked(worker, msgspec.json.encode(question)))
    except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError):
        return []


async def _asked(worker: Endpoint, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(worker.address, worker.http_port)
    try:
        host = authority(worker.address, worker.http_port).encode()
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nhost: %b\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (host, len(body), body)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if b" 200 " not in head.split(b"\r\n", 1)[0] or length > ANSWER_BYTES_MOST:
            return b""
        return await reader.readexactly(length)
    finally:
        writer.close()
