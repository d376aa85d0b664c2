"""An answer of several processes: what a client asked one of them, answered for all of them behind the port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import zip_longest
from typing import Any, Protocol

import msgspec

from fleet_router.admission.tenants import Decisions
from fleet_router.errors import RequestError, error_json
from fleet_router.explain.recorder import Recorder
from fleet_router.explain.route import answer, limit_of
from fleet_router.holding import Holding
from fleet_router.listening import Listening, wait_of
from fleet_router.members import Answer, Member, ask_all, ask_each, summed
from fleet_router.paths import DECISIONS, HELD

Gather = Callable[[bytes], Coroutine[Any, Any, Answer]]
"""A path, with its query, → what all processes say."""
WITHIN_S = 5.0
RIGHTS: dict[bytes, Decisions] = {b"all": "all", b"own": "own"}


class Asker(Protocol):
    """The connection that asks."""

    def tell(self, body: bytes, status: int = 200) -> None: ...
    def refuse(self, error: RequestError) -> None: ...


class Gathering:
    """One question; the connection treats it as it treats a request that runs."""

    __slots__ = ("_asker", "_task", "deadline", "started")

    def __init__(self, asker: Asker, answer: Coroutine[Any, Any, Answer], deadline: float) -> None:
        self._asker, self.deadline, self.started = asker, deadline, False
        self._task = asyncio.get_running_loop().create_task(answer)
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Answer]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._asker.refuse(RequestError(503, f"the processes of this router cannot be asked: {type(error).__name__}"))
            return
        status, body = task.result()
        self._asker.tell(body, status)

    def expire(self, _now: float) -> None:
        """Somebody is too slow."""
        self.cut(RequestError(503, "the processes of this router do not answer"))

    def cancel(self) -> None:
        """Whoever asked has left."""
        self._task.cancel()

    def cut(self, error: RequestError) -> None:
        """The router goes."""
        if not self._task.done():
            self._task.cancel()
            self._asker.refuse(error)

    def pause(self) -> None:
        """A few bytes fit anyhow."""

    def resume(self) -> None:
        """A few bytes fit anyhow."""


class _Ear:
    """Who listens for held requests without being a client."""

    def __init__(self) -> None:
        self.heard: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def tell(self, body: bytes) -> None:
        if not self.heard.done():
            self.heard.set_result(int(body))

    def refuse(self, error: RequestError) -> None:
        if not self.heard.done():
            self.heard.set_result(0)


async def held_here(holding: Holding, wait_s: float) -> int:
    """Requests that wait in this process, when some do; at the latest after so long."""
    ear, loop = _Ear(), asyncio.get_running_loop()
    listening = Listening(holding, ear, loop.time, wait_s)
    listening.begin(wait_s)
    timer = loop.call_later(wait_s, listening.expire, loop.time() + wait_s)
    try:
        return await ear.heard
    finally:
        timer.cancel()
        listening.cancel()


async def held_by_all(member: Member, holding: Holding, url: bytes) -> Answer:
    """Of all processes, as soon as one of them holds something."""
    wait_s = wait_of(url)

    async def there(asked: Coroutine[Any, Any, Answer | None]) -> int:
        return _held_of(await asked)

    elsewhere = [there(one) for one in ask_each(member, url, wait_s)]
    asked = [asyncio.create_task(one) for one in (held_here(holding, wait_s), *elsewhere)]
    held = 0
    try:
        for done in asyncio.as_completed(asked):
            held = await done
            if held:
                break
    finally:
        for task in asked:
            task.cancel()
    if held:  # by one of them: what the others hold now nobody has to wait for
        held = max(held, len(holding) + sum(map(_held_of, await ask_all(member, HELD))))
    return 200, b"%d\n" % held


def _held_of(answer: Answer | None) -> int:
    return int(answer[1]) if answer is not None and answer[0] == 200 else 0


async def gathered(member: Member, path: bytes, here: Callable[[bytes], Awaitable[Answer]]) -> Answer:
    """/metrics: sums, or nothing: without one of them counters would seem to fall, and running requests to have ended; /ready:
    ready when all are; /debug/decisions: rows of all in turn, as many as were asked for."""
    mine = await here(path)
    answers = [mine, *await ask_all(member, path)]
    if path.startswith(DECISIONS):
        found = [_rows(answer[1]) for answer in answers if answer is not None and answer[0] == 200]
        if not found:
            return mine
        rows = [row for turn in zip_longest(*found) for row in turn if row is not None]
        return 200, b'{"decisions":[%b]}' % b",".join(rows[: limit_of(path.partition(b" ")[0])])
    silent = (503, b"a process of this router does not answer\n")
    wrong = next((answer or silent for answer in answers if answer is None or answer[0] != 200), None)
    if wrong is not None or path == b"/ready":
        return wrong or mine
    return mine[0], summed([answer[1].decode() for answer in answers if answer is not None]).encode()


def decisions_here(recorder: Recorder, line: bytes, now: float) -> Answer:
    """Of this process: `line` is the path with its query, the right of whoever asks and his tenant. The sibling has looked at
    these; only processes of the same family reach the socket by its name."""
    url, rights, tenant = line.split(b" ", 2)
    try:
        return 200, answer(
            recorder, url, "all" if rights == b"all" else "own" if rights == b"own" else "none", tenant.decode(), now
        )
    except RequestError as error:
        return error.status, error_json(error, "")


def _rows(body: bytes) -> list[bytes]:
    rows: list[msgspec.Raw] = msgspec.json.decode(body, type=dict[str, list[msgspec.Raw]])["decisions"]
    return [bytes(row) for row in rows]
