"""The Endpoint Picker's side of a request, message by message, without a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from fleet_router.config import HttpBounds, TierRule
from fleet_router.epp.exchange import Exchange
from fleet_router.epp.messages import BUFFERED, FULL_DUPLEX, NONE, ProcessingRequest
from fleet_router.receiving import PIECE_BYTES, PIECES_FEW
from tests.fleet_router.admission.made import key_of, parsed
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, Rig, ask, run

EVENTS = [b'data: {"choices": [{"index": 0, "text": "%b"}]}\n\n' % text for text in (b"a", b"b")] + [b"data: [DONE]\n\n"]
STREAM = b"".join(EVENTS)


def head_of(path: str = "/v1/completions", method: str = "POST", *, end: bool = False) -> Any:
    said = ProcessingRequest()
    said.protocol_config.request_body_mode = said.protocol_config.response_body_mode = FULL_DUPLEX
    named = {":path": path, ":method": method, "authorization": f"Bearer {key_of('acme')}"}
    for name, value in named.items():
        said.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    said.request_headers.end_of_stream = end
    return said


def body_of(body: dict[str, Any] | bytes) -> Any:
    said = ProcessingRequest()
    said.request_body.body = body if isinstance(body, bytes) else json.dumps(body).encode()
    said.request_body.end_of_stream = True
    return said


def answer_of(*pieces: bytes) -> list[Any]:
    found = [ProcessingRequest()]
    found[0].response_headers.headers.headers.add(key=":status", raw_value=b"200")
    for piece in pieces:
        said = ProcessingRequest()
        said.response_body.body = piece
        found.append(said)
    if pieces:
        found[-1].response_body.end_of_stream = True
    return found


async def exchanged(rig: Rig, *messages: Any) -> list[Any]:
    async def come() -> AsyncIterator[Any]:
        for message in messages:
            yield message

    exchange = Exchange(rig.context)
    try:
        return [said async for said in exchange.answers(come())]
    finally:
        exchange.gone()


def known(rig: Rig, **more: Any) -> None:
    rig.context.desk.tenants_needed = True
    rig.context.desk.know(parsed(acme=more))


@pytest.mark.parametrize("extra", [{}, {"stream_options": {"include_usage": False}}, {"user": "u", "priority": 7}])
def test_a_stream_behind_a_gateway_is_not_asked_for_a_usage_that_its_client_did_not_ask_for(extra: dict[str, Any]):
    """It was, and the client got an event without a choice: nothing can be taken out of a stream that only the gateway sees."""

    async def go(rig: Rig) -> None:
        known(rig, tokensPerMinute=10_000)
        told = await exchanged(rig, head_of(), body_of(ask(prompt="short", stream=True, **extra)), *answer_of(STREAM))
        sent = json.loads(b"".join(one.request_body.response.body_mutation.streamed_response.body for one in told))
        assert not (sent.get("stream_options") or {}).get("include_usage")
        account = rig.context.desk.accounts["acme"]
        assert (account.output_tokens, account.inflight, rig.context.desk.gate.running) == (2, 0, 0)

    run(go, prefill=0)


@pytest.mark.parametrize(
    "pieces",
    [
        [STREAM],
        EVENTS,
        [STREAM[at : at + 50] for at in range(0, len(STREAM), 50)],
        [EVENTS[0][:-1], STREAM[len(EVENTS[0]) - 1 :]],
    ],
)
def test_tokens_of_a_stream_without_usage_are_counted_behind_a_gateway(pieces: list[bytes]):
    """None were, where each event came in a piece of its own: it was looked for behind a line break of the framing."""

    async def go(rig: Rig) -> None:
        known(rig, tokensPerMinute=10_000)
        await exchanged(rig, head_of(), body_of(ask(prompt="short", stream=True)), *answer_of(*pieces))
        assert rig.context.desk.accounts["acme"].output_tokens == 2

    run(go, prefill=0)


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
def test_no_worker_is_asked_through_a_gateway_what_others_use_of_it(mode: int):
    """vLLM tells whoever sends `endpoint-load-metrics-format` how full its KV cache is and how many requests wait: by that a
    tenant could see how long the prompts of others are. In `/metrics`, where the same stands, nobody may look either."""

    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of()
        head.protocol_config.request_body_mode = mode
        head.request_headers.headers.headers.add(key="endpoint-load-metrics-format", raw_value=b"json")
        told = await exchanged(rig, head, body_of(ask(prompt="short")))
        (removed,) = [
            found for one in told
            if (found := getattr(one, one.WhichOneof("response")).response.header_mutation.remove_headers)
        ]  # fmt: skip
        assert "endpoint-load-metrics-format" in removed

    run(go, prefill=0)


def trailers(kind: str) -> Any:
    said = ProcessingRequest()
    getattr(said, kind).SetInParent()
    return said


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
def test_a_request_that_ends_with_trailers_is_decided(mode: int):
    """No piece of such a body is the last one (with BUFFERED the only one is not): the gateway waited until it gave up."""

    async def go(rig: Rig) -> None:
        known(rig)
        head, piece = head_of(), body_of(ask(prompt="p"))
        head.protocol_config.request_body_mode = mode
        piece.request_body.end_of_stream = False
        answered = answer_of(STREAM)
        answered[-1].response_body.end_of_stream = False
        messages = [head, piece, trailers("request_trailers"), *answered, trailers("response_trailers")]
        said = [one for one in await exchanged(rig, *messages) if one.WhichOneof("response") != "response_body"]
        told = [one.WhichOneof("response") for one in said]
        duplex = ["request_headers", "request_body", "request_trailers", "response_headers", "response_trailers"]
        assert told == duplex
        if mode == FULL_DUPLEX:
            assert not said[1].request_body.response.body_mutation.streamed_response.end_of_stream  # the trailers are
        assert rig.context.desk.accounts["acme"].counts["answered"] == 1
        assert rig.context.metrics.client_left == 0

    run(go, prefill=0)


def test_trailers_behind_what_was_refused_decide_nothing():
    async def go(rig: Rig) -> None:
        known(rig)
        piece = body_of(b"{")
        said = await exchanged(rig, head_of(), piece, trailers("request_trailers"))
        assert next(one.WhichOneof("response") for one in said) == "immediate_response"
        assert sum(one.WhichOneof("response") == "immediate_response" for one in said) == 1
        assert rig.context.metrics.requests[400] == 1

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200), ("HEAD", "/v1/models", 200), ("GET", "/v1/models?a=/metrics", 200),
        ("GET", "/v1/models/m", 200), ("GET", "/v1/models/%6D", 200), ("OPTIONS", "/v1/models", 0), ("GET", "/health", 0),
        ("OPTIONS", "/v1/chat/completions", 0),
        ("POST", "/sleep", 404), ("DELETE", "/v1/models/m", 404), ("GET", "/metrics", 404), ("GET", "/metrics?x=/v1/models", 404),
        ("GET", "/v1/models/../metrics", 404), ("GET", "/v1/models/%2e%2e/%2e%2e/metrics", 404), ("GET", "//metrics", 404),
        ("GET", "/server_info", 404), ("HEAD", "/docs", 404), ("OPTIONS", "/metrics", 404), ("GET", "/v1/chat/completions", 404),
        ("GET", "", 404), ("GET", "/v1/models/other", 404),
    ],
)  # fmt: skip
def test_nobody_reaches_more_of_a_worker_than_the_api_through_a_gateway(method: str, path: str, status: int):
    """A POST without a body went to a worker, whatever its path was; then every GET did: any key read the engine's metrics."""

    async def go(rig: Rig) -> None:
        known(rig)
        (told,) = await exchanged(rig, head_of(path, method, end=True))
        assert (told.WhichOneof("response"), told.immediate_response.status.code) == (
            "immediate_response" if status else "request_headers", status,
        )  # fmt: skip

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("method", "path", "asks", "status"),
    [
        ("OPTIONS", "/v1/chat/completions", True, 0), ("OPTIONS", "/v1/models", True, 0), ("OPTIONS", "/v1/embeddings", True, 0),
        ("OPTIONS", "/metrics", True, 404), ("OPTIONS", "/v1/models/../metrics", True, 404),
        ("OPTIONS", "/v1/chat/completions", False, 401), ("GET", "/v1/models", True, 401), ("GET", "/health", True, 401),
    ],
)  # fmt: skip
def test_a_browsers_preflight_needs_no_key_and_nothing_else_goes_without(method: str, path: str, asks: bool, status: int):
    """Browsers never send one with it: it was 401, and no page could ask a fleet with tenants through a gateway."""

    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of(path, method, end=True)
        kept = [one for one in head.request_headers.headers.headers if one.key != "authorization"]
        del head.request_headers.headers.headers[:]
        head.request_headers.headers.headers.extend(kept)
        if asks:
            head.request_headers.headers.headers.add(key="Access-Control-Request-Method", raw_value=b"POST")
        (told,) = await exchanged(rig, head)
        assert told.immediate_response.status.code == status

    run(go, prefill=0)


