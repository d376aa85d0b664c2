"""Spans: what a request becomes in OpenTelemetry's terms, whose trace it is part of, what a collector gets."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fleet_router.config import RouterConfig, TraceConfig
from fleet_router.errors import RequestError
from fleet_router.explain import export
from fleet_router.explain.export import Exported, Exporter, headers_of
from fleet_router.explain.record import Record, Second
from fleet_router.explain.spans import request_of, spans_of
from fleet_router.explain.trace import Trace, read
from fleet_router.follow.documents import Documents
from fleet_router.request import parse_body
from fleet_wire.endpoints import AtZero, Endpoints
from tests.fleet_router.fake_worker import answer, stream
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

TRACE_ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{PARENT}-01"


class Collector:
    """A stand-in for an OTLP/HTTP collector: what it takes must be a request of the standard's own message."""

    def __init__(self, statuses: list[int] | None = None) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.headers: list[dict[str, str]] = []
        self.statuses = statuses or []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.take(self)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["content-length"]))
        status = self.statuses.pop(0) if self.statuses else 200
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if status == 200 and request.path == "/v1/traces":
            for resource in parsed(body).resource_spans:
                self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.namespace"}
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        request.send_response(status)
        request.send_header("content-length", "0")
        request.end_headers()


def parsed(body: bytes) -> ExportTraceServiceRequest:
    """OTLP's JSON has ids in hex where protobuf's own has base64; unknown fields are errors."""
    found = json.loads(body)
    for resource in found["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name, size in (("traceId", 16), ("spanId", 8), ("parentSpanId", 8)):
                    if name in span:
                        raw = bytes.fromhex(span[name])
                        assert len(raw) == size
                        span[name] = base64.b64encode(raw).decode()
    return json_format.ParseDict(found, ExportTraceServiceRequest())


@contextmanager
def collector(statuses: list[int] | None = None) -> Iterator[Collector]:
    made = Collector(statuses)
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


def traced(at: Collector, **more: Any) -> RouterConfig:
    return msgspec.structs.replace(CONFIG, traces=TraceConfig(endpoint=at.url, **more))


def flush(rig: Rig) -> None:
    assert rig.context.recorder.exporter is not None
    rig.context.recorder.stop()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_the_legs_and_the_transfer_are_spans_of_the_clients_trace():
    with collector() as at:

        async def go(rig: Rig) -> None:
            await rig.raw(http(ask(stream=True), f"traceparent: {SAMPLED}", "tracestate: a=1", "connection: close"))
            await until(rig.idle)
            await asyncio.to_thread(flush, rig)
            spans = {span.name: span for span in at.spans}
            assert set(spans) == {"POST /v1/completions", "prefill", "kv transfer", "decode"}
            root, prefill, moved, decode = (spans[n] for n in ("POST /v1/completions", "prefill", "kv transfer", "decode"))
            assert {span.trace_id.hex() for span in at.spans} == {TRACE_ID}
            assert {span.trace_state for span in at.spans} == {"a=1"}
            assert len({span.span_id for span in at.spans}) == 4
            assert root.parent_span_id.hex() == PARENT
            assert prefill.parent_span_id == decode.parent_span_id == root.span_id
            assert moved.parent_span_id == decode.span_id
            order = [root.start_time_unix_nano, prefill.start_time_unix_nano, prefill.end_time_unix_nano]
            order += [decode.start_time_unix_nano, moved.end_time_unix_nano, decode.end_time_unix_nano]
            assert order == sorted(order)
            assert abs(root.end_time_unix_nano - decode.end_time_unix_nano) < 50_000_000
            assert attributes(prefill)["fleet.worker"] == f"prefill-{rig.prefill[0].port}"
            assert attributes(prefill)["fleet.reason"] == "remote prefill"
            assert attributes(root)["http.response.status_code"] == 200
            assert at.services == {"f"}
            # the workers are told of their own span, and which trace it is
            for worker, span in ((rig.prefill[0], prefill), (rig.decode[0], decode)):
                assert worker.headers[0]["traceparent"] == f"00-{TRACE_ID}-{span.span_id.hex()}-01"
                assert worker.headers[0]["tracestate"] == "a=1"

        run(go, config=traced(at))


def test_a_failed_leg_is_a_span_that_says_so():
    with collector() as at:

        async def go(rig: Rig) -> None:
            async def refuse(_: Any, writer: asyncio.StreamWriter) -> bool:
                answer(writer, 500, {})
                return True

            rig.prefill[0].behave = refuse
            await rig.post(ask())
            await asyncio.to_thread(flush, rig)
            failed, second = (span for span in at.spans if span.name in ("prefill", "decode"))
            assert (failed.status.code, failed.status.message) == (2, "prefill answered 500")
            assert (second.name, second.status.code, attributes(second)["fleet.reason"]) == (
                "decode",
                0,
                "local: nothing to hand over, or after a failure",
            )
            assert not any(span.name == "kv transfer" for span in at.spans)

        run(go, config=traced(at, sample=1.0))


def test_a_transfer_whose_decode_leg_failed_ends_with_it():
    with collector() as at:

        async def go(rig: Rig) -> None:
            async def refuse(_: Any, writer: asyncio.StreamWriter) -> bool:
                await asyncio.sleep(0.02)
                answer(writer, 500, {"error": {"message": "no"}})
                return True

            rig.decode[0].behave = refuse
            assert (await rig.post(ask()))[0] == 503
            await asyncio.to_thread(flush, rig)
            found = {span.name: span for span in at.spans}
            root, prefill, moved, decode = (found[n] for n in ("POST /v1/completions", "prefill", "kv transfer", "decode"))
            assert (prefill.status.code, decode.status.code, decode.status.message) == (0, 2, "decode answered 500")
            assert (root.status.code, attributes(root)["http.response.status_code"]) == (2, 503)
            assert moved.start_time_unix_nano == decode.start_time_unix_nano
            assert moved.end_time_unix_nano == decode.end_time_unix_nano >= decode.start_time_unix_nano + 20_000_000
            assert attributes(moved)["fleet.prefill"] == f"prefill-{rig.prefill[0].port}"

        run(go, config=traced(at, sample=1.0))


@pytest.mark.parametrize("outcome", ["won", "lost", "failed"])
def test_of_two_that_prefilled_the_span_names_whose_kv_was_read(outcome: str):
    async def go(rig: Rig) -> None:
        lane, ask_of_it = rig.context.desk.lane(b"", b""), parse_body(json.dumps(ask()).encode(), False, rig.context.config)
        first, second = rig.context.table.by_role["prefill"]
        record = Record(("r", "r"), b"/v1/completions", ask_of_it, lane, 1.0, False)
        one = record.tried(1.0, 0.0, "remote prefill", first, rig.context.table.by_role["decode"][0])
        one.second = Second(second, 1.1)
        one.second.outcome = outcome
        record.prefilled(1.2)
        record.first_at = record.last_at = record.ended_at = 1.3
        raw = request_of(spans_of(record, Trace(TRACE_ID, "", 1), 0), "f", "i")
        spans = {span.name: span for span in parsed(raw).resource_spans[0].scope_spans[0].spans}
        named = (second if outcome == "won" else first).endpoint.name
        assert (attributes(spans["prefill"])["fleet.worker"], attributes(spans["kv transfer"])["fleet.prefill"]) == (named, named)

    run(go, prefill=2)


def test_the_first_byte_is_that_of_the_attempt_that_it_came_from():
    """Incident: of a stream that was carried on, the last attempt's came seconds before it was sent, and the first had none."""
    with collector() as at:

        async def go(rig: Rig) -> None:
            async def breaks(_: Any, writer: asyncio.StreamWriter) -> bool:
                for worker in rig.decode:
                    worker.behave = None
                await stream(writer, ["a", "b"], end=False)
                writer.close()
                return True

            for worker in rig.decode:
                worker.behave = breaks
            status, body = await rig.post(ask(stream=True, temperature=0))
            assert (status, b"[DONE]" in body) == (200, True)
            await asyncio.to_thread(flush, rig)
            decodes, moves = ([span for span in at.spans if span.name == name] for name in ("decode", "kv transfer"))
            first, second = map(attributes, sorted(decodes, key=lambda span: span.start_time_unix_nano))
            assert 0 < first["fleet.first_byte_s"] < 1
            assert ("fleet.first_byte_s" in second, second["fleet.writes"] >= 1) == (False, True)
            assert [span.parent_span_id for span in moves] == [decodes[0].span_id]  # of the second nobody knows when it was over
            assert moves[0].end_time_unix_nano < decodes[0].end_time_unix_nano

        run(go, decode=2, config=traced(at, sample=1.0))


def test_no_prompt_and_no_key_reaches_the_collector():
    with collector() as at:

        async def go(rig: Rig) -> None:
            await rig.raw(http(ask(prompt="CANARY" * 50), "authorization: Bearer CANARY", "connection: close"))
            await rig.post({"model": "CANARY", "prompt": "CANARY"})
            await asyncio.to_thread(flush, rig)
            assert len(at.spans) >= 3
            assert not any("CANARY" in str(span) for span in at.spans)

        run(go, config=traced(at, sample=1.0))


@pytest.mark.parametrize(
    ("sample", "headers", "traces", "onward"),
    [
        (0.0, [], 0, None),
        (1.0, [], 1, "01"),
        (0.0, [f"traceparent: {SAMPLED}"], 1, "01"),
        (1.0, [f"traceparent: {SAMPLED[:-1]}0"], 0, "00"),  # the client's word
        (1.0, ["traceparent: nonsense"], 1, "01"),
    ],
)
def test_who_is_sampled(sample: float, headers: list[str], traces: int, onward: str | None):
    with collector() as at:

        async def go(rig: Rig) -> None:
            await rig.raw(http(ask(prompt="short"), *headers, "connection: close"))
            await asyncio.to_thread(flush, rig)
            assert len({span.trace_id for span in at.spans}) == traces
            assert (rig.decode[0].headers[0].get("traceparent") or "")[-2:] == (onward or "")

        run(go, config=traced(at, sample=sample))


def test_a_client_cannot_make_us_trace_everything():
    with collector() as at:

        async def go(rig: Rig) -> None:
            for _ in range(20):
                await rig.raw(http(ask(prompt="short"), f"traceparent: {SAMPLED}", "connection: close"))
            await asyncio.to_thread(flush, rig)
            assert 1 <= sum(span.name == "decode" for span in at.spans) < 10
            assert all("traceparent" in seen for seen in rig.decode[0].headers)

        run(go, config=traced(at, per_second=1))


def test_a_collector_that_is_gone_costs_spans_and_is_counted():
    async def go(rig: Rig) -> None:
        await rig.post(ask(prompt="short"))
        await asyncio.to_thread(flush, rig)
        text = rig.router.plain(b"/metrics")[2].decode()
        assert 'fleet_router_traced_requests_total{result="dropped"} 1' in text
        assert 'fleet_router_traced_requests_total{result="sent"} 0' in text

    run(go, config=msgspec.structs.replace(CONFIG, traces=TraceConfig(endpoint="http://127.0.0.1:9", sample=1.0)))


def test_what_was_counted_of_one_collector_counts_on_for_the_next():
    """A counter fell with each change of the configuration: of several processes together rates saw spans that nobody sent."""
    gone = TraceConfig(endpoint="http://127.0.0.1:9", sample=1.0)

    async def go(rig: Rig) -> None:
        await rig.post(ask(prompt="short"))
        await until(lambda: b'traced_requests_total{result="dropped"} 1' in rig.router.plain(b"/metrics")[2])
        for traces in (msgspec.structs.replace(gone, sample=0.5), TraceConfig()):
            rig.apply(rig.prefill, rig.decode, msgspec.structs.replace(CONFIG, traces=traces))
            assert b'traced_requests_total{result="dropped"} 1' in rig.router.plain(b"/metrics")[2]

    run(go, config=msgspec.structs.replace(CONFIG, traces=gone))


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "http://a..b:1"])
def test_a_collector_whose_address_is_none_costs_spans_and_is_counted(endpoint: str):
    """The thread ended of it: nothing was dropped, until the queue was full of what nobody would send."""
    exporter = Exporter(TraceConfig(endpoint=endpoint), "f", lambda: 0.0, Exported())
    assert exporter._post_once(b"") == 0


