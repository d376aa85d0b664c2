"""A second prefill leg counts what a first one counts that fails in the same way, once; and costs nothing where nothing ran."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from fleet_router.config import HedgeBounds
from fleet_router.follow.documents import Documents
from fleet_router.health.breaker import Breaker
from fleet_router.watching import watch
from fleet_router.workers import Worker
from fleet_wire.endpoints import Endpoints
from tests.fleet_router.fake_worker import FakeWorker
from tests.fleet_router.rig import answer_of, ask, http, until
from tests.fleet_router.test_hedging import CUT, GARBAGE, HALF, HEDGED, MISSING, MORE, Stalls, with_stalls, worker_of

SHARE = 0.5
SOON = msgspec.structs.replace(HEDGED, hedge=HedgeBounds(after=1.0, least_s=0.3, share=SHARE))
"""Time to change something before the second leg."""


def apart(stalls: Stalls, config: Any = HEDGED, **changes: Any) -> None:
    """Each worker is a revision by itself: what is counted of it is told apart."""
    found = [
        msgspec.structs.replace(one.endpoint, revision=one.uid, **changes) for one in stalls.rig.context.table.workers.values()
    ]
    stalls.rig.router.apply(Documents(config, Endpoints(fleet="f", namespace="n", workers=tuple(found))))


def errors(stalls: Stalls, worker: Worker) -> int:
    return stalls.rig.context.metrics.of(worker.endpoint.tier, worker.uid).errors


def counted(stalls: Stalls, worker: Worker) -> tuple[int, bool, bool, int]:
    one: Breaker = worker.breaker
    return one.failures, one.closed, one.gone, errors(stalls, worker)


ONCE, OUT, NOT = (1, True, False, 1), (1, False, False, 1), (0, True, False, 0)


@pytest.mark.parametrize("leg", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize(
    ("how", "found"),
    [
        pytest.param(500, ONCE, id="5xx"),
        pytest.param(302, ONCE, id="3xx"),
        pytest.param(429, ONCE, id="no client's fault"),
        pytest.param(GARBAGE, ONCE, id="nonsense"),
        pytest.param(HALF, ONCE, id="half an answer"),
        pytest.param(CUT, ONCE, id="cut"),
        pytest.param(MORE, ONCE, id="5xx and more behind it"),
        pytest.param(MISSING, OUT, id="no such model"),
    ],
)
def test_a_leg_that_fails_counts_once_whichever_it_is(how: int, found: tuple[int, bool, bool, int], leg: int):
    async def test(stalls: Stalls) -> None:
        apart(stalls)
        task = await stalls.both()
        failed, other = (worker_of(stalls, stalls.asked[i]) for i in (leg, 1 - leg))
        stalls.told[leg].set_result(how)
        await until(lambda: errors(stalls, failed) > 0)
        stalls.told[1 - leg].set_result(200)
        assert (await task)[0] == 200
        assert (counted(stalls, failed), counted(stalls, other)) == (found, NOT)
        told = stalls.record()["tries"][0]
        assert told["hedge"].get("why", "") == ("" if leg == 0 else told["hedge"]["why"])
        assert ("why" in told, "why" in told["hedge"]) == (leg == 0, leg == 1)

    with_stalls(test)


@pytest.mark.parametrize("status", [400, 404, 501])
def test_a_second_that_says_no_to_the_request_is_not_blamed(status: int):
    async def test(stalls: Stalls) -> None:
        apart(stalls)
        task = await stalls.both()
        stalls.told[1].set_result(status)
        await until(lambda: stalls.events().get("failed") == 1)
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200
        assert counted(stalls, worker_of(stalls, stalls.asked[1])) == NOT

    with_stalls(test)


@pytest.mark.parametrize("answer", [200, MISSING], ids=["it is there", "it has gone there"])
def test_a_first_that_has_unloaded_the_adapter_is_passed_over_for_the_second(answer: int):
    """Without blame; and the second's 404 would be no fault of its worker either."""
    config = msgspec.structs.replace(SOON, adapters=("a",))

    async def test(stalls: Stalls) -> None:
        apart(stalls, config, adapters={"a": "1"})
        task = asyncio.ensure_future(stalls.rig.post(ask(model="a")))
        await until(lambda: len(stalls.asked) == 2)
        stalls.told[0].set_result(MISSING)
        await until(lambda: stalls.events().get("won") == 1)
        assert not task.done()
        stalls.told[1].set_result(answer)
        status, _ = await task
        assert (status, len(stalls.asked)) == (200, 2)
        assert [counted(stalls, worker_of(stalls, one)) for one in stalls.asked] == [NOT, NOT]

    with_stalls(test, config=config)