@pytest.mark.parametrize(
    ("rights", "names"), [({}, ["m", "billing"]), ({"models": ["billing"]}, ["billing"]), ({"models": ["other"]}, [])]
)  # fmt: skip
def test_behind_a_gateway_a_key_is_told_of_the_models_that_it_may_use(rights: dict[str, Any], names: list[str]):
    """A worker answered, who knows nothing of keys: each key read the names of all adapters, other tenants' as well."""

    async def go(rig: Rig) -> None:
        known(rig, **rights)
        (decode,) = rig.context.table.by_role["decode"]
        decode.follow(msgspec.structs.replace(decode.endpoint, adapters={"billing": "v1"}))
        (told,) = await exchanged(rig, head_of("/v1/models", "GET", end=True))
        assert told.immediate_response.status.code == 200
        assert [one["id"] for one in json.loads(told.immediate_response.body)["data"]] == names
        for name in ("m", "billing", "legal"):
            (told,) = await exchanged(rig, head_of(f"/v1/models/{name}", "GET", end=True))
            assert told.immediate_response.status.code == (200 if name in names else 404)
        rig.context.desk.know(parsed(other={}))
        (told,) = await exchanged(rig, head_of("/v1/models", "GET", end=True))
        assert told.immediate_response.status.code == 401

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, adapters=("billing", "legal")))


