"""Prompts as block names, with reuse of the longest tokenised prefix.

A text is cut where every tokenizer in use cuts it anyway, between a letter and a space, about every KiB; so that the tokens of
the text are those of its segments in a row. A segment after a given prefix is encoded once: what is remembered is its tokens and
the blocks that end in it. Where a tokenizer does not keep to that (`splits` False), texts are encoded as a whole.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from fleet_router.kvindex.precise import key_of
from fleet_wire.blocks import chain_packed

SEGMENT_CHARS = 1024
SEGMENT_TOKENS = 128
"""As many take as much memory as a segment does beside its tokens."""
LOOK_CHARS = 4096
"""Without a place to cut within this many characters the segment goes on."""
TOKEN_BYTES = 4
PLACE = re.compile(r"[^\W\d_](?= )")
"""A letter before a space."""


def cut(text: str) -> list[str]:
    """Segments of the text, in order; the same beginning gives the same first segments."""
    segments, start, size = [], 0, len(text)
    while size - start > 2 * SEGMENT_CHARS:
        at = _place(text, start + SEGMENT_CHARS, min(size, start + SEGMENT_CHARS + LOOK_CHARS))
        if at is None:
            at = start + SEGMENT_CHARS + LOOK_CHARS
            if at >= size:
                break
            at = _place(text, at, size) or size
            if at == size:
                break
        segments.append(text[start:at])
        start = at
    segments.append(text[start:])
    return segments


def _place(text: str, low: int, high: int) -> int | None:
    """One search and no loop: of a megabyte of numbers, say, every space is looked at."""
    if text.find(" ", low, high) < 0:
        return None
    found = PLACE.search(text, max(0, low - 1), high)
    return None if found is None else found.end()


@dataclass(slots=True)
class _Blocks:
    """What a segment adds to the chain of one layout."""

    keys: list[int]
    parent: bytes
    """Hash of the last whole block up to the segment's end."""
    rest: bytes
    """Tokens behind that block, packed."""


@dataclass(slots=True)
class _Segment:
    packed: bytes
    """Token ids as little-endian uint32."""
    blocks: dict[bytes, _Blocks] = field(default_factory=dict)
    """By root: model, layout and salt."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A text on its way to tokens."""

    segments: list[str]
    names: list[int]
    """Of each segment with all before it."""
    missing: list[int]
    """Which segments have to be encoded."""

    @property
    def missing_chars(self) -> int:
        """Characters to encode."""
        return sum(len(self.segments[i]) for i in self.missing)


class TokenisedPrefixes:
    """Segments that were encoded; at most `capacity` tokens of them, and SEGMENT_TOKENS more for each, least recently used out
    first."""

    def __init__(self, capacity: int, *, splits: bool = True, secret: int = 0) -> None:
        """`secret`: 64 bits that no client knows, or one could look for a text with the name of another's, which would then be
        counted as this one."""
        self._capacity = capacity
        self._splits = splits
        self._secret = secret
        self._known: OrderedDict[int, _Segment] = OrderedDict()
        self.tokens = 0

    def read(self, text: str, lead: Sequence[int], salt: str = "") -> Reading:
        """What is known of this text; `lead`: special tokens before it; `salt`: of the tenant whose it is. Tenants with another
        one do not see by the time that it takes whether somebody has sent it."""
        digest = xxhash.xxh3_64_intdigest
        seed = digest(pack(lead) + salt.encode("utf-8", "surrogatepass"), self._secret)
        segments = cut(text) if self._splits else [text]
        names = [seed := digest(segment.encode("utf-8", "surrogatepass"), seed) for segment in segments]
        missing = [i for i, name in enumerate(names) if name not in self._known]
        return Reading(segments, names, missing)

    def learn(self, reading: Reading, encoded: Sequence[Sequence[int]], lead: Sequence[int]) -> None:
        """Token ids of the missing segments, in order. The first segment keeps the special tokens before it."""
        for i, ids in zip(reading.missing, encoded, strict=True):
            packed = (pack(lead) if i == 0 else b"") + pack(ids)
            if reading.names[i] not in self._known:
                self.tokens += len(packed) // TOKEN_BYTES
            self._known[reading.names[i]] = _Segment(packed)
        for name in reversed(reading.names):  # the beginning stays longest
            if name in self._known:
                self._known.move_to_end(name)
        while self.tokens + SEGMENT_TOKENS * len(self._known) > self._capacity and len(self._known) > len(reading.names):
            _, old = self._known.popitem(last=False)
            self.tokens -= len(old.packed) // TOKEN_BYTES

    def knows(self, reading: Reading) -> bool:
        """Every segment is known (still)."""
        return all(name in self._known for name in reading.names)

    def count(self, reading: Reading) -> int:
        """Tokens of the text."""
        return sum(len(self._known[name].packed) for name in reading.names) // TOKEN_BYTES

    def keys(self, reading: Reading, root: bytes, block_tokens: int) -> list[int]:
        """Keys of all full blocks of the text under this root; every segment must be known."""
        keys: list[int] = []
        parent, rest = root, b""
        for name in reading.names:
            segment = self._known[name]
            blocks = segment.blocks.get(root)
            if blocks is None:
                if len(segment.blocks) >= 8:
                    segment.blocks.clear()
                blocks = segment.blocks[root] = _chain(parent, rest + segment.packed, block_tokens)
            keys += blocks.keys
            parent, rest = blocks.parent, blocks.rest
        return keys


def _chain(parent: bytes, packed: bytes, block_tokens: int) -> _Blocks:
    digests = chain_packed(parent, packed, block_tokens)
    whole = len(digests) * block_tokens * TOKEN_BYTES
    return _Blocks([key_of(digest) for digest in digests], digests[-1] if digests else parent, packed[whole:])


def pack(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; OverflowError for an id that does not fit."""
    packed = array("I", ids)
    if packed.itemsize != TOKEN_BYTES:
        raise OverflowError("this platform has no 32-bit array")
    return packed.tobytes()


def keys_of_ids(ids: Sequence[int], root: bytes, block_tokens: int) -> list[int]:
    """Keys of all full blocks of a prompt that came as token ids."""
    return _chain(root, pack(ids), block_tokens).keys