def balance(stalls: Stalls) -> float:
    """Hedges that are left, besides what this one prompt has brought."""
    return stalls.rig.context.hedges.saved - SHARE - 5.0


async def late(stalls: Stalls, before: Callable[[FakeWorker], Awaitable[None]]) -> FakeWorker:
    """One leg runs; `before` is done to the other worker, and only then is the first one late, however long that takes. Call
    before the request is sent. -> who was the other one."""
    loop, kept = asyncio.get_running_loop(), []
    really = loop.call_later

    def call_later(delay_s: float, callback: Callable[..., object], *args: Any, **more: Any) -> asyncio.TimerHandle:
        if callback.__name__ == "_late":
            kept.append((callback, args))
            delay_s = 3600.0
        return really(delay_s, callback, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_later", call_later)
        await until(lambda: len(stalls.asked) == 1 and len(kept) == 1)
    (other,) = [fake for fake in stalls.rig.prefill if fake is not stalls.asked[0]]
    await before(other)
    ((callback, args),) = kept
    callback(*args)
    assert stalls.events().get("started") == 1
    return other


async def started(
    stalls: Stalls, before: Callable[[FakeWorker], Awaitable[None]]
) -> tuple[asyncio.Task[tuple[int, bytes]], Worker]:
    """One leg runs, and the second one was to be sent after `before` was done to its worker."""
    apart(stalls, SOON)
    stalls.rig.context.hedges.saved = 5.0
    task = asyncio.ensure_future(stalls.rig.post(ask()))
    return task, worker_of(stalls, await late(stalls, before))


def test_a_second_that_cannot_be_reached_is_gone_and_costs_nothing():
    async def test(stalls: Stalls) -> None:
        task, other = await started(stalls, lambda fake: fake.stop())
        await until(lambda: stalls.events().get("failed") == 1)
        assert counted(stalls, other) == (1, False, True, 1)
        assert balance(stalls) == 0.0
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200
        assert stalls.rig.context.releases._by_pool == {}, "nothing ran there"

    with_stalls(test, config=SOON)


class Connects:
    """Connections are made when they are let; or are not, for want of room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.let, self.error, self._monkeypatch, self.begun = asyncio.Event(), error, monkeypatch, 0

    async def __call__(self, _: FakeWorker) -> None:
        loop = asyncio.get_running_loop()
        really = loop.create_connection

        async def create(*args: Any, **more: Any) -> Any:
            self.begun += 1
            await self.let.wait()
            if self.error:
                raise OSError(self.error, "no")
            return await really(*args, **more)

        self._monkeypatch.setattr(loop, "create_connection", create)


def test_a_second_for_which_there_is_no_room_is_not_blamed_and_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    async def test(stalls: Stalls) -> None:
        connects = Connects(monkeypatch, errno.EMFILE)
        task, other = await started(stalls, connects)
        connects.let.set()
        await until(lambda: stalls.events().get("failed") == 1)
        assert (counted(stalls, other), balance(stalls)) == (NOT, 0.0)
        monkeypatch.undo()
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200

    with_stalls(test, config=SOON)


def test_a_second_that_was_given_up_before_it_was_sent_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    async def test(stalls: Stalls) -> None:
        connects = Connects(monkeypatch)
        task, other = await started(stalls, connects)
        await until(lambda: connects.begun == 1)
        monkeypatch.undo()
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200
        assert (stalls.events(), balance(stalls)) == ({"started": 1, "lost": 1}, 0.0)
        connects.let.set()
        await until(lambda: len(other.pool._idle) == 1)  # the connection is of use to the next one
        assert (counted(stalls, other), len(stalls.asked)) == (NOT, 1)

    with_stalls(test, config=SOON)


def test_nobody_is_asked_to_give_back_what_a_leg_that_waited_for_its_connection_cannot_have_computed(
    monkeypatch: pytest.MonkeyPatch,
):
    async def test(stalls: Stalls) -> None:
        rig, connects = stalls.rig, Connects(monkeypatch)
        _, writer, connection = await rig.connect()
        await connects(rig.prefill[0])
        writer.write(http(ask()))
        await until(lambda: connection.flow is not None)
        rig.sweep(later_s=3600.0)
        await until(lambda: connection.flow is None)
        monkeypatch.undo()
        connects.let.set()
        await asyncio.sleep(0.05)
        assert rig.context.releases._by_pool == {}
        assert stalls.asked == []

    with_stalls(test)


@pytest.mark.parametrize("why", ["it leaves", "its time is over"])
def test_a_second_that_is_the_only_one_and_was_never_sent_costs_nothing(why: str, monkeypatch: pytest.MonkeyPatch):
    """The first one failed while it waited for its connection: it was as good as sent from then on."""

    async def test(stalls: Stalls) -> None:
        connects = Connects(monkeypatch)
        task, other = await started(stalls, connects)
        stalls.told[0].set_result(500)
        await until(lambda: stalls.events().get("won") == 1)
        if why == "it leaves":
            (connection,) = stalls.rig.connections
            assert connection._transport is not None
            connection._transport.abort()
            await asyncio.gather(task, return_exceptions=True)
        else:
            stalls.rig.sweep(later_s=3600.0)
            assert (await task)[0] == 504
        monkeypatch.undo()
        connects.let.set()
        await until(lambda: len(other.pool._idle) == 1)
        assert (balance(stalls), len(stalls.asked)) == (0.0, 1)

    with_stalls(test, config=SOON)


def test_a_second_that_runs_is_paid_for():
    async def test(stalls: Stalls) -> None:
        stalls.rig.context.hedges.saved = 5.0
        task = await stalls.both()
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200
        assert balance(stalls) == -1.0

    with_stalls(test)


# -- silence ---------------------------------------------------------------------------------------------------------------
def looked(stalls: Stalls, later_s: float) -> None:
    rig = stalls.rig
    watch(rig.context, rig.connections, rig.context.clock() + later_s)


def heard(stalls: Stalls, fake: FakeWorker) -> None:
    """Of some other request."""
    worker_of(stalls, fake).heard_at = stalls.rig.context.clock() + 3600.0


def test_a_worker_that_swallows_second_legs_is_found_as_one_that_swallows_first_ones():
    async def test(stalls: Stalls) -> None:
        apart(stalls)
        task = await stalls.both()
        first, second = stalls.asked
        heard(stalls, first)
        looked(stalls, HEDGED.silent_s - 1)
        assert counted(stalls, worker_of(stalls, second)) == NOT
        looked(stalls, HEDGED.silent_s + 1)
        assert counted(stalls, worker_of(stalls, second)) == OUT
        assert stalls.events() == {"started": 1, "failed": 1}
        await stalls.gave_back(second)
        looked(stalls, 2 * HEDGED.silent_s)
        assert counted(stalls, worker_of(stalls, second)) == OUT, "once"
        stalls.told[0].set_result(200)
        assert (await task)[0] == 200
        assert stalls.record()["tries"][0]["hedge"]["why"] == "it has said nothing for too long"
        assert counted(stalls, worker_of(stalls, first)) == NOT

    with_stalls(test)


def test_when_only_the_first_is_silent_the_second_is_waited_for():
    async def test(stalls: Stalls) -> None:
        apart(stalls)
        task = await stalls.both()
        first, second = stalls.asked
        heard(stalls, second)
        looked(stalls, HEDGED.silent_s + 1)
        assert [counted(stalls, worker_of(stalls, one)) for one in (first, second)] == [OUT, NOT]
        stalls.told[1].set_result(200)
        assert (await task)[0] == 200
        assert stalls.events() == {"started": 1, "won": 1}

    with_stalls(test)


def test_when_both_are_silent_somebody_else_is_asked():
    async def test(stalls: Stalls) -> None:
        apart(stalls)
        task = await stalls.both()
        looked(stalls, HEDGED.silent_s + 1)
        await until(lambda: len(stalls.asked) == 3)
        assert [counted(stalls, worker_of(stalls, one)) for one in stalls.asked] == [OUT, OUT, NOT]
        stalls.told[2].set_result(200)
        assert (await task)[0] == 200

    with_stalls(test, prefill=3)


def test_a_second_that_falls_silent_after_the_first_did_is_not_waited_for_either():
    """Nobody new had been asked when the first was found silent: that was no move yet."""

    async def test(stalls: Stalls) -> None:
        apart(stalls)
        task = await stalls.both()
        first, second = stalls.asked
        heard(stalls, second)
        looked(stalls, HEDGED.silent_s + 1)
        assert stalls.events() == {"started": 1, "won": 1}
        worker_of(stalls, second).heard_at = 0.0
        looked(stalls, HEDGED.silent_s + 2)
        assert (await task)[0] == 200, "its decode worker computes it"
        assert [counted(stalls, worker_of(stalls, one)) for one in (first, second)] == [OUT, OUT]
        await stalls.gave_back(first)
        await stalls.gave_back(second)

    with_stalls(test)


@pytest.mark.parametrize("winner", [0, 1])
def test_a_leg_that_lost_is_no_silence(winner: int):
    async def test(stalls: Stalls) -> None:
        over, decode = asyncio.Event(), stalls.rig.decode[0]

        async def slow(*_: object) -> bool:
            await over.wait()
            return False

        apart(stalls)
        decode.behave = slow  # the request runs on
        task = await stalls.both()
        loser = worker_of(stalls, stalls.asked[1 - winner])
        stalls.told[winner].set_result(200)
        await until(lambda: len(decode.seen) == 1)
        heard(stalls, decode)
        looked(stalls, HEDGED.silent_s + 1)
        assert counted(stalls, loser) == NOT
        over.set()
        assert (await task)[0] == 200

    with_stalls(test)


def test_a_deadline_counts_against_both():
    """Both have had time, and neither has said anything."""

    async def test(stalls: Stalls) -> None:
        apart(stalls)
        task = await stalls.both()
        stalls.rig.sweep(later_s=3600.0)
        assert (await task)[0] == 504
        assert [counted(stalls, worker_of(stalls, one)) for one in stalls.asked] == [ONCE, ONCE]

    with_stalls(test)


def test_a_deadline_is_no_fault_of_a_second_that_was_sent_at_its_end():
    """The first one was expected to need most of the time that there is."""

    async def test(stalls: Stalls) -> None:
        apart(stalls, SOON)
        task = await stalls.both()
        (connection,) = stalls.rig.connections
        flow: Any = connection.flow
        flow.sent_at -= SOON.first_token_deadline_s
        flow.deadline = stalls.rig.context.clock()
        flow.expire(flow.deadline + 0.001)
        assert (await task)[0] == 504
        assert [counted(stalls, worker_of(stalls, one)) for one in stalls.asked] == [ONCE, NOT]
        assert stalls.record()["tries"][0]["hedge"]["why"] == "no KV within the deadline"

    with_stalls(test, config=SOON)


# -- bugs ------------------------------------------------------------------------------------------------------------------
class Bug(dict[Any, Any]):
    """What is to be counted of a revision fails."""

    def __setitem__(self, *_: object) -> None:
        raise RuntimeError("a client's words")


@pytest.mark.parametrize("leg", [0, 1], ids=["first", "second"])
def test_a_bug_in_what_is_done_with_a_new_connection_ends_the_request_at_once(leg: int, monkeypatch: pytest.MonkeyPatch):
    """Nobody waits for the task that connects: its exception was nobody's, and the client waited for its deadline."""

    async def test(stalls: Stalls) -> None:
        rig, connects = stalls.rig, Connects(monkeypatch, errno.ECONNREFUSED)
        reader, writer, _ = await rig.connect()
        if leg == 0:
            await connects(rig.prefill[0])
        writer.write(http(ask()))
        if leg == 1:
            await late(stalls, connects)
        await until(lambda: sum(one.inflight for one in rig.context.table.by_role["prefill"]) == 1 + leg)
        rig.context.metrics.served = Bug()
        connects.let.set()
        status, _, body = await answer_of(reader)
        assert (status, json.loads(body)["error"]["code"]) == (500, "router_failed")
        assert rig.context.desk.faults.count == 1
        monkeypatch.undo()

    with_stalls(test, config=SOON)