def test_a_busy_collector_is_asked_again_and_a_full_queue_drops():
    with collector([503, 429]) as at:

        async def go(rig: Rig) -> None:
            exporter = rig.context.recorder.exporter
            assert exporter is not None
            await rig.post(ask(prompt="short"))
            await until(lambda: rig.context.recorder.exported.sent == 1)
            assert rig.context.recorder.exported.failed == 2
            exporter._waiting.extend([None] * 1)  # type: ignore[list-item]
            await rig.post(ask(prompt="short"))
            assert rig.context.recorder.exported.dropped == 1
            exporter._waiting.clear()

        run(go, config=traced(at, sample=1.0, queue=1))


@pytest.mark.parametrize(("stopping", "pauses"), [(False, 3), (True, 0)])
def test_spans_are_rendered_in_slices_between_which_the_loop_has_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, stopping: bool, pauses: int
):
    """A batch is full when a burst of streams ends: rendered at a stretch it stood in the first tokens of the next one."""
    order: list[str] = []
    monkeypatch.setattr(export, "spans_of", lambda record, *_: (order.append("record"), [str(record).encode()])[1])
    monkeypatch.setattr(time, "sleep", lambda _: order.append("pause"))
    exporter = Exporter(TraceConfig(endpoint="http://127.0.0.1:1"), "f", lambda: 0.0, Exported())
    exporter._stopping = stopping
    batch: Any = [(number, None) for number in range(export.BATCH)]
    assert exporter._rendered(batch, 0) == [str(number).encode() for number in range(export.BATCH)]
    assert order.count("pause") == pauses
    assert stopping or max(len(part.split()) for part in " ".join(order).split("pause")) == export.SLICE


