"""A prefill leg that is late runs twice: whoever answers first is taken, the other one's KV is given back on every way out."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from fleet_router.config import HedgeBounds
from fleet_router.explain.shown import shown
from fleet_router.follow.documents import Documents
from fleet_router.policy.hedge import SAVED_MOST
from fleet_router.workers import Worker
from fleet_wire.endpoints import Endpoints
from tests.fleet_router.fake_worker import REFERENCE, FakeWorker, answer
from tests.fleet_router.rig import CONFIG, LONG, Rig, ask, http, run, until

HEDGED = msgspec.structs.replace(CONFIG, hedge=HedgeBounds(after=1.0, least_s=0.02, share=0.5))

GARBAGE, HALF, MISSING, MORE, CUT = -1, -2, -3, -4, -5
RAW = {
    GARBAGE: b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nwhat",
    HALF: b'HTTP/1.1 200 OK\r\ncontent-length: 42\r\n\r\n{"kv_transfer_params":{"lease_id":"lease-9',
    MISSING: b'HTTP/1.1 404 X\r\ncontent-length: 24\r\n\r\n{"type":"NotFoundError"}',
    MORE: b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\n{}more",
}
"""Told instead of a status: what is no JSON, or half of it with a lease in it; no such model; more than its answer. CUT: the
connection breaks."""


class Stalls:
    """Prefill workers that wait to be told: by number, in the order in which they are asked."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.asked: list[FakeWorker] = []
        self.left: list[FakeWorker] = []
        self.told: list[asyncio.Future[int]] = []
        self.leased: list[FakeWorker] = []
        """Who answered with KV."""
        for worker in rig.prefill:
            worker.behave = self.behaves(worker)
        rig.context.hedges.saved, rig.context.hedges.saved_tokens = 10.0, 1e6

    def behaves(self, worker: FakeWorker) -> Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[bool]]:
        async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self.asked.append(worker)
            self.told.append(told)
            while not told.done():
                await asyncio.sleep(0.005)
                if worker.is_left(writer):
                    self.left.append(worker)
                    return True
            lease = f"lease-{self.rig.prefill.index(worker)}"
            if told.result() in RAW:
                writer.write(RAW[told.result()])
            elif told.result() == CUT:
                writer.transport.abort()
            elif told.result() == 200:
                self.leased.append(worker)
                answer(writer, 200, {"choices": [], "kv_transfer_params": {**REFERENCE, "lease_id": lease}})
            else:
                answer(writer, told.result(), {"error": {"message": "out of order"}})
            return True

        return behave

    async def both(self) -> asyncio.Task[tuple[int, bytes]]:
        """Two are asked."""
        task = asyncio.ensure_future(self.rig.post(ask()))
        await until(lambda: len(self.asked) == 2)
        assert self.asked[0] is not self.asked[1]
        return task

    def lease_of_decode(self) -> str:
        (body,) = self.rig.decode[0].seen
        return body["kv_transfer_params"]["lease_id"]

    async def gave_back(self, worker: FakeWorker) -> None:
        await until(lambda: len(worker.released) == 1)

    def events(self) -> dict[str, int]:
        return dict(self.rig.context.metrics.hedges)

    def record(self) -> dict[str, Any]:
        return shown(next(self.rig.context.recorder.records()), 0.0)


def with_stalls(test: Callable[[Stalls], Awaitable[None]], prefill: int = 2, config: Any = HEDGED, decode: int = 1) -> None:
    async def go(rig: Rig) -> None:
        stalls = Stalls(rig)
        await test(stalls)
        await until(rig.idle)
        for worker in rig.context.table.workers.values():
            assert worker.pending == 0, worker.uid

    run(go, prefill=prefill, decode=decode, config=config)


def test_the_second_answers_first_and_the_first_is_given_up():
    async def test(stalls: Stalls) -> None:
        task = await stalls.both()
        first, second = stalls.asked
        stalls.told[1].set_result(200)
        status, body = await task
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, "hello")
        assert stalls.lease_of_decode() == f"lease-{stalls.rig.prefill.index(second)}"
        await until(lambda: stalls.left == [first])
        await stalls.gave_back(first)
        assert second.released == []
        assert stalls.events() == {"started": 1, "won": 1}
        assert stalls.rig.context.metrics.hedge_tokens > 100
        told = stalls.record()["tries"][0]
        assert told["hedge"]["outcome"] == "won"
        assert told["hedge"]["prefill"] != told["prefill"]
        assert stalls.rig.context.table.trouble.out == 0, "to be slow once is no failure"

    with_stalls(test)