def test_a_request_behind_a_gateway_that_cannot_be_read_after_all_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch):
    async def go(rig: Rig) -> None:
        known(rig)
        monkeypatch.setattr("fleet_router.epp.exchange.Picked", _breaks)
        (said,) = await exchanged(rig, head_of(), body_of(ask(prompt="short")))
        # a call that is only failed is let in by a gateway that fails open, past its key and limits
        assert said.immediate_response.status.code == 500
        assert b'"code":"router_failed"' in said.immediate_response.body
        assert rig.context.desk.faults.count == 1
        assert (rig.context.desk.accounts["acme"].inflight, rig.context.desk.gate.running) == (0, 0)

    run(go, prefill=0)


def _breaks(*_: object) -> None:
    raise ValueError("whatever it is")


PARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


@pytest.mark.parametrize(
    "given",
    [
        {"traceparent": PARENT + "\n"},
        {"traceparent": PARENT.replace("00-", "01-", 1) + "-x\rx-evil: 1"},
        {"traceparent": PARENT, "tracestate": "a=b\n"},
        {"x-request-id": "xyz\n"},
    ],
    ids=["parent", "later parent", "state", "request id"],
)
def test_a_gateways_header_with_a_line_break_is_no_end_of_a_workers_head(given: dict[str, str]):
    """Values come as bytes of a message, where nobody has looked for line ends: each of these was well formed."""

    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of()
        for name, value in given.items():
            head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        said = await exchanged(rig, head, body_of(ask()))
        assert said
        (seen,) = rig.prefill[0].headers
        assert not {"x-evil", "tracestate"} & set(seen)
        assert "content-length" in seen
        assert "\r" not in "".join(seen.values())
        assert seen["x-request-id"].isascii()
        assert ("traceparent" in seen) == ("tracestate" in given)
        assert "xyz" not in seen["x-request-id"]

    run(go)


def test_routing_behind_a_gateway_goes_by_a_header_that_says_something_else_as_well():
    async def go(rig: Rig) -> None:
        known(rig)
        exchange = Exchange(rig.context)
        head = head_of()
        head.request_headers.headers.headers.add(key="x-slo-class", raw_value=b"default")
        exchange._read(head)
        assert exchange._request.kept == {b"x-slo-class": b"default"}
        assert exchange._request.slo_class == b"default"

    rules = (TierRule(tier="t", headers={"x-slo-class": "default"}),)
    run(go, config=msgspec.structs.replace(CONFIG, tier_rules=rules))


