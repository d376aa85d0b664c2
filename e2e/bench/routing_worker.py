"""Emulated engines for `make bench-routing`: many workers in one process, each with a port, queue and prefix cache.

What they do is what a routing decision changes. Prefill: first come first served, a fixed rate, of what the cache does not hold
when its turn comes. Cache: blocks of BLOCK_TOKENS by the hash of everything before them, least recently used out first, the end
of a prompt before its beginning. Decode: a step for all streams together, longer the more there are; a few writes.
A request that was prefilled elsewhere (`do_remote_prefill`) pulls what the cache does not hold, beside whatever else runs; a
handshake costs nothing.
Time runs `speed` times faster than the clock. Timers are up to a millisecond late: what follows is computed from the exact
times, and the first event says how late it left (`late_us`), so that clients can take that off.

Run as `python -m e2e.bench.routing_worker SPEED ADDRESS...`; `GET /stats` of any of them tells of all.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec
import uvloop

from e2e.bench.routing_trace import BLOCK_CHARS, BLOCK_TOKENS, CHARS_PER_TOKEN

PREFILL_TOKENS_PER_S = 20_000.0
PREFILL_BASE_S = 0.005
CACHE_BLOCKS = 2_048
STEP_S = 0.008
STEP_PER_STREAM_S = 0.0001
WRITES = 4
"""Of one answer's tokens."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PULL_BASE_S = 0.005
PULL_S_PER_TOKEN = 128 * 1024 / 12.5e9
EVENT = (
    b'data: {"id":"c","object":"text_completion","created":1,"model":"tiny","late_us":%d,"prefilled_by":%d,"worker":%d,'
    b'"computed":%d,"waited_us":%d,"choices":[{"index":0,"text":" words","finish_reason":%b}]}\n\n'
)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
REFERENCE = (
    b'{"id":"c","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,"text":" words","logprobs":null,'
    b'"finish_reason":"length"}],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":1},"kv_transfer_params":'
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"127.0.0.1",'
    b'"remote_port":5600,"late_us":%d,"prefilled_by":%d,"computed":%d,"waited_us":%d}}'
)
"""To a prefill leg; what follows the port is for the client, by way of the decode leg."""
CAPACITY = f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{CACHE_BLOCKS}"}} 1\n'


class Transfer(msgspec.Struct):
    """Of KV: what the decode leg is told of the prefill leg, times virtual."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    late_us: int = 0
    prefilled_by: int = 0
    computed: int = 0
    waited_us: int = 0


class Body(msgspec.Struct):
    """What an engine needs of a request."""

    prompt: str
    max_tokens: int
    kv_transfer_params: Transfer = msgspec.field(default_factory=Transfer)


@dataclass(eq=False)
class Job:
    """A request in an engine; `write` gets (microseconds that this is late, whether it is the end)."""

    keys: list[int]
    tokens: int
    output: int
    write: Callable[[int, bool], None]
    hands_over: bool = False
    """Another engine decodes."""
    computed: int = 0
    waited_s: float = 0.0
    """For its turn."""


def keys_of(prompt: str) -> list[int]:
    """A key for each whole block, which stands for everything before it as well."""
    seed, found = 0, []
    for at in range(0, len(prompt) - BLOCK_CHARS + 1, BLOCK_CHARS):
        seed = hash((seed, prompt[at : at + BLOCK_CHARS]))
        found.append(seed)
    return found


class Cache:
    """Blocks, the least recently used first."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def hit(self, keys: list[int]) -> int:
        """Blocks of this prompt that need not be computed."""
        return next((at for at, key in enumerate(keys) if key not in self._held), len(keys))

    def store(self, keys: list[int]) -> None:
        """Used just now; the end is forgotten before the beginning."""
        for key in reversed(keys[: self._blocks]):
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._blocks:
            self._held.popitem(last=False)


