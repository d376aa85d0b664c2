"""Hot prefixes from a worker that serves to one that is new; both halves, on the engine thread.

Part by part: the new worker asks → the other one lends the next blocks of its list under a lease → they are read and proven as
in every hand-off → their names are computed again from what they are said to be made of → the blocks are findable here. What is
not proven, or has another name here, is never findable. Whatever ends it, blocks that came whole stay, and the worker serves.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import uuid4

import msgspec

from fleet_wire.blocks import HASH_BYTES, block_hash
from fleet_wire.kv import KvReference
from fleet_wire.sidechannel import HotBlock, Hottest, Refused
from fleet_worker.engine.lending import SEED_ID, Lender, Pool
from fleet_worker.engine.references import check_form
from fleet_worker.transfer.base import Connector, FetchResult, KvError
from fleet_worker.transfer.digest import HEX_PER_BLOCK
from fleet_worker.transfer.hot import Asked, Heard, HotChannel

MOST_BYTES_PER_S: Final = 256 * 1024 * 1024
"""What a new worker reads at most, so that the one that serves does not feel it."""


@dataclass(frozen=True, slots=True)
class Seeded:
    """What came of it. `reason` empty: all that was wanted and that there was."""

    blocks: int = 0
    nbytes: int = 0
    refused: int = 0
    """Blocks whose bytes or names were not proven."""
    seconds: float = 0.0
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """What a new worker wants of whom."""

    host: str
    port: int
    most_blocks: int
    within_s: float


@dataclass(slots=True)
class _Part:
    """Blocks on their way here, and their places in the reference."""

    blocks: list[HotBlock]
    local: list[int]
    pull: str


@dataclass(slots=True)
class _Job:
    order: Order
    done: Callable[[Seeded], None]
    begun: float
    reader: str
    found: Seeded = field(default_factory=Seeded)
    start: int = 0
    is_asked: bool = False
    part: _Part | None = None
    not_before: float = 0.0
    more: bool = True


class Seeder:
    """Fills this engine's prefix cache from another one's, one order at a time."""

    def __init__(
        self,
        pool: Pool,
        channel: HotChannel,
        connector: Connector,
        weights: str,
        root: bytes,
        block_tokens: int,
        block_bytes: int,
    ) -> None:
        self._pool, self._channel, self._connector = pool, channel, connector
        self._weights, self._root = weights, root
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        self._job: _Job | None = None
        self.held: list[int] = []
        """Blocks that came, in order of heat: kept until the order ends, so that the coldest are given up first."""
        self.seeded_blocks = 0
        self.refused_blocks = 0

    @property
    def is_busy(self) -> bool:
        """Something is on its way."""
        return self._job is not None

    def owned(self) -> list[int]:
        """Blocks that belong to the order."""
        part = self._job.part if self._job is not None else None
        return self.held + (part.local if part is not None else [])

    def begin(self, order: Order, done: Callable[[Seeded], None], now: float) -> None:
        """`done` is called once, on the engine thread, at most about one step after `within_s`."""
        if self._job is not None:
            done(Seeded(reason="busy", message="this engine is being seeded already"))
            return
        self._job = _Job(order, done, now, uuid4().hex, not_before=now)

    def advance(self, heard: Sequence[Heard], now: float) -> None:
        """One turn."""
        for one in heard:
            self._hear(one, now)
        job = self._job
        if job is None:
            return
        if now - job.begun >= job.order.within_s:
            self._end(now, "deadline", f"not done within {job.order.within_s:g} s")
        elif job.part is None and not job.is_asked and now >= job.not_before:
            self._ask(job, now)

    def _ask(self, job: _Job, now: float) -> None:
        left = job.order.most_blocks - job.found.blocks
        if not job.more or left < 1:
            self._end(now, "", "")
            return
        job.is_asked = True
        order = job.order
        self._channel.ask_hot(order.host, order.port, self._weights, job.reader, job.start, order.most_blocks)

    def _hear(self, heard: Heard, now: float) -> None:
        job, answer = self._job, heard.answer
        if job is None or heard.reader != job.reader or heard.start != job.start or not job.is_asked:
            return  # too late: its lease runs out
        job.is_asked = False
        if isinstance(answer, Refused):
            self._end(now, answer.reason[:64], answer.message[:200])
        elif not isinstance(answer, Hottest):
            self._end(now, answer.reason, str(answer)[:200])
        elif answer.next <= job.start and answer.more:
            self._end(now, "protocol", "its list does not go on")
        else:
            job.start, job.more = answer.next, answer.more
            self._take(job, answer, now)

    def _take(self, job: _Job, answer: Hottest, now: float) -> None:
        """Pull what is right by its name, is not here, and has a place."""
        reference, count = answer.reference, len(answer.blocks)
        if reference is None or not count:
            return
        if len(reference.remote_block_ids) != count or len(reference.digest) != HEX_PER_BLOCK * count:
            self._end(now, "protocol", "its blocks and their digests do not fit each other")
            return
        try:
            check_form(reference)
        except KvError as error:
            self._end(now, "protocol", str(error)[:200])
            return
        right = right_blocks(answer.blocks, self._root, self._block_tokens, lambda name: bool(self._pool.blocks.find([name])))
        self._refuse(job, right.wrong)
        chosen = right.wanted[: job.order.most_blocks - job.found.blocks]
        local = self._pool.blocks.allocate(len(chosen)) if chosen else []
        if local is None:
            self._end(now, "full", "no room for more")
            return
        pull = f"{SEED_ID}{uuid4().hex}"
        job.part = _Part([answer.blocks[at] for at in chosen], local, pull)
        job.not_before = now + len(chosen) * self._block_bytes / MOST_BYTES_PER_S
        self._pull(job, job.part, only(reference, chosen, job.order), now)

    def _pull(self, job: _Job, part: _Part, reference: KvReference, now: float) -> None:
        try:
            self._connector.fetch(part.pull, reference, 0, part.local)
        except KvError as error:
            job.part = None
            self._pool.blocks.free(part.local)
            self._end(now, error.reason, str(error)[:200])

    def fetched(self, result: FetchResult, now: float) -> bool:
        """The end of one of our pulls; False when it belongs to nobody here."""
        job = self._job
        if job is None or job.part is None or job.part.pull != result.request_id:
            return False
        part, job.part = job.part, None
        if result.error is None:
            self._insert(job, part)
            return True
        if result.lingers:
            self._pool.put_aside(part.pull, part.local)
        else:
            self._pool.wipe(part.local)
            self._pool.blocks.free(part.local)
        self._refuse(job, len(part.local) if result.error.reason == "digest" else 0)
        self._end(now, result.error.reason, str(result.error)[:200])
        return True

    def _insert(self, job: _Job, part: _Part) -> None:
        blocks = self._pool.blocks
        for block, hot in zip(part.local, part.blocks, strict=True):
            tokens = struct.unpack(f"<{self._block_tokens}I", hot.tokens)
            root, parent = (hot.parent, None) if hot.is_first else (b"", hot.parent)
            blocks.register(block, hot.name, parent, tokens, None, root)
            if blocks.heat is not None:
                blocks.heat.seeded(hot.name)
        self.held += part.local
        self.seeded_blocks += len(part.local)
        found = job.found
        nbytes = found.nbytes + len(part.local) * self._block_bytes
        job.found = replace(found, blocks=found.blocks + len(part.local), nbytes=nbytes)

    def _refuse(self, job: _Job, count: int) -> None:
        self.refused_blocks += count
        job.found = replace(job.found, refused=job.found.refused + count)

    def _end(self, now: float, reason: str, message: str) -> None:
        """Also with a pull in flight: its blocks wait for its end."""
        job, self._job = self._job, None
        if job is None:
            return
        if job.part is not None:
            self._connector.cancel(job.part.pull)
            self._pool.put_aside(job.part.pull, job.part.local)
        held, self.held = self.held, []
        self._pool.blocks.free(held)  # in the reverse order: what is hottest goes last
        job.done(replace(job.found, seconds=now - job.begun, reason=reason, message=message))


@dataclass(frozen=True, slots=True)
class Right:
    """Of a part: places of the blocks to pull, and how many are not what they are called."""

    wanted: list[int]
    wrong: int


def right_blocks(blocks: Sequence[HotBlock], root: bytes, block_tokens: int, is_here: Callable[[bytes], bool]) -> Right:
    """Names are computed again: two workers that name blocks in two ways, or a list with a hole, give nothing. A first block
    under another root than the base model's is a tenant's: who has that salt finds it, nobody else. `is_here`: by name."""
    wanted, wrong = list[int](), 0
    coming = set[bytes]()
    for at, block in enumerate(blocks):
        parent_is_there = block.is_first or block.parent in coming or is_here(block.parent)
        if not parent_is_there or not _is_named_right(block, root, block_tokens):
            wrong += 1
        elif block.name not in coming and not is_here(block.name):
            wanted.append(at)
            coming.add(block.name)
    return Right(wanted, wrong)


def _is_named_right(block: HotBlock, root: bytes, block_tokens: int) -> bool:
    if len(block.tokens) != 4 * block_tokens or len(block.parent) != HASH_BYTES:
        return False
    if block.parent == root and not block.is_first:
        return False
    return block.name == block_hash(block.parent, struct.unpack(f"<{block_tokens}I", block.tokens))


def only(reference: KvReference, places: Sequence[int], order: Order) -> KvReference:
    """The reference for some of its blocks; read from whom we asked, whatever it says of its own address."""
    ids = tuple(reference.remote_block_ids[at] for at in places)
    digest = "".join(reference.digest[at * HEX_PER_BLOCK : (at + 1) * HEX_PER_BLOCK] for at in places)
    return msgspec.structs.replace(
        reference, remote_block_ids=ids, digest=digest, remote_host=order.host, remote_port=order.port
    )  # fmt: skip


class Hot:
    """Both halves in one engine, over one channel."""

    def __init__(self, channel: HotChannel, lender: Lender, seeder: Seeder, clock: Callable[[], float]) -> None:
        self._channel, self.lender, self.seeder, self._clock = channel, lender, seeder, clock

    def begin(self, order: Order, done: Callable[[Seeded], None]) -> None:
        """As Seeder has it."""
        self.seeder.begin(order, done, self._clock())

    def asked(self) -> list[Asked]:
        """Take these before the leases that ended: a reader gives one back, then asks."""
        return self._channel.asked()

    def strangers(self) -> Mapping[str, int]:
        """As HotChannel has it."""
        return self._channel.strangers()

    def fetched(self, result: FetchResult) -> bool:
        """As Seeder has it."""
        return self.seeder.fetched(result, self._clock())

    def advance(self, asked: Sequence[Asked]) -> None:
        """One turn of both."""
        now = self._clock()
        for one in asked:
            self._channel.tell(one, self.lender.answer(one.ask, now))
        self.seeder.advance(self._channel.heard(), now)
