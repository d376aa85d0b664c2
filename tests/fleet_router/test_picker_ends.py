"""How requests behind a gateway end when somebody goes: the router, a client, a worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from fleet_router.epp.exchange import Exchange
from fleet_router.epp.server import EndpointPicker
from tests.fleet_router.rig import CONFIG, LONG, Rig, ask, run, until
from tests.fleet_router.test_picker import EVENTS, _breaks, answer_of, body_of, exchanged, failed_with, head_of, known, trailers
from tests.fleet_router.test_picker_connections import calling

WAITING = 6


def test_a_picker_whose_time_is_over_begins_nothing_for_those_that_wait():
    """Each that was cut freed its slot for one that waited: the gateway was told a worker, and the stream broke 0.25 s later,
    where it should have been told that the router goes."""

    async def go(rig: Rig) -> None:
        async def hang(*_: Any) -> bool:
            await asyncio.sleep(2)
            return True

        rig.prefill[0].behave = hang
        picker = EndpointPicker(rig.context, lambda: "", "FailClose")
        port = await picker.start("127.0.0.1", 0)
        calls = []
        async with contextlib.AsyncExitStack() as opened:
            for prompt in [LONG, *["short"] * WAITING]:
                call = await opened.enter_async_context(calling(port))
                await call.write(head_of())
                await call.write(body_of(ask(prompt=prompt)))
                calls.append(call)
                await until(lambda: len(rig.prefill[0].seen) == 1)
            await until(lambda: rig.context.desk.gate.waiting == WAITING)
            stopping = asyncio.create_task(picker.stop(0.1))
            said = [await call.read() for call in calls]
            for call in calls:
                await call.done_writing()
            await stopping
        assert [one.WhichOneof("response") for one in said] == ["immediate_response"] * (1 + WAITING)
        assert not rig.decode[0].seen

    run(go, config=msgspec.structs.replace(CONFIG, worker_slots=1, queue_per_slot=WAITING))


def test_of_a_stream_that_ends_early_behind_a_gateway_nobody_says_that_its_client_left():
    """A gateway ends its call in the same way when the worker breaks off: `explain` said of each such stream that its client had
    left, and nobody looked at the worker."""

    async def go(rig: Rig) -> None:
        known(rig)
        asked = body_of(ask(prompt="short", stream=True))
        await exchanged(rig, head_of(), asked, *answer_of(EVENTS[0], b"")[:2])
        await exchanged(rig, head_of(), asked)
        not_begun, begun = (one.tries[-1].why for one in rig.context.recorder.records())  # the last one first
        assert begun == "the gateway ended it early: the client left, or the worker broke off"
        assert not_begun == "the client left"  # else its head would have told

    run(go, prefill=0)


class Buggy:
    """A request of which nothing more can be counted."""

    done = False

    def raw(self, _: bytes) -> None:
        raise ValueError("whatever it is")

    def end(self) -> None:
        raise ValueError("whatever it is")

    def cut(self, _: Exception) -> None:
        self.done = True


@pytest.mark.parametrize("last", [answer_of(b"piece")[1], trailers("response_trailers")], ids=["piece", "trailers"])
def test_a_bug_of_ours_in_what_is_counted_of_an_answer_leaves_the_gateways_answer_as_it_is(last: Any):
    """It failed the call (a client's answer broke off), or was told in the answer's place; and of a piece nothing was counted."""

    async def go(rig: Rig) -> None:
        known(rig)
        exchange = Exchange(rig.context)

        async def come() -> AsyncIterator[Any]:
            yield head_of()
            yield body_of(ask(prompt="short"))
            flow, exchange.flow = exchange.flow, Buggy()  # type: ignore[assignment]
            yield last
            exchange.flow = flow

        *_, told = [said async for said in exchange.answers(come())]
        exchange.gone()
        assert told.WhichOneof("response") == last.WhichOneof("request")
        assert rig.context.desk.faults.count == 1

    run(go, prefill=0)


def test_a_bug_of_ours_at_an_answers_head_leaves_the_gateways_answer_as_it_is(monkeypatch: pytest.MonkeyPatch):
    async def go(rig: Rig) -> None:
        known(rig)
        monkeypatch.setattr("fleet_router.epp.exchange._served", _breaks)
        *_, told, piece = await exchanged(rig, head_of(), body_of(ask(prompt="short")), *answer_of(b"piece"))
        assert told.WhichOneof("response") == "response_headers"
        assert piece.response_body.response.body_mutation.streamed_response.body == b"piece"
        account = rig.context.desk.accounts["acme"]
        assert (rig.context.desk.faults.count, account.inflight, rig.context.desk.gate.running) == (1, 0, 0)

    run(go, prefill=0)


@pytest.mark.parametrize(("said", "tokens", "ended"), [(answer_of(*EVENTS), 2, "answered"), (failed_with(b"504"), 0, "failed")])
def test_an_answer_whose_first_token_is_late_behind_a_gateway_counts_all_the_same(said: list[Any], tokens: int, ended: str):
    """It was over for us after 30 s, with its slot free and its tokens given back, while the gateway waited on: what came was
    charged to nobody and told as 504, and the router sent the busy worker more than it has slots."""

    async def go(rig: Rig) -> None:
        known(rig, tokensPerMinute=10_000)
        comes = asyncio.Event()

        async def come() -> AsyncIterator[Any]:
            yield head_of()
            yield body_of(ask(prompt="short", stream=True))
            await comes.wait()
            for message in said:
                yield message

        exchange = Exchange(rig.context)
        account, (worker,) = rig.context.desk.accounts["acme"], rig.context.table.by_role["decode"]

        async def take() -> None:
            async for _ in exchange.answers(come()):
                pass

        task = asyncio.create_task(take())
        await until(lambda: worker.inflight == 1)
        for later_s in (rig.context.config.first_token_deadline_s + 1, 1000.0):
            exchange.sweep(rig.context.clock() + later_s)
            assert (worker.inflight, account.inflight, rig.context.desk.gate.running) == (1, 1, 1)
            assert rig.context.metrics.of("t", "r").errors == 1  # it is the worker's failure, once
        comes.set()
        await task
        exchange.gone()
        assert (account.output_tokens, account.counts[ended], worker.inflight) == (tokens, 1, 0)
        assert rig.context.metrics.requests[200 if tokens else 504] == sum(rig.context.metrics.requests.values()) == 1
        assert rig.context.metrics.of("t", "r").errors == 1

    run(go, prefill=0)
