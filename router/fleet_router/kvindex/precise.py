"""The precise index: the blocks that each worker says it holds (KV events), by name.

A block's name here is the hash chain of fleet_wire over its tokens. Workers that name blocks so are believed by name, once a
block and its parent have shown it: 16 bytes are vLLM's xxhash as well. Of all others (vLLM's own hashes, blocks under an adapter)
the tokens in the event are hashed, and their name is only remembered for its removal. vLLM's events do not say with whose salt a
block was computed: of a tenant's prompts only those workers are believed whose names do. Blocks in a slower medium than the
worker's own (offloaded to memory or disk) count for SLOW_WORTH: they are copied, not computed.

vLLM keeps a block once for each request that computed it at the same time, and tells of each copy that comes and goes: a block is
gone with its last one.

A hybrid model's groups of layers store and drop blocks of the same names each by itself. One of them speaks: that of full
attention, which keeps a prefix whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeGuard

from fleet_router.kvindex.doubt import Doubt, Name
from fleet_router.kvindex.masks import REBUILT_AT, depths, drop_bit, without_bit
from fleet_wire.blocks import HASH_BYTES, block_hash, root_hash
from fleet_wire.events import AllBlocksCleared, BlockRemoved, BlockStored

SLOW_WORTH = 0.75
UNPROVEN_MOST = 64
FASTEST = "GPU"
"""Whatever a worker tells of before: who begins to listen late may hear of its offloaded blocks first."""
WHOLE = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of groups that keep every block of a prefix."""


def key_of(digest: bytes) -> int:
    """Key of a block in the index: the first half of its hash."""
    return int.from_bytes(digest[:8], "little")


class Holding:
    """What one worker holds."""

    __slots__ = (
        "bit",
        "block_tokens",
        "compat",
        "copies",
        "doubt",
        "group",
        "media",
        "proven",
        "roots",
        "twins",
        "unproven",
        "whole",
    )

    def __init__(self, bit: int, compat: str) -> None:
        self.bit = bit
        self.compat = compat
        self.block_tokens = 0
        """0: no event has said it yet."""
        self.group: int | None = None
        """Whose events count; None: none has a number."""
        self.whole = False
        """It is of WHOLE."""
        self.media: dict[str, dict[Name, bytes]] = {}
        """Medium → the worker's name → our hash. The first medium is its fastest: FASTEST, or what came first."""
        self.copies: dict[tuple[str, Name], int] = {}
        """(medium, name) of blocks that it holds more than once: how many times."""
        self.twins: dict[int, int] = {}
        """Key → how many more of its names in the fastest medium mean it: two versions of an adapter's blocks have one here."""
        self.roots: dict[tuple[int, str], bytes] = {}
        """By tokens per block, which are others when its engine begins anew with others, and salt."""
        self.proven: bool | None = None
        """It names blocks by the hash chain of fleet_wire: what others salt is told by the names as well. None: nothing has shown
        yet."""
        self.unproven: list[BlockStored] = []
        """What came before that: first blocks alone, which might be a tenant's."""
        self.doubt: Doubt | None = None
        """It may hold more than is known. None: it does not."""

    def __len__(self) -> int:
        return sum(len(names) for names in self.media.values())

    def is_odd(self, parent: Name | None) -> bool:
        """A block that is not known, or behind one, is the parent."""
        if parent is None or self.doubt is None:
            return False
        return self.doubt.is_orphan(parent) or not any(parent in names for names in self.media.values())

    def lose_copy(self, medium: str, name: Name) -> bool:
        """One copy of this block is gone; False: it was the only one, as far as is known."""
        count = self.copies.get((medium, name), 1)
        if count > 2:
            self.copies[medium, name] = count - 1
        elif count == 2:
            del self.copies[medium, name]
        return count > 1

    def lose_twin(self, key: int) -> bool:
        """One name of this block in the fastest medium is gone; False: it was the only one."""
        count = self.twins.pop(key, 0)
        if count > 1:
            self.twins[key] = count - 1
        return count > 0

    def chains(self, event: BlockStored) -> bool | None:
        """What this event shows: a block's name is made of its parent's and its tokens, or is not."""
        names, size, parent = event.block_hashes, event.block_size, event.parent_block_hash
        at = 0 if parent is not None else 1
        if not all(map(_is_chain, names)):
            return False
        if parent is None and len(names) > 1:
            parent = names[0]
        tokens = event.token_ids[at * size : (at + 1) * size]
        if parent is not None and len(names) > at and len(tokens) == size:
            return _is_chain(parent) and _named(parent, tokens) == names[at]
        first = event.token_ids[:size]
        return True if names and len(first) == size and _named(self.root(""), first) == names[0] else None

    def root(self, salt: str) -> bytes:
        """Parent of first blocks."""
        known = self.roots.get((self.block_tokens, salt))
        if known is None:
            if len(self.roots) >= 256:
                self.roots.clear()
            known = self.roots[self.block_tokens, salt] = root_hash(self.compat, self.block_tokens, salt)
        return known