def test_a_batch_that_is_full_waits_until_the_next_burst_has_its_first_tokens(monkeypatch: pytest.MonkeyPatch):
    order: list[object] = []
    monkeypatch.setattr(time, "sleep", order.append)
    exporter = Exporter(TraceConfig(endpoint="http://127.0.0.1:1"), "f", lambda: 0.0, Exported())

    def send() -> None:
        order.append("sent")
        exporter._stopping = True

    monkeypatch.setattr(exporter, "_send_all", send)
    exporter._wake.set()
    exporter._run()
    assert order[:2] == [export.SETTLE_S, "sent"]
    order.clear()
    exporter._wake.set()
    exporter._run()  # it stops: what waits is sent at once
    assert order == ["sent"]


def test_tracing_that_is_switched_off_leaves_nothing_running():
    with collector() as at:

        async def go(rig: Rig) -> None:
            first = rig.context.recorder.exporter
            assert first is not None
            rig.apply(rig.prefill, rig.decode, CONFIG)
            assert rig.context.recorder.exporter is None
            await until(lambda: not first._thread.is_alive())
            await rig.raw(http(ask(prompt="short"), f"traceparent: {SAMPLED}", "connection: close"))
            assert rig.decode[0].headers[0]["traceparent"] == SAMPLED  # passed on as it came
            assert next(iter(rig.context.recorder.smooth)).trace is None

        run(go, config=traced(at))