def test_the_first_answers_first_and_the_second_is_given_up():
    async def test(stalls: Stalls) -> None:
        task = await stalls.both()
        first, second = stalls.asked
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200
        assert stalls.lease_of_decode() == f"lease-{stalls.rig.prefill.index(first)}"
        await until(lambda: stalls.left == [second])
        await stalls.gave_back(second)
        assert first.released == []
        assert stalls.events() == {"started": 1, "lost": 1}
        assert stalls.record()["tries"][0]["hedge"]["outcome"] == "lost"

    with_stalls(test)


def test_when_the_first_fails_the_second_is_waited_for_and_nothing_is_tried_again():
    async def test(stalls: Stalls) -> None:
        task = await stalls.both()
        stalls.told[0].set_result(500)
        await asyncio.sleep(0.05)
        assert not task.done()
        stalls.told[1].set_result(200)
        assert (await task)[0] == 200
        assert len(stalls.asked) == 2
        assert (stalls.events(), stalls.rig.context.metrics.retries) == ({"started": 1, "won": 1}, 0)

    with_stalls(test)


@pytest.mark.parametrize("status", [500, 429, 404])
def test_when_the_second_fails_the_first_is_waited_for(status: int):
    async def test(stalls: Stalls) -> None:
        task = await stalls.both()
        stalls.told[1].set_result(status)
        await asyncio.sleep(0.05)
        assert not task.done()
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200
        assert stalls.events() == {"started": 1, "failed": 1}
        await stalls.gave_back(stalls.asked[1])

    with_stalls(test)


def test_when_both_fail_it_is_tried_again_and_then_prefilled_where_it_is_decoded():
    """Other prefill worker, then the decode worker: the order of whom is asked does not change by hedges."""

    async def test(stalls: Stalls) -> None:
        task = await stalls.both()
        stalls.told[0].set_result(500)
        await asyncio.sleep(0.05)
        stalls.told[1].set_result(500)
        assert (await task)[0] == 200
        (body,) = stalls.rig.decode[0].seen
        assert "kv_transfer_params" not in body
        assert stalls.events() == {"started": 1, "won": 1}

    with_stalls(test)


@pytest.mark.parametrize("when", ["both run", "the second is the only one"])
def test_a_client_that_leaves_ends_both(when: str):
    async def test(stalls: Stalls) -> None:
        _, writer, _ = await stalls.rig.connect()
        writer.write(http(ask()))
        await until(lambda: len(stalls.asked) == 2)
        if when != "both run":
            stalls.told[0].set_result(500)
            await asyncio.sleep(0.05)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()  # a reset: it reads no more either
        await until(lambda: len(stalls.left) == (2 if when == "both run" else 1))
        await stalls.gave_back(stalls.asked[1])
        if when == "both run":
            await stalls.gave_back(stalls.asked[0])
            assert stalls.events() == {"started": 1, "cut": 1}

    with_stalls(test)


def test_a_deadline_ends_both():
    async def test(stalls: Stalls) -> None:
        task = await stalls.both()
        stalls.rig.sweep(later_s=3600.0)
        assert (await task)[0] == 504
        await stalls.gave_back(stalls.asked[0])
        await stalls.gave_back(stalls.asked[1])

    with_stalls(test)


@pytest.mark.parametrize("stream", [True, False])
def test_no_client_sees_anything_twice(stream: bool):
    async def test(stalls: Stalls) -> None:
        task = asyncio.ensure_future(stalls.rig.post(ask(stream=stream)))
        await until(lambda: len(stalls.asked) == 2)
        stalls.told[1].set_result(200)
        stalls.told[0].set_result(200)
        status, body = await task
        assert status == 200
        assert len(stalls.rig.decode[0].seen) == 1
        assert body.count(b"hello" if not stream else b'"a"') == 1

    with_stalls(test)


async def alone(stalls: Stalls, *headers: str) -> None:
    """The first leg is late, and nobody else is asked."""
    _, writer, _ = await stalls.rig.connect()
    writer.write(http(ask(), *headers))
    await until(lambda: len(stalls.asked) == 1)
    await asyncio.sleep(0.3)
    assert len(stalls.asked) == 1
    assert stalls.rig.context.metrics.hedges["started"] == 0
    stalls.told[0].set_result(200)
    await until(lambda: stalls.rig.decode[0].seen != [])


def no_budget(stalls: Stalls) -> None:
    stalls.rig.context.hedges.saved = 0.0


def no_tokens(stalls: Stalls) -> None:
    stalls.rig.context.hedges.saved_tokens = 0.0


def half_are_out(stalls: Stalls) -> None:
    now = stalls.rig.context.clock()
    for worker in stalls.rig.context.table.by_role["prefill"][1:]:
        worker.put_out(now)