def _named(parent: bytes, tokens: Sequence[int]) -> bytes | None:
    try:
        return block_hash(parent, tokens)
    except struct.error:  # ids that are none: the block cannot be one of a prompt's
        return None


def _is_chain(name: Name) -> TypeGuard[bytes]:
    return isinstance(name, bytes) and len(name) == HASH_BYTES


class PreciseIndex:
    """Blocks of all workers; at most `capacity` of them together."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._fast: dict[int, int] = {}
        self._slow: dict[int, int] = {}
        """Held in a slower medium only."""
        self._holdings: dict[str, Holding] = {}
        self.lacking = 0
        """Workers, as bits, some of whose blocks found no room here, and are not known to be gone: each seems to hold less than
        it does."""
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def join(self, worker: str, bit: int, compat: str) -> None:
        """A worker whose events will come."""
        self._holdings[worker] = Holding(bit, compat)

    def remove(self, worker: str) -> None:
        """The worker is gone."""
        self.clear(worker)
        self._holdings.pop(worker, None)

    def clear(self, worker: str) -> None:
        """It holds nothing (any more), as far as we know."""
        holding = self._holdings.get(worker)
        if holding is None:
            return
        self._drop_blocks(holding)
        holding.proven, holding.unproven = None, []
        holding.group, holding.whole = None, False
        self.lacking &= ~holding.bit
        holding.doubt = None if holding.doubt is None else Doubt()

    def doubt(self, worker: str, *, whole: bool = False) -> None:
        """It may hold blocks of which nobody will tell; `whole`: none."""
        if (holding := self._holdings.get(worker)) is not None:
            holding.doubt = None if whole else Doubt()

    def is_whole(self, worker: str) -> bool:
        """All that it holds was told, though not all may have found room."""
        holding = self._holdings.get(worker)
        return holding is not None and holding.doubt is None

    def _cleared(self, worker: str, holding: Holding) -> None:
        """It says that it holds nothing. Of an offloading one: in one of its media, and not in which."""
        one_medium = len(holding.media) < 2
        self.clear(worker)
        if one_medium:
            holding.doubt = None

    def _drop_blocks(self, holding: Holding) -> None:
        media, count = holding.media, len(holding)
        holding.media, holding.copies, holding.twins = {}, {}, {}
        self._blocks -= count
        if REBUILT_AT * count > len(self._fast) + len(self._slow):
            self._fast, self._slow = without_bit(self._fast, holding.bit), without_bit(self._slow, holding.bit)
            return
        for names in media.values():
            for digest in names.values():
                key = key_of(digest)
                drop_bit(self._fast, key, holding.bit)
                drop_bit(self._slow, key, holding.bit)

    def layouts(self) -> set[tuple[str, int]]:
        """(compatibility hash, tokens per block) of workers that hold something: what a prompt has to be hashed for."""
        return {(holding.compat, holding.block_tokens) for holding in self._holdings.values() if holding.block_tokens}

    def holds(self, worker: str, key: int) -> bool:
        """This worker holds this block."""
        holding = self._holdings.get(worker)
        return holding is not None and bool((self._fast.get(key, 0) | self._slow.get(key, 0)) & holding.bit)

    def named(self) -> int:
        """Workers, as bits, whose names tell the blocks of one tenant from those of another."""
        found = 0
        for holding in self._holdings.values():
            if holding.proven:
                found |= holding.bit
        return found

    def named_by(self, worker: str) -> bool:
        """This worker's names do."""
        holding = self._holdings.get(worker)
        return holding is not None and bool(holding.proven)

    def apply(self, worker: str, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Events of one worker, in order."""
        holding = self._holdings.get(worker)
        if holding is None:
            return
        for event in events:
            if isinstance(event, BlockStored):
                if self._speaks(worker, holding, event):
                    self._told(holding, event)
            elif isinstance(event, BlockRemoved):
                if event.group_idx is None or event.group_idx == holding.group:
                    self._removed(holding, event)
            else:
                self._cleared(worker, holding)

    def _speaks(self, worker: str, holding: Holding, event: BlockStored) -> bool:
        """It is of the group that counts: the first of full attention, and until one came the first of all."""
        if event.group_idx is None:
            return True
        whole = event.kv_cache_spec_kind in WHOLE
        if holding.group is None or (whole and not holding.whole):
            if holding.group not in (None, event.group_idx):
                self.clear(worker)
            holding.group, holding.whole = event.group_idx, whole
        return event.group_idx == holding.group

    def _told(self, holding: Holding, event: BlockStored) -> None:
        """Kept for later while nothing has shown what its names are."""
        if event.block_size < 1 or not self._sized(holding, event.block_size):
            return
        shown = holding.chains(event)
        if shown is None and holding.proven is None and event.token_ids and len(holding.unproven) < UNPROVEN_MOST:
            holding.unproven.append(event)
            return
        if shown is not None and event.block_hashes:
            holding.proven = shown
        kept, holding.unproven = holding.unproven, []
        for one in (*kept, event):
            self._stored(holding, one)

    def _sized(self, holding: Holding, size: int) -> bool:
        """It is of the size that the worker's blocks have. vLLM tells of the end of a prompt that fills no block as of a smaller
        one (a hybrid model's, whose groups differ); such ends are passed over, and forgotten where they were all there is."""
        if size != holding.block_tokens:
            if len(holding) or holding.unproven:
                if size < holding.block_tokens:
                    return False
                self._drop_blocks(holding)
                holding.unproven = []
            holding.block_tokens = size
        return True

    def _in_medium(self, holding: Holding, medium: str) -> dict[Name, bytes]:
        """Names of its blocks there. What it told of before its fastest medium is slower after all."""
        names = holding.media.get(medium)
        if names is None:
            names = holding.media[medium] = {}
            if medium == FASTEST:
                others, holding.media, holding.twins = holding.media, {FASTEST: names}, {}
                holding.media |= others
                for digest in (digest for slower in others.values() for digest in slower.values()):
                    drop_bit(self._fast, key := key_of(digest), holding.bit)
                    self._slow[key] = self._slow.get(key, 0) | holding.bit
        return names

    def _stored(self, holding: Holding, event: BlockStored) -> None:
        medium = event.medium or ""
        names = self._in_medium(holding, medium)
        fast = next(iter(holding.media)) == medium
        part = self._capacity // max(1, len(self._holdings))
        room = min(part - len(holding), self._capacity - self._blocks)  # those who were here before may still have larger parts
        parent = event.parent_block_hash
        odd = holding.is_odd(parent)
        # vLLM leaves out blocks that a group does not keep, and not their tokens: nobody can tell which are whose
        told = event.token_ids if len(event.token_ids) == len(event.block_hashes) * event.block_size else []
        for i, name in enumerate(event.block_hashes):
            before, parent = parent, name
            if name in names:
                holding.copies[medium, name] = holding.copies.get((medium, name), 1) + 1
                continue
            tokens = told[i * event.block_size : (i + 1) * event.block_size]
            digest = self._digest(holding, name, before, tokens, event.lora_name or "")
            if digest is None or room < 1:
                odd = True
                self._not_kept(holding, no_room=digest is not None)
                continue
            room -= 1
            names[name] = digest
            self._keep(holding, key_of(digest), fast=fast)
            if holding.doubt is not None:
                holding.doubt.stored(name, orphan=odd)
        if odd and holding.doubt is not None:
            holding.doubt.sign()

    def _keep(self, holding: Holding, key: int, *, fast: bool) -> None:
        self._blocks += 1
        bit = holding.bit
        if fast:
            known = self._fast.get(key, 0)
            if known & bit:
                holding.twins[key] = holding.twins.get(key, 0) + 1
            self._fast[key] = known | bit
            if self._slow:
                drop_bit(self._slow, key, bit)
        elif not self._fast.get(key, 0) & bit:
            self._slow[key] = self._slow.get(key, 0) | bit

    def _not_kept(self, holding: Holding, *, no_room: bool) -> None:
        """It holds this one, and nobody will tell of it again."""
        if no_room:
            self.lacking |= holding.bit
            holding.doubt = holding.doubt or Doubt()

    @staticmethod
    def _digest(holding: Holding, name: Name, parent: Name | None, tokens: Sequence[int], salt: str) -> bytes | None:
        """Our hash of a block; None when its parent is not known here, or its tokens are not whole, or none."""
        if not salt and _is_chain(name) and holding.proven is not False:
            return name
        if len(tokens) != holding.block_tokens:
            return None
        known = holding.root(salt) if parent is None else None
        if known is None:
            known = next((names[parent] for names in holding.media.values() if parent in names), None)
        return None if known is None else _named(known, tokens)

    def _removed(self, holding: Holding, event: BlockRemoved) -> None:
        medium, bit = event.medium or "", holding.bit
        if holding.unproven:
            gone = set(event.block_hashes)
            holding.unproven = [one for one in holding.unproven if gone.isdisjoint(one.block_hashes)]
        names = holding.media.get(medium)
        if names is None:
            return
        fast = next(iter(holding.media)) == medium
        for name in event.block_hashes:
            if holding.copies and holding.lose_copy(medium, name):
                continue
            digest = names.pop(name, None)
            self._evicted(holding, name, known=digest is not None)
            if digest is None:
                continue
            self._blocks -= 1
            key = key_of(digest)
            if fast and holding.twins and holding.lose_twin(key):
                continue
            elsewhere = any(others.get(name) == digest for others in holding.media.values())
            if fast:
                drop_bit(self._fast, key, bit)
                if elsewhere:
                    self._slow[key] = self._slow.get(key, 0) | bit
            elif not elsewhere:
                drop_bit(self._slow, key, bit)

    def _evicted(self, holding: Holding, name: Name, *, known: bool) -> None:
        """What that shows of the blocks that are not known. Each medium has an order of its own."""
        doubt = holding.doubt
        if doubt is None:
            return
        if not known:
            doubt.sign()
        elif doubt.removed(name) and len(holding.media) == 1:
            holding.doubt = None
            self.lacking &= ~holding.bit

    def depths(self, keys: list[int], among: int = -1) -> list[tuple[float, int]]:
        """(blocks, workers as bits), the deepest first."""
        found: list[tuple[float, int]] = list(depths(self._fast, keys, among))
        if not self._slow:
            return found
        known = 0
        for _, mask in found:
            known |= mask
        rest = (*found, (0, among & ~known))
        out: list[tuple[float, int]] = []
        for blocks, mask in rest:
            left = mask
            for more, which in depths(self._slow, keys[int(blocks) :], mask):
                out.append((blocks + SLOW_WORTH * more, which))
                left &= ~which
            if blocks and left:
                out.append((blocks, left))
        return sorted(out, reverse=True)
