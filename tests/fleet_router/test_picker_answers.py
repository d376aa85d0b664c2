"""What the Endpoint Picker makes of answers that it sees only as far, and as fast, as a gateway shows them."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc.aio import EOF

from fleet_router.epp.answers import DESTINATION
from fleet_router.epp.exchange import Exchange
from fleet_router.epp.messages import BUFFERED, FULL_DUPLEX
from fleet_router.watching import watch
from tests.fleet_router.rig import Rig, ask, run, until
from tests.fleet_router.test_picker import EVENTS, STREAM, answer_of, body_of, exchanged, head_of, known
from tests.fleet_router.test_picker_connections import calling, serving

ENVOY = (("x-envoy-internal", "true"),)
"""What an Envoy's own calls have."""


def overloaded() -> list[Any]:
    """As Envoy answers above its bound of requests under way."""
    found = answer_of(b"upstream connect error or disconnect/reset before headers. reset reason: overflow")
    found[0].response_headers.headers.headers[0].raw_value = b"503"
    found[0].response_headers.headers.headers.add(key="x-envoy-overloaded", raw_value=b"true")
    return found


def test_what_a_gateway_lets_through_no_more_is_nothing_against_its_worker():
    """Envoy has a bound of its own (`circuit_breakers`, 1,024 unless told): five such answers put a worker out that was never
    asked, and counted as errors of its revision, by which canaries are rolled back."""

    async def go(rig: Rig) -> None:
        known(rig)
        for _ in range(5):
            await exchanged(rig, head_of(), body_of(ask(prompt="short")), *overloaded())
        account, (worker,) = rig.context.desk.accounts["acme"], rig.context.table.by_role["decode"]
        assert (rig.context.metrics.of("t", "r").errors, worker.breaker.closed, worker.inflight) == (0, True, 0)
        assert (account.counts["failed"], account.inflight) == (5, 0)
        (found,) = {one.tries[-1].why for one in rig.context.recorder.records()}
        assert found == "the gateway let no more through: it answered 503"

    run(go, prefill=0)


def of_stream(mode: int, *pieces: bytes) -> list[Any]:
    """A stream that has got so far."""
    head, asked = head_of(), ask(prompt="short", stream=True)
    head.protocol_config.response_body_mode = mode
    return [head, body_of(asked), *answer_of(*pieces, b"")[:-1]]


def test_a_stream_that_its_client_reads_slowly_behind_a_gateway_is_nothing_against_its_worker():
    """A gateway reads no more of a worker than its client takes: after 30 s it was the worker's failure, five such clients put it
    out, and what came of the stream later was counted to nobody."""

    async def go(rig: Rig) -> None:
        known(rig)
        resumes = asyncio.Event()

        async def come() -> AsyncIterator[Any]:
            for message in of_stream(FULL_DUPLEX, EVENTS[0]):
                yield message
            await resumes.wait()
            yield answer_of(b"", EVENTS[1], EVENTS[2])[2]
            yield answer_of(EVENTS[2])[1]

        exchange = Exchange(rig.context)
        task = asyncio.create_task(_all(exchange.answers(come())))
        await until(lambda: exchange.flow is not None and exchange.flow.last_byte_at > 0 and not exchange.flow._first)
        account, (worker,) = rig.context.desk.accounts["acme"], rig.context.table.by_role["decode"]
        now = rig.context.clock() + 100
        exchange.sweep(now)
        asked = watch(rig.context, [exchange], now)
        assert (rig.context.metrics.of("t", "r").errors, worker.breaker.closed, worker.inflight) == (0, True, 1)
        assert asked == [worker]  # whether it is there: of a stream that is not read nobody can tell
        resumes.set()
        await task
        exchange.gone()
        assert (account.counts["answered"], account.inflight, worker.inflight) == (1, 0, 0)

    run(go, prefill=0)


async def _all(said: AsyncIterator[Any]) -> list[Any]:
    return [one async for one in said]