def test_the_collectors_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc,x-tenant=t")
    with collector() as at:

        async def go(rig: Rig) -> None:
            await rig.post(ask(prompt="short"))
            await asyncio.to_thread(flush, rig)
            assert (at.headers[0]["authorization"], at.headers[0]["x-tenant"]) == ("Bearer abc", "t")

        run(go, config=traced(at, sample=1.0))
    assert headers_of("") == {}


@pytest.mark.parametrize(
    "header",
    [
        b"", b"00", b"ff-" + SAMPLED[3:].encode(), b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01", SAMPLED.upper().encode(),
        f"00-{TRACE_ID}-{'0' * 16}-01".encode(), SAMPLED.encode() + b"-more", SAMPLED.encode() + b" ", b"00-" + b"g" * 32,
    ],
)  # fmt: skip
def test_a_bad_trace_context_is_none(header: bytes):
    assert read(header, b"") is None


def test_a_later_version_of_the_trace_context_is_read():
    assert read(SAMPLED.replace("00-", "01-", 1).encode() + b"-more", b"\x01") == (TRACE_ID, PARENT, True, b"")


def test_span_ids_are_never_zero():
    assert Trace(TRACE_ID, "", (1 << 64) - 1).span(1) == f"{1:016x}"


def test_a_wait_for_a_slot_is_a_span():
    with collector() as at:

        async def go(rig: Rig) -> None:
            over = asyncio.Event()

            async def hang(_: Any, writer: asyncio.StreamWriter) -> bool:
                await over.wait()
                answer(writer, 200, {})
                return True

            rig.decode[0].behave = hang
            asking = [asyncio.create_task(rig.post(ask(prompt="short"))) for _ in range(2)]
            await until(lambda: rig.router._desk.gate.waiting == 1)
            over.set()
            await asyncio.gather(*asking)
            await asyncio.to_thread(flush, rig)
            (wait,) = (span for span in at.spans if span.name == "wait")
            first, second = (span for span in at.spans if span.name == "decode")
            assert first.start_time_unix_nano < wait.end_time_unix_nano <= second.start_time_unix_nano

        run(go, config=msgspec.structs.replace(traced(at, sample=1.0), worker_slots=1))


