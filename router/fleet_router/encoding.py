"""A model's tokenizer at work: a little text on the loop, if it is known to be quick (`linear.py`), more of it in a thread while
its request waits, and neither without an end.

Its pattern is somebody's program, and what it costs may grow with what clients write: with the square of a text's length and
more. Nothing can end one that runs. So each use is measured, in time of a core; a tokenizer that takes too long is used no more,
and nobody waits for the thread longer than routing by the approximate index is worth.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol

from fleet_router.tokeniser import UnreadableError

INLINE_MOST_S: Final = 0.005
"""A tokenizer that took longer on the loop has its thread for all texts from then on."""
WAITING_MOST: Final = 64
WAITING_CHARS_MOST: Final = 1024 * 1024
"""Prompts that wait for the thread, and their text, of which it does about as much in a second; more go by the approximate
index."""
SLOW_S: Final = 0.05
SLOW_PER_CHARACTER_S: Final = 20e-6
"""A text may take so long: those in use need a twentieth of it."""
LATE_S: Final = 2.0
"""So long the thread may be at one text; who waits then goes by the approximate index."""
ENDLESS_S: Final = 20.0
BUILD_MOST_S: Final = 60.0
"""To read a large tokenizer takes a second of a core."""

Ids = Sequence[Sequence[int]]


class Encodes(Protocol):
    """A tokenizer."""

    inline_chars: int
    """So much of a text may be encoded on the loop."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each; UnreadableError."""
        ...


async def beside(function: Callable[..., Any], *given: Any, most_s: float = BUILD_MOST_S) -> Any:
    """In a thread of its own; TimeoutError when it comes to no end."""
    thread = _Thread()
    try:
        async with asyncio.timeout(most_s):
            return await asyncio.wrap_future(thread.submit(function, *given))
    finally:
        thread.stop()


class Encoding:
    """One per process. `gave_up` hears of a tokenizer that takes too long, and why; `say` of what is to be known beside that."""

    def __init__(self, gave_up: Callable[[Encodes, str], None], say: Callable[[str], None]) -> None:
        self._gave_up, self._say = gave_up, say
        self._loop = asyncio.get_running_loop()
        self._encoder = _Thread()
        self._jobs: deque[tuple[Future[Any], Encodes]] = deque()
        self._first: Future[Any] | None = None
        """What the thread is at, as far as was seen, and since when."""
        self._first_at = 0.0
        self._late = False
        self._waiting: set[asyncio.Future[tuple[Ids, float]]] = set()
        self._waiting_chars = 0

    def at_once(self, tokeniser: Encodes, texts: Sequence[str]) -> Ids | None:
        """Here; None when it cannot be done."""
        if not texts:
            return []
        began = time.thread_time()
        try:
            found = tokeniser.encode(texts)
        except UnreadableError:
            found = None
        took_s = time.thread_time() - began
        if took_s > INLINE_MOST_S:
            tokeniser.inline_chars = 0
            self._say(f"the tokenizer took {took_s * 1e3:.0f} ms on the loop: it has its thread from now on")
        self._judge(tokeniser, sum(map(len, texts)), took_s)
        return found

    @property
    def has_room(self) -> bool:
        """The thread may have one more to do."""
        return not self._late and len(self._waiting) < WAITING_MOST and self._waiting_chars < WAITING_CHARS_MOST

    def later(self, tokeniser: Encodes, texts: Sequence[str], then: Callable[[Ids], None]) -> None:
        """In the thread; `then` gets nothing when that failed, or takes too long."""
        job, chars = self._encoder.submit(_measured, tokeniser, texts), sum(map(len, texts))
        self._jobs.append((job, tokeniser))
        waits = asyncio.wrap_future(job, loop=self._loop)
        self._waiting.add(waits)
        self._waiting_chars += chars

        def encoded(done: asyncio.Future[tuple[Ids, float]]) -> None:
            self._waiting.discard(done)
            self._waiting_chars -= chars
            if done.cancelled() or done.exception() is not None:
                then([])
                return
            ids, took_s = done.result()
            self._judge(tokeniser, chars, took_s)
            then(ids)

        waits.add_done_callback(encoded)

    def _judge(self, tokeniser: Encodes, chars: int, took_s: float) -> None:
        if took_s > SLOW_S + chars * SLOW_PER_CHARACTER_S:
            self._gave_up(tokeniser, f"it took {took_s:.2f} s over {chars} characters")

    def tick(self, now: float) -> None:
        """Twice a second."""
        while self._jobs and self._jobs[0][0].done():
            self._jobs.popleft()
        first, tokeniser = self._jobs[0] if self._jobs else (None, None)
        if first is not self._first or first is None:
            self._first, self._first_at = first, now
        self._late = now - self._first_at > LATE_S
        if self._late:
            self.let_go()
        if first is not None and tokeniser is not None and first.running() and now - self._first_at > ENDLESS_S:
            self._encoder.stop()  # when it comes back, if ever
            self._encoder, self._first, self._late = _Thread(), None, False
            self._jobs.clear()
            self._gave_up(tokeniser, "it comes to no end")

    def let_go(self) -> None:
        """Nobody waits any more: all go by the approximate index."""
        for waits in list(self._waiting):
            waits.cancel()

    def stop(self) -> None:
        """What waits is not done any more."""
        self._encoder.stop()


def _measured(tokeniser: Encodes, texts: Sequence[str]) -> tuple[Ids, float]:
    began = time.thread_time()
    return tokeniser.encode(texts), time.thread_time() - began


class _Thread:
    """One job after the other. An executor's thread would be waited for when the process ends, and this one may never end."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._stopped = False
        threading.Thread(target=self._run, name="tokens", daemon=True).start()

    def submit(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        job: Future[Any] = Future()
        self._jobs.put((job, function, given))
        return job

    def stop(self) -> None:
        self._stopped = True
        self._jobs.put(None)

    def _run(self) -> None:
        for job, function, given in iter(self._jobs.get, None):
            if self._stopped:
                job.cancel()
            if not job.set_running_or_notify_cancel():
                continue
            try:
                job.set_result(function(*given))
            except BaseException as error:
                job.set_exception(error)
