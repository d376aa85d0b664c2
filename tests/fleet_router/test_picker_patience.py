"""What a gateway answers by itself, of the worker that was picked or before any was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fleet_router.epp.exchange import Exchange
from fleet_router.epp.picked import Picked, address_of
from fleet_router.hints import NO_HINTS
from fleet_router.request import parse_body
from tests.fleet_router.rig import Rig, ask, run, until
from tests.fleet_router.test_picked import Gateway
from tests.fleet_router.test_picker import answer_of, body_of, head_of, known


@pytest.mark.parametrize(
    ("stream", "waited_s", "errors"),
    [(b"false", 15.0, 0), (b"false", 59.0, 0), (b"false", 601.0, 1), (b"true", 1.0, 0), (b"true", 15.1, 1), (b"true", 45.0, 1)],
)
def test_how_long_a_gateway_waits_is_no_failure_of_the_worker(stream: bytes, waited_s: float, errors: int):
    """Envoy waits 15 s unless its route says otherwise, Envoy AI Gateway 60 s, and a client may ask for less
    (x-envoy-upstream-rq-timeout-ms): five such 504 of long whole answers put out a healthy worker."""

    async def go(rig: Rig) -> None:
        lane, (worker,) = rig.context.desk.lane(b"", b""), rig.context.table.by_role["decode"]
        body = b'{"model":"m","prompt":"short","max_tokens":2000,"stream":%b}' % stream
        ask, ticket = rig.context.desk.admit(lane, parse_body(body, False, lane.config))
        flow = Picked(rig.context, Gateway(), b"/v1/completions", ask, ticket, NO_HINTS, None)  # type: ignore[arg-type]
        rig.context.desk.start(ticket, flow)
        flow.sent_at -= waited_s
        flow.started_at -= waited_s
        flow.deadline -= waited_s
        flow.served(address_of(worker), 504)
        flow.end()
        assert (rig.context.metrics.of("t", "r").errors, worker.inflight) == (errors, 0)
        (record,) = rig.context.recorder.records()
        assert record.tries[-1].why == "the gateway waited no longer: it answered 504"

    run(go, prefill=0)


def of_its_own(status: bytes) -> list[Any]:
    """As Envoy answers without having asked anybody."""
    found = answer_of(b"whatever it says")
    found[0].response_headers.headers.headers[0].raw_value = status
    return found


@pytest.mark.parametrize("ends", [False, True], ids=["answers", "ends its side"])
def test_a_gateway_that_needs_no_decision_any_more_waits_for_none(ends: bool):
    """Envoy's `max_stream_duration` and idle times: its client was answered only when the decision was made, and the worker of
    that, whom nobody had asked, had failed. agentgateway ends its side for a client that left, and no more: its request went on
    waiting, and was prefilled, for nobody."""

    async def go(rig: Rig) -> None:
        known(rig)
        (prefill,), comes, over = rig.prefill, asyncio.Event(), asyncio.Event()

        async def hang(*_: object) -> bool:
            return await over.wait()

        prefill.behave = hang

        async def come() -> AsyncIterator[Any]:
            yield head_of()
            yield body_of(ask())
            await comes.wait()
            for message in [] if ends else of_its_own(b"504"):
                yield message

        exchange = Exchange(rig.context)
        said: list[Any] = []

        async def take() -> None:
            async for one in exchange.answers(come()):
                said.append(one.WhichOneof("response"))

        task = asyncio.create_task(take())
        await until(lambda: len(prefill.seen) == 1)
        exchange.sweep(rig.context.clock())
        assert exchange.flow is not None
        assert not exchange.flow.done
        comes.set()
        await asyncio.wait_for(task, 3)
        exchange.gone()
        await until(lambda: len(prefill.released) == 1)
        over.set()
        account = rig.context.desk.accounts["acme"]
        assert said == ([] if ends else ["response_headers", "response_body"])
        assert (rig.context.metrics.of("t", "r").errors, rig.idle(), account.inflight) == (0, True, 0)
        (record,) = rig.context.recorder.records()
        assert record.tries[-1].why == ("the client left" if ends else "the gateway waited no longer: it answered 504")

    run(go)


@pytest.mark.parametrize("status", [b"429", b"403", b"503"])
@pytest.mark.parametrize("telling", [True, False])
def test_what_a_gateway_answers_that_has_asked_nobody_is_no_workers_failure(status: bytes, telling: bool):
    """A rate limit behind the picker's filter (429, Envoy's `local_ratelimit`; 403, `rbac`), a pool without anybody (503): five
    in a row put out a worker that nobody had asked. An Envoy that says who served says so of each answer of a worker's."""

    async def go(rig: Rig) -> None:
        known(rig)
        gateways = {"g"} if telling else set[str]()
        (worker,) = rig.context.table.by_role["decode"]
        for _ in range(5):
            exchange = Exchange(rig.context, "g", gateways)

            async def come() -> AsyncIterator[Any]:
                for message in (head_of(), body_of(ask(prompt="short")), *of_its_own(status)):
                    yield message

            assert [said.WhichOneof("response") async for said in exchange.answers(come())][-1] == "response_body"
            exchange.gone()
        assert (rig.context.metrics.of("t", "r").errors, worker.breaker.closed) == ((0, True) if telling else (5, False))
        account = rig.context.desk.accounts["acme"]
        assert (account.counts["failed"], account.inflight, worker.inflight) == (5, 0, 0)
        why = {record.tries[-1].why for record in rig.context.recorder.records()}
        assert why == {f"{'the gateway asked nobody: it' if telling else 'decode'} answered {status.decode()}"}

    run(go, prefill=0)