@pytest.mark.parametrize("waits_for", ["a slot", "a tier that wakes"])
@pytest.mark.parametrize("client_left", [False, True])
def test_a_wait_that_was_in_vain_is_a_span_too_and_the_request_one_that_failed(waits_for: str, client_left: bool):
    """Of a request that never had a worker there was one span, and nothing said what all of its time was spent on."""
    with collector() as at:

        async def go(rig: Rig) -> None:
            desk, held = rig.router._desk, rig.context.holding
            over = asyncio.Event()

            async def hang(_: Any, writer: asyncio.StreamWriter) -> bool:
                await over.wait()
                answer(writer, 200, {})
                return True

            if waits_for == "a slot":
                rig.decode[0].behave = hang
                first = asyncio.create_task(rig.post(ask(prompt="short")))
                await until(lambda: rig.decode[0].seen != [])
            else:
                first = asyncio.create_task(asyncio.sleep(0))
                rig.router.apply(Documents(rig.context.config, Endpoints(fleet="f", namespace="n", at_zero=(AtZero(tier="t"),))))
            reader, writer, connection = await rig.connect()
            writer.write(http(ask(prompt="short")))
            await until(lambda: desk.gate.waiting + len(held) == 1)
            await asyncio.sleep(0.01)
            if client_left:
                writer.transport.abort()
            else:
                if waits_for == "a slot":
                    assert connection.flow is not None
                    connection.flow.cut(RequestError(503, "in vain", code="waking"))
                else:
                    rig.sweep(1e6)
                assert (await answer_of(reader))[0] == 503
            await until(lambda: rig.sweep() is None and desk.gate.waiting + len(held) == 0)
            over.set()
            await first
            await until(rig.idle)
            await asyncio.to_thread(flush, rig)
            (wait,) = (span for span in at.spans if span.name == "wait")
            (root,) = (span for span in at.spans if span.span_id == wait.parent_span_id)
            begun, over = wait.start_time_unix_nano, wait.end_time_unix_nano
            assert root.start_time_unix_nano <= begun <= over - 5_000_000 < over <= root.end_time_unix_nano
            assert (root.status.code, root.status.message) == ((0, "") if client_left else (2, "waking"))

        run(go, prefill=0, config=msgspec.structs.replace(traced(at, sample=1.0), worker_slots=1))


def test_a_request_that_is_refused_at_once_has_waited_for_nothing():
    with collector() as at:

        async def go(rig: Rig) -> None:
            rig.apply(rig.prefill, [], rig.context.config)
            assert (await rig.post(ask()))[0] == 503
            await asyncio.to_thread(flush, rig)
            (root,) = at.spans
            assert (root.status.code, root.status.message, attributes(root)["error.type"]) == (2, "no_worker", "no_worker")

        run(go, config=traced(at, sample=1.0))