def test_an_answer_that_a_gateway_does_not_show_is_over_with_its_head():
    """Incident: with response_body_mode NONE nothing came behind the head, and a stream of more than 30 s was a failure of its
    worker: five put it out."""

    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of()
        head.protocol_config.response_body_mode = NONE

        async def come() -> AsyncIterator[Any]:
            for message in (head, body_of(ask(prompt="short", stream=True)), answer_of()[0]):
                yield message

        exchange = Exchange(rig.context)
        assert len([said async for said in exchange.answers(come())]) == 3
        account, (worker,) = rig.context.desk.accounts["acme"], rig.context.table.by_role["decode"]
        assert (worker.inflight, account.inflight) == (0, 0)
        exchange.sweep(rig.context.clock() + 100)
        exchange.gone()
        assert (rig.context.metrics.of("t", "r").errors, account.counts["answered"]) == (0, 1)

    run(go, prefill=0)


@pytest.mark.parametrize("mode", [NONE, FULL_DUPLEX])
@pytest.mark.parametrize("stream", [True, False])
def test_kv_that_a_worker_was_picked_for_counts_once_whatever_is_shown_of_its_answer(mode: int, stream: bool):
    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of()
        head.protocol_config.response_body_mode = mode
        shown = answer_of(*EVENTS) if mode == FULL_DUPLEX else answer_of()[:1]

        async def come() -> AsyncIterator[Any]:
            for message in (head, body_of(ask(stream=stream)), *shown):
                yield message

        exchange = Exchange(rig.context)
        assert [said async for said in exchange.answers(come())]
        exchange.gone()
        assert (sum(rig.context.metrics.handed_over.values()), len(rig.prefill[0].seen)) == (1, 1)

    run(go)


def failed_with(status: bytes) -> list[Any]:
    found = answer_of(b"no")
    found[0].response_headers.headers.headers[0].raw_value = status
    return found


@pytest.mark.parametrize(("status", "counted", "left"), [(b"503", "failed", 10), (b"429", "failed", 10), (b"422", "refused", 5)])
def test_a_worker_that_fails_behind_a_gateway_is_put_out_and_its_client_pays_nothing(status: bytes, counted: str, left: int):
    """The end of each of its answers forgave it the one before, and a request that it failed counted as one that it refused."""

    async def go(rig: Rig) -> None:
        known(rig, requestsPerSecond=0.001, requestsBurst=10)
        for _ in range(5):
            await exchanged(rig, head_of(), body_of(ask(prompt="short")), *failed_with(status))
        account, (worker,) = rig.context.desk.accounts["acme"], rig.context.table.by_role["decode"]
        assert (account.counts[counted], account.inflight) == (5, 0)
        assert account.requests is not None
        assert account.requests.left(int(rig.context.clock() * 1e9)) == left
        assert worker.breaker.closed == (counted == "refused")

    run(go, prefill=0)


def test_a_body_that_comes_in_small_pieces_takes_no_more_memory_than_it_has_bytes():
    async def go(rig: Rig) -> None:
        known(rig)
        exchange, piece = Exchange(rig.context), body_of(b"  ")
        piece.request_body.end_of_stream = False
        exchange._read(head_of())
        for number in range(20_000):
            piece.request_body.body = b"" if number % 2 else b"  "
            assert [said async for said in exchange._piece(piece.request_body)] == []
        assert len(exchange._body) <= PIECES_FEW + 20_000 // PIECE_BYTES
        assert b"".join(exchange._body) == b" " * 20_000

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, bounds=HttpBounds(body_bytes=100_000)))


