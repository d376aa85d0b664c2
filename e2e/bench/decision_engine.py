"""Engines in virtual time for `bench-decision`: continuous batching, chunked prefill, a prefix cache, KV pulls.

An engine computes step after step. A step takes STEP_S, a little per running stream, and the time of the prompt tokens in it, at
most CHUNK_TOKENS, first come first served. Figures: an 8B model on an H200 in FP8, halved (anchors/performance.md, section 8);
KV of 128 KiB a token over 100 Gb/s; a NIXL handshake at a pair's first transfer.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

STEP_S = 0.008
STREAM_S = 0.0002
PREFILL_TOKENS_PER_S = 20_000.0
CHUNK_TOKENS = 1_024
SLOTS = 64
CACHE_TOKENS = 400_000.0
MOVE_S_PER_TOKEN = 128 * 1024 / 12.5e9
HAND_OFF_S = 0.005
HANDSHAKE_S = 1.0


class Time:
    """Virtual time: what happens next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._next: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._next, (when, self._count, what))

    def run(self) -> None:
        while self._next:
            self.now, _, what = heapq.heappop(self._next)
            what()


@dataclass(eq=False)
class Job:
    """A request inside one engine. `keys`: its prompt's prefix; `tokens` of it; then `output` tokens are written."""

    keys: list[int]
    tokens: float
    output: int
    first: Callable[[], None]
    ended: Callable[[], None]
    left: float = 0.0
    """Prompt tokens still to be computed."""
    written: int = 0


@dataclass
class Engine:
    """One worker."""

    time: Time
    tokens_of: Callable[[int], float]
    """Tokens that so many keys stand for."""
    prompts: deque[Job] = field(default_factory=deque)
    streams: list[Job] = field(default_factory=list)
    waiting: deque[Job] = field(default_factory=deque)
    cache: OrderedDict[int, float] = field(default_factory=OrderedDict)
    cached: float = 0.0
    met: set[int] = field(default_factory=set)
    running: bool = False
    gaps_s: list[float] = field(default_factory=list)
    """Length of every step that wrote a token to a running stream, once per stream."""

    def known(self, job: Job) -> float:
        """Tokens of the prompt that the cache has; whoever asks uses them."""
        held = 0
        for key in job.keys:
            if key not in self.cache:
                break
            held += 1
        for key in reversed(job.keys[:held]):
            self.cache.move_to_end(key)
        return min(self.tokens_of(held), job.tokens - 1)

    def store(self, keys: list[int]) -> None:
        """The KV of this prefix is here."""
        for i in range(len(keys) - 1, -1, -1):
            if keys[i] in self.cache:
                self.cache.move_to_end(keys[i])
            else:
                size = self.tokens_of(i + 1) - self.tokens_of(i)
                self.cache[keys[i]] = size
                self.cached += size
        while self.cached > CACHE_TOKENS:
            self.cached -= self.cache.popitem(last=False)[1]

    def compute(self, job: Job) -> None:
        """Prefill here, then write."""
        self._admit(job, lambda: self._prefill(job))

    def pull(self, job: Job, source: int) -> None:
        """The KV comes from engine `source`."""

        def begin() -> None:
            missing = job.tokens - self.known(job)
            seconds = HAND_OFF_S + missing * MOVE_S_PER_TOKEN + (0.0 if source in self.met else HANDSHAKE_S)
            self.met.add(source)
            self.time.at(self.time.now + seconds, lambda: self._start(job))

        self._admit(job, begin)

    def _admit(self, job: Job, begin: Callable[[], None]) -> None:
        if self.busy >= SLOTS:
            job.begin = begin  # type: ignore[attr-defined]
            self.waiting.append(job)
        else:
            self.busy += 1
            begin()

    busy: int = 0

    def _prefill(self, job: Job) -> None:
        job.left = job.tokens - self.known(job)
        self.prompts.append(job)
        self._wake()

    def _start(self, job: Job) -> None:
        self.store(job.keys)
        self.streams.append(job)
        self._wake()

    def _wake(self) -> None:
        if not self.running:
            self.running = True
            self._step()

    def _step(self) -> None:
        budget, done = float(CHUNK_TOKENS), []
        while self.prompts and budget > 0:
            job = self.prompts[0]
            part = min(job.left, budget)
            job.left -= part
            budget -= part
            if job.left <= 0:
                done.append(self.prompts.popleft())
        streams = list(self.streams)
        seconds = STEP_S + STREAM_S * len(streams) + (CHUNK_TOKENS - budget) / PREFILL_TOKENS_PER_S
        self.time.at(self.time.now + seconds, lambda: self._stepped(streams, done, seconds))

    def _stepped(self, streams: list[Job], done: list[Job], seconds: float) -> None:
        for job in done:
            self.store(job.keys)
        for job in [*streams, *done]:
            job.written += 1
            if job.written == 1:
                job.first()
            else:
                self.gaps_s.append(seconds)
            if job.written >= job.output:
                if job in self.streams:
                    self.streams.remove(job)
                self._leave(job)
            elif job.written == 1 and job in done:
                self.streams.append(job)
        if self.prompts or self.streams:
            self._step()
        else:
            self.running = False

    def _leave(self, job: Job) -> None:
        self.busy -= 1
        job.ended()
        if self.waiting and self.busy < SLOTS:
            self.busy += 1
            self.waiting.popleft().begin()  # type: ignore[attr-defined]