def test_a_stream_that_a_gateway_collects_is_nothing_against_its_worker_however_long_it_takes():
    """With response_body_mode BUFFERED (Envoy AI Gateway's `processing-body-mode: buffered`) nothing is seen from head to end:
    after 15 s its worker was put out as silent, after 30 s the stream was its failure, and its tokens were counted to nobody.
    What ended before was taken for a first token: its prefill was believed to be as slow as all of it."""

    async def go(rig: Rig) -> None:
        known(rig, tokensPerMinute=1_000)
        ends = asyncio.Event()

        async def come() -> AsyncIterator[Any]:
            for message in of_stream(BUFFERED):
                yield message
            await ends.wait()
            yield answer_of(STREAM)[1]

        exchange = Exchange(rig.context)
        task = asyncio.create_task(_all(exchange.answers(come())))
        await until(lambda: exchange.flow is not None and exchange.flow.started)
        account, (worker,) = rig.context.desk.accounts["acme"], rig.context.table.by_role["decode"]
        now = rig.context.clock() + 100
        assert watch(rig.context, [exchange], now) == [worker]
        exchange.sweep(now)
        assert (rig.context.metrics.of("t", "r").errors, worker.breaker.closed, worker.inflight) == (0, True, 1)
        ends.set()
        await task
        exchange.gone()
        assert (account.counts["answered"], account.inflight, worker.inflight) == (1, 0, 0)
        assert account.output_tokens == 2
        assert (sum(rig.context.metrics.of("t", "r").ttft.fold()), worker.prefill.weight) == (0, 0)

    run(go, prefill=0)


@pytest.mark.parametrize(("metadata", "numbers"), [(ENVOY, [1, 1, 3, 3, 1]), ((), [1, 1, 1, 1, 1])], ids=["envoy", "other"])
def test_only_an_envoy_that_says_who_served_is_told_whom_to_fall_back_to(metadata: Any, numbers: list[int]):
    """Envoy AI Gateway takes what it is told for one address: of each request it found nobody there, which was 503. agentgateway
    does so, too (agentgateway#1444), and says who served: after its first answer each of its requests was 503."""

    async def asked_by_gateway(port: int, served: str) -> list[str]:
        async with calling(port, metadata) as call:
            for message in (head_of(), body_of(ask(prompt="short"))):
                await call.write(message)
            said = (await call.read()).request_headers.response.header_mutation.set_headers
            (found,) = [one.header.raw_value.decode() for one in said if one.header.key == DESTINATION]
            head, *rest = answer_of(b"{}")
            if served:
                head.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": served})
            for message in (head, *rest):
                await call.write(message)
            await call.done_writing()
            while await call.read() is not EOF:
                pass
            return found.split(",")

    async def go(rig: Rig) -> None:
        known(rig)
        async with serving(rig, None) as port:
            told = [len(await asked_by_gateway(port, served)) for served in ("", "10.0.0.9:1", "10.0.0.9:1", "", "")]
            assert told == numbers

    run(go, prefill=0, decode=4)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/realtime"), ("CONNECT", "")])
def test_who_asks_for_another_protocol_is_told_at_once_that_it_is_not_served(method: str, path: str):
    """Such a request has no end (WebSocket): it was waited for, for 30 s, and then it "was not complete"."""

    async def go(rig: Rig) -> None:
        known(rig)
        (said,) = await exchanged(rig, head_of(path, method))
        assert said.immediate_response.status.code == 404

    run(go, prefill=0)


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
@pytest.mark.parametrize(("path", "status"), [("/v1/models", 200), ("/v1/models/other", 404), ("/health", 0), ("/metrics", 404)])
def test_a_get_whose_body_is_empty_has_none(mode: int, path: str, status: int):
    """Its head does not say so where it comes in chunks, or HTTP/2 ends it later: it was 404, and is 200 at the router's port."""

    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of(path, "GET")
        head.protocol_config.request_body_mode = mode
        *_, last = said = await exchanged(rig, head, body_of(b""))
        if status:
            assert last.immediate_response.status.code == status
            assert (b"model_not_found" in last.immediate_response.body) == (path == "/v1/models/other")
            return
        picked = said[0].request_headers if mode == FULL_DUPLEX else last.request_body
        names = {one.header.key for one in picked.response.header_mutation.set_headers}
        assert (names, len(said)) == ({DESTINATION}, 2)
        body = last.request_body.response.body_mutation
        assert mode == BUFFERED or (body.streamed_response.body, body.streamed_response.end_of_stream) == (b"", True)

    run(go, prefill=0)


@pytest.mark.parametrize(("encoding", "status"), [(b"gzip", 400), (b"identity", 0)])
def test_who_sends_a_compressed_body_through_a_gateway_is_told_that_it_is_not_read(encoding: bytes, status: int):
    """It was told that its body is no JSON, which it is."""

    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of()
        head.request_headers.headers.headers.add(key="content-encoding", raw_value=encoding)
        body = gzip.compress(b"{}") if status else ask(prompt="short")
        said = await exchanged(rig, head, body_of(body))
        assert said[0].immediate_response.status.code == status
        assert (b"compressed bodies are not read" in said[0].immediate_response.body) == (status == 400)

    run(go, prefill=0)