def busy(stalls: Stalls) -> None:
    """All others are above the bound, the first one's queue is no matter."""
    for worker in stalls.rig.context.table.by_role["prefill"]:
        for _ in range(40):
            worker.began()


def idle_again(stalls: Stalls) -> None:
    for worker in stalls.rig.context.table.by_role["prefill"]:
        for _ in range(40):
            worker.ended()


@pytest.mark.parametrize("why", [no_budget, no_tokens, half_are_out], ids=lambda one: one.__name__)
def test_nobody_else_is_asked(why: Callable[[Stalls], None]):
    async def test(stalls: Stalls) -> None:
        why(stalls)
        await alone(stalls)
        assert stalls.rig.context.hedges.refused == (why is not half_are_out)
        assert stalls.events() == ({} if why is half_are_out else {"refused": 1})

    with_stalls(test, prefill=3)


def test_nobody_above_the_bound_of_load_is_asked():
    async def test(stalls: Stalls) -> None:
        busy(stalls)
        for worker in stalls.rig.context.table.by_role["prefill"][:1]:
            for _ in range(40):
                worker.ended()  # the first is idle: it is chosen, and the mean is below the second's load
        await alone(stalls)
        for worker in stalls.rig.context.table.by_role["prefill"][:1]:
            for _ in range(40):
                worker.began()
        idle_again(stalls)

    with_stalls(test)


def test_sessions_stay_where_they_are():
    config = msgspec.structs.replace(HEDGED, session_header="x-session")

    async def test(stalls: Stalls) -> None:
        await alone(stalls, "x-session: s1")

    with_stalls(test, config=config)


@pytest.mark.parametrize("config", [CONFIG, msgspec.structs.replace(HEDGED, policy="leastLoad")], ids=["off", "no costs"])
def test_without_it_nothing_is_armed(config: Any):
    async def test(stalls: Stalls) -> None:
        await alone(stalls)
        assert stalls.rig.context.hedges.saved == 10.0

    with_stalls(test, config=config)


def test_what_answers_in_time_is_asked_once():
    async def test(stalls: Stalls) -> None:
        for worker in stalls.rig.prefill:
            worker.behave = None
        for i in range(20):
            assert (await stalls.rig.post(ask(prompt=f"{i} {LONG}")))[0] == 200
        await asyncio.sleep(0.1)
        assert sum(len(worker.seen) for worker in stalls.rig.prefill) == 20
        assert stalls.events() == {}

    with_stalls(test, config=msgspec.structs.replace(HEDGED, hedge=HedgeBounds(after=1.0, least_s=2.0)))


def test_a_second_that_cannot_be_reached_is_no_loss():
    async def test(stalls: Stalls) -> None:
        task = asyncio.ensure_future(stalls.rig.post(ask()))
        await until(lambda: len(stalls.asked) == 1)
        (other,) = [worker for worker in stalls.rig.prefill if worker is not stalls.asked[0]]
        await other.stop()
        await until(lambda: stalls.events().get("failed") == 1)
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200

    with_stalls(test)


def worker_of(stalls: Stalls, fake: FakeWorker) -> Worker:
    return stalls.rig.context.table.workers[f"u{fake.port}"]