@dataclass
class Engine:
    """One worker. Times are virtual."""

    at: Callable[[float, Callable[[], None]], None]
    """Call something at a virtual time, or a little later."""
    now: Callable[[], float]
    number: int = 0
    prompts: list[int] = field(default_factory=list)
    """Tokens that each prompt had to be computed, in the order of their turns; all engines may share one list."""
    cache: Cache = field(default_factory=lambda: Cache(CACHE_BLOCKS))
    queue: deque[tuple[float, Job]] = field(default_factory=deque)
    free_at: float = 0.0
    busy: bool = False
    streams: int = 0
    requests: int = 0
    asked_tokens: int = 0
    computed_tokens: int = 0

    def submit(self, job: Job) -> None:
        """It came just now."""
        self.requests += 1
        self.asked_tokens += job.tokens
        self.queue.append((self.now(), job))
        if not self.busy:
            self._next()

    def _next(self) -> None:
        """Prefill the first of the queue."""
        if not self.queue:
            self.busy = False
            return
        self.busy = True
        came_at, job = self.queue.popleft()
        left = max(1, job.tokens - self.cache.hit(job.keys) * BLOCK_TOKENS)
        self.computed_tokens += left
        self.prompts.append(left)
        begins = max(came_at, self.free_at)
        job.computed, job.waited_s = left, begins - came_at
        self.free_at = due = begins + PREFILL_BASE_S + left / PREFILL_TOKENS_PER_S
        self.at(due, lambda: self._prefilled(job, due))

    def _prefilled(self, job: Job, due: float) -> None:
        self.cache.store(job.keys)
        self._next()
        if job.hands_over:
            job.write(self._late_us(due), True)
            return
        self._first(job, due)

    def pull(self, job: Job, late_us: int) -> None:
        """It was prefilled elsewhere, which was told so late."""
        self.requests += 1
        missing = job.tokens - self.cache.hit(job.keys) * BLOCK_TOKENS
        due = self.now() - late_us / 1e6 + PULL_BASE_S + missing * PULL_S_PER_TOKEN + STEP_S + STEP_PER_STREAM_S * self.streams
        self.at(due, lambda: self._pulled(job, due))

    def _pulled(self, job: Job, due: float) -> None:
        self.cache.store(job.keys)
        self._first(job, due)

    def _first(self, job: Job, due: float) -> None:
        self.streams += 1
        self._decode(job, due, WRITES if job.output > WRITES else 1)

    def _decode(self, job: Job, due: float, writes_left: int) -> None:
        """A write that was due, and when the next one is."""
        job.write(self._late_us(due), writes_left == 0)
        if writes_left == 0:
            self.streams -= 1
            return
        step_s = STEP_S + STEP_PER_STREAM_S * self.streams
        then = due + step_s * job.output / WRITES
        self.at(then, lambda: self._decode(job, then, writes_left - 1))

    def _late_us(self, due: float) -> int:
        return max(0, int((self.now() - due) * 1e6))


class Connection(asyncio.Protocol):
    """One connection of a router."""

    def __init__(self, engine: Engine, told: Callable[[], bytes], speed: float) -> None:
        self.engine, self.told, self.speed = engine, told, speed
        self.parser = httptools.HttpRequestParser(self)
        self.url, self.body = b"", bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url = b""
        self.body.clear()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        if self.parser.get_method() == b"POST":
            self._serve(msgspec.json.decode(self.body, type=Body))
            return
        answers = {b"/stats": self.told, b"/metrics": CAPACITY.encode}
        body = answers.get(self.url.split(b"?")[0], lambda: INFO)()
        close = b"" if self.parser.should_keep_alive() else b"connection: close\r\n"
        self._whole(body, close)
        if close:
            self.transport.close()

    def _serve(self, asked: Body) -> None:
        moved, number, first = asked.kv_transfer_params, self.engine.number, [True]

        def write(late_us: int, last: bool) -> None:
            if self.transport.is_closing():
                return
            if job.hands_over:
                told = (job.tokens, job.tokens + 1, late_us, number, job.computed, int(job.waited_s * 1e6))
                self._whole(REFERENCE % told)
                return
            by = (moved.prefilled_by, number, moved.computed, moved.waited_us)
            if not moved.do_remote_prefill:
                by = (number, number, job.computed, int(job.waited_s * 1e6))
            event = EVENT % (int(late_us / self.speed), *by, b'"length"' if last else b"null")
            chunk = b"%x\r\n%b\r\n" % (len(event), event)
            head = HEAD if first[0] else b""
            first[0] = False
            self.transport.write(head + chunk + (END if last else b""))

        tokens = len(asked.prompt) // CHARS_PER_TOKEN
        job = Job(keys_of(asked.prompt), tokens, asked.max_tokens, write, moved.do_remote_decode)
        if moved.do_remote_prefill:
            self.engine.pull(job, moved.late_us)
        else:
            self.engine.submit(job)

    def _whole(self, body: bytes, close: bytes = b"") -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (close, len(body), body))


INFO = b'{"model_path":"tiny","status":"ready","object":"list","data":[{"id":"tiny","object":"model"}]}'


async def serve(speed: float, addresses: list[str]) -> None:
    """Until killed."""
    loop = asyncio.get_running_loop()

    def at(then: float, what: Callable[[], None]) -> None:
        loop.call_at(then / speed, what)

    prompts = list[int]()
    engines = [Engine(at, lambda: loop.time() * speed, number, prompts) for number in range(len(addresses))]

    def told() -> bytes:
        rows = [[e.requests, e.asked_tokens, e.computed_tokens] for e in engines]
        return msgspec.json.encode({"workers": rows, "prompts": prompts})

    for engine, address in zip(engines, addresses, strict=True):
        host, _, port = address.rpartition(":")
        await loop.create_server(lambda engine=engine: Connection(engine, told, speed), host, int(port))
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(float(sys.argv[1]), sys.argv[2:]))