def test_behind_a_gateway_too_bodies_in_part_have_a_bound_together():
    async def go(rig: Rig) -> None:
        known(rig)
        receiving, piece = rig.context.receiving, body_of(b"x" * 60_000)
        piece.request_body.end_of_stream = False
        exchanges = [Exchange(rig.context) for _ in range(3)]
        for exchange in exchanges:
            assert [said async for said in exchange._headers(head_of())] == []
            assert [said async for said in exchange._piece(piece.request_body)] == []
        assert receiving.bytes == 180_000
        (told,) = [said async for said in exchanges[0]._piece(piece.request_body)]
        assert told.immediate_response.status.code == 503
        assert json.loads(told.immediate_response.body)["error"]["code"] == "receiving"
        assert (receiving.bytes, receiving.refused) == (120_000, 1)
        assert [said async for said in exchanges[0]._piece(piece.request_body)] == []
        exchanges[1].gone()
        assert receiving.bytes == 60_000
        piece.request_body.end_of_stream, piece.request_body.body = True, b""
        (told,) = [said async for said in exchanges[2]._piece(piece.request_body)]
        assert (told.immediate_response.status.code, receiving.bytes) == (400, 0)
        for exchange in exchanges:
            exchange.gone()
        assert receiving.bytes == 0

    run(go, prefill=0, config=msgspec.structs.replace(CONFIG, bounds=HttpBounds(receiving_bytes=200_000)))


def test_behind_a_gateway_no_body_is_kept_of_whom_nobody_knows():
    async def go(rig: Rig) -> None:
        known(rig)
        head = head_of()
        del head.request_headers.headers.headers[-1]
        exchange, piece = Exchange(rig.context), body_of(b"x" * 60_000)
        (told,) = [said async for said in exchange._headers(head)]
        assert told.immediate_response.status.code == 401
        assert [said async for said in exchange._piece(piece.request_body)] == []
        assert (exchange._body, rig.context.receiving.bytes, rig.context.desk.refused_keys) == ([], 0, 1)

    run(go, prefill=0)


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
def test_an_answer_that_tells_an_error_in_its_last_piece_is_over_once(mode: int):
    """It was closed twice: two records, and each count of ended requests was one too high."""

    async def go(rig: Rig) -> None:
        known(rig)
        head, error = head_of(), b'data: {"error": {"message": "engine dead", "code": 500}}\n\n'
        head.protocol_config.response_body_mode = mode
        await exchanged(rig, head, body_of(ask(prompt="short", stream=True)), *answer_of(EVENTS[0] + error + EVENTS[2]))
        recorder, metrics = rig.context.recorder, rig.context.metrics
        assert (len(recorder.troubled), len(recorder.smooth), metrics.streams_broken) == (1, 0, 1)
        assert (metrics.of("t", "r").errors, rig.context.desk.accounts["acme"].counts["answered"]) == (1, 1)

    run(go, prefill=0)


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED])
@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_prefill_workers_refusal_is_told_behind_a_gateway(mode: int, status: int):
    """Nobody was told: the gateway waited for a decision until it gave up."""

    async def go(rig: Rig) -> None:
        async def refuses(_: Any, writer: asyncio.StreamWriter) -> bool:
            answer(writer, status, {"error": {"message": "too long for this model", "param": "prompt"}})
            return True

        known(rig, tokensPerMinute=10_000)
        rig.prefill[0].behave = refuses
        head = head_of()
        head.protocol_config.request_body_mode = mode
        async with asyncio.timeout(3):
            *_, said = await exchanged(rig, head, body_of(ask()))
        told = json.loads(said.immediate_response.body)["error"]
        assert (said.immediate_response.status.code, told["message"]) == (status, "too long for this model")
        headers = {one.header.key: one.header.raw_value for one in said.immediate_response.headers.set_headers}
        assert headers["x-ratelimit-limit-tokens"] == b"10000"
        account, (record,) = rig.context.desk.accounts["acme"], rig.context.recorder.troubled
        assert (account.counts["refused"], account.inflight, record.status) == (1, 0, status)
        assert (dict(rig.context.metrics.requests), rig.context.metrics.client_left) == ({status: 1}, 0)

    run(go)


@pytest.mark.parametrize(("rights", "shown"), [({}, False), ({"decisions": "own"}, True)])
def test_behind_a_gateway_too_a_decision_is_shown_to_who_may_see_it(rights: dict[str, Any], shown: bool):
    async def go(rig: Rig) -> None:
        known(rig, **rights)
        head = head_of()
        head.request_headers.headers.headers.add(key="x-fleet-explain", raw_value=b"1")
        *_, told, _ = await exchanged(rig, head, body_of(ask(prompt="short")), *answer_of(b'{"choices": []}'))
        names = {one.header.key for one in told.response_headers.response.header_mutation.set_headers}
        assert ("x-fleet-decision" in names, "x-request-id" in names) == (shown, True)

    run(go, prefill=0)