@pytest.mark.parametrize("winner", [0, 1])
def test_who_was_told_to_give_it_back_is_not_asked_for_it_again(winner: int):
    """The loser is told by the request's name, on another connection: a new leg under that name there would be ended by it, and
    the client told that its request was given back."""

    async def test(stalls: Stalls) -> None:
        for worker in stalls.rig.decode:
            worker.behave = breaks
        task = await stalls.both()
        won = stalls.asked[winner]
        stalls.told[winner].set_result(200)
        await until(lambda: len(stalls.asked) == 3 or task.done())
        assert stalls.asked[2:] in ([], [won])
        if not task.done():
            stalls.told[2].set_result(200)
        assert (await task)[0] == 200

    async def breaks(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        for worker in stalls_of[0].rig.decode:
            worker.behave = None
        won = worker_of(stalls_of[0], stalls_of[0].asked[winner])
        for _ in range(40):  # whoever lost is the better one for what is tried again
            won.began()
            asyncio.get_running_loop().call_later(0.3, won.ended)
        answer(writer, 500, {})
        return True

    stalls_of: list[Stalls] = []

    async def go(stalls: Stalls) -> None:
        stalls_of.append(stalls)
        await test(stalls)

    with_stalls(go, decode=2)


@pytest.mark.parametrize("nonsense", [GARBAGE, HALF])
def test_when_the_first_answers_nonsense_the_second_is_taken(nonsense: int):
    async def test(stalls: Stalls) -> None:
        task = await stalls.both()
        first, second = stalls.asked
        stalls.told[0].set_result(nonsense)
        await stalls.gave_back(first)
        stalls.told[1].set_result(200)
        assert (await task)[0] == 200
        assert stalls.lease_of_decode() == f"lease-{stalls.rig.prefill.index(second)}"
        assert (len(stalls.asked), second.released, stalls.events()) == (2, [], {"started": 1, "won": 1})

    with_stalls(test)


@pytest.mark.parametrize("status", [500, 404, GARBAGE])
def test_the_connection_of_a_second_that_answered_is_kept(status: int):
    async def test(stalls: Stalls) -> None:
        task = await stalls.both()
        second = stalls.asked[1]
        (connection,) = second.readers
        stalls.told[1].set_result(status)
        await stalls.gave_back(second)
        await until(lambda: len(worker_of(stalls, second).pool._idle) == 1)
        assert list(second.readers) == [connection]
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200

    with_stalls(test)


def test_a_pooled_connection_that_the_second_had_closed_is_no_failure_of_it():
    """Nothing ran there."""

    async def closes(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.close()
        return True

    async def test(stalls: Stalls) -> None:
        for fake in stalls.rig.prefill:  # a connection that was used lies in each pool
            stalls.rig.context.releases.send(worker_of(stalls, fake).pool, release_to(fake), stalls.rig.context.clock())
        await until(lambda: all(fake.released for fake in stalls.rig.prefill))
        await until(lambda: all(worker_of(stalls, fake).pool._idle for fake in stalls.rig.prefill))
        task = asyncio.ensure_future(stalls.rig.post(ask()))
        await until(lambda: len(stalls.asked) == 1)
        (other,) = [fake for fake in stalls.rig.prefill if fake is not stalls.asked[0]]
        other.behave = closes
        await until(lambda: stalls.events().get("failed") == 1)
        assert worker_of(stalls, other).breaker.failures == 0
        assert stalls.rig.context.hedges.saved == SAVED_MOST, "nor does it cost anything"
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200

    with_stalls(test)


def release_to(fake: FakeWorker) -> bytes:
    body = b'{"request_id":"another"}'
    return b"POST /kv/release HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def test_no_room_for_a_connection_is_no_fault_of_the_second_either():
    async def test(stalls: Stalls) -> None:
        loop, failed = asyncio.get_running_loop(), asyncio.Event()

        async def no_room(*_: object, **__: object) -> None:
            await failed.wait()
            raise OSError(errno.EMFILE, "too many open files")

        task = asyncio.ensure_future(stalls.rig.post(ask()))
        await until(lambda: len(stalls.asked) == 1)
        loop.create_connection = no_room
        await until(lambda: stalls.events().get("started") == 1)
        stalls.told[0].set_result(500)
        await asyncio.sleep(0.05)
        assert not task.done()
        failed.set()
        status, body = await task
        assert (status, json.loads(body)["error"]["code"]) == (503, "connections")
        assert all(worker.breaker.closed for worker in stalls.rig.context.table.workers.values())

    with_stalls(test)


@pytest.mark.parametrize("change", ["decode is of another kind now", "decode has another version", "nobody has the adapter"])
def test_kv_that_its_decode_worker_could_not_read_is_asked_of_nobody(change: str):
    """The operator says something new of the workers while the first leg runs."""
    config = msgspec.structs.replace(HEDGED, adapters=("a",), hedge=HedgeBounds(after=1.0, least_s=0.2, share=0.5))

    async def test(stalls: Stalls) -> None:
        table = stalls.rig.context.table

        def say(version: dict[str, dict[str, str]], compat: str = "c-t") -> None:
            found = [
                msgspec.structs.replace(worker.endpoint, adapters=version[worker.role]) for worker in table.workers.values()
            ]  # fmt: skip
            found = [one if one.role == "prefill" else msgspec.structs.replace(one, compat=compat) for one in found]
            stalls.rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=tuple(found))))

        same = {"prefill": {"a": "1"}, "decode": {"a": "1"}}
        say(same)
        task = asyncio.ensure_future(stalls.rig.post(ask(model="a")))
        await until(lambda: len(stalls.asked) == 1)
        if change == "decode is of another kind now":
            say(same, "other")
        elif change == "decode has another version":
            say(same | {"decode": {"a": "2"}})
        else:
            say({"prefill": {}, "decode": {}})
        await asyncio.sleep(0.4)
        assert len(stalls.asked) == 1
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200

    with_stalls(test, config=config)
