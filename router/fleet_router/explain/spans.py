"""A record as OpenTelemetry spans, in OTLP's JSON form (opentelemetry-proto 1.x, trace/v1). Pure.

The request is the root: SERVER. Below it: each wait for a slot or for workers, in vain or not, and for each attempt the prefill
leg, the KV transfer and the decode leg (CLIENT). Of a transfer the router sees when the decode leg was sent and when its first
byte came: that is the span, and the first decode step is in it.

Spans are put together as text, what is the same for many requests once: as objects for an encoder those of one request took
11.1 us, as text 5.0 (128 records a batch, interpreted).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from fleet_router.explain.record import Record, Try
from fleet_router.explain.trace import Trace
from fleet_router.workers import Worker

INTERNAL, SERVER, CLIENT = 1, 2, 3
FAILED: Final = 2
QUEUE_NUMBER: Final = 1 << 32
TRANSFER_NUMBER: Final = 1 << 33
"""Span numbers of what is no leg; legs are 1, 2, 3 …"""
WAIT: Final = b'"wait"'
SAME_MOST: Final = 4_096
"""Of texts that many spans have."""
BATCH: Final = (
    b'{"resourceSpans":[{"resource":{"attributes":[%b]},"scopeSpans":[{"scope":{"name":"fleet_router"},"spans":[%b]}]}]}'
)
SPAN: Final = (
    b'{"traceId":"%b","spanId":"%b","name":%b,"kind":%d,"startTimeUnixNano":"%d","endTimeUnixNano":"%d","attributes":[%b]%b}'
)
TEXT: Final = b',{"key":"%b","value":{"stringValue":%b}}'
WHOLE: Final = b',{"key":"%b","value":{"intValue":"%d"}}'
FRACTION: Final = b',{"key":"%b","value":{"doubleValue":%b}}'


def request_of(spans: list[bytes], service: str, instance: str) -> bytes:
    """ExportTraceServiceRequest."""
    named = {b"service.name": "fleet-router", b"service.namespace": service, b"service.instance.id": instance}
    resource = b"".join(_text(key, value) for key, value in named.items())
    return BATCH % (resource[1:], b",".join(spans))


def spans_of(record: Record, trace: Trace, epoch_ns: int) -> list[bytes]:
    """All of one request that has ended, each a JSON object. `epoch_ns`: added to the router's clock it makes Unix time."""
    make, error, lane = _Maker(trace, epoch_ns), record.error, record.lane
    name, same = _of_request(record.path, lane.account.name, lane.slo_class.name, record.adapter, record.ended)
    said = [same, TEXT % (b"fleet.request_id", msgspec.json.encode(record.request_id))]
    if status := record.status or (error.status if error is not None else 0):
        said.append(WHOLE % (b"http.response.status_code", status))
    said.append(WHOLE % (b"fleet.prompt_bytes", record.prompt_bytes))
    said.append(WHOLE % (b"fleet.tries", len(record.tries)))
    if error is not None:
        said.append(_text(b"error.type", error.code))
    wrong = error.code if error is not None and error.status >= 500 else ""
    found = [make.span(0, name, SERVER, record.came_at, record.ended_at, b"".join(said), wrong)]
    if record.waited:
        found.append(make.span(QUEUE_NUMBER, WAIT, INTERNAL, record.came_at, record.begun_at or record.ended_at, b""))
    for number, one in enumerate(record.tries):
        found += _legs(make, record, one, number, last=number == len(record.tries) - 1)
    return found


class _Maker:
    __slots__ = ("_epoch_ns", "_state", "_trace", "_trace_id")

    def __init__(self, trace: Trace, epoch_ns: int) -> None:
        self._trace, self._epoch_ns, self._trace_id = trace, epoch_ns, trace.trace_id.encode()
        self._state = b',"traceState":' + msgspec.json.encode(trace.state.decode()) if trace.state else b""

    def span(
        self, number: int, name: bytes, kind: int, begun: float, ended: float, said: bytes, wrong: str = "", *, under: int = 0
    ) -> bytes:
        """`name`: in JSON; `said`: its attributes, with a comma before each; `wrong`: what went wrong in it, if anything."""
        trace, rest = self._trace, self._state
        if parent := trace.span(under) if number else trace.parent:
            rest += b',"parentSpanId":"%b"' % parent.encode()
        if wrong:
            rest += b',"status":{"code":%d,"message":%b}' % (FAILED, msgspec.json.encode(wrong))
        begun_ns = self._epoch_ns + int(begun * 1e9)
        ended_ns = self._epoch_ns + int(ended * 1e9) if ended > begun else begun_ns
        return SPAN % (self._trace_id, trace.span(number).encode(), name, kind, begun_ns, ended_ns, said[1:], rest)


def _legs(make: _Maker, record: Record, one: Try, number: int, *, last: bool) -> list[bytes]:
    """The legs of one attempt; the one that went wrong ends then. Without a worker it waited for one; who is refused at once did
    not."""
    over = record.ended_at if last and not one.wrong_at else one.wrong_at
    found, first = [], 2 * number + 1
    if one.decode is None:
        reason = _text(b"fleet.reason", one.reason)
        return [make.span(first, WAIT, INTERNAL, one.at, over, reason)] if one.wrong_at else []
    decided = _text(b"fleet.reason", one.reason) + WHOLE % (b"fleet.decided_us", round(one.decided_s * 1e6))
    begun, leg = one.at, first
    if one.prefill is not None:
        broke = one.why if not one.prefilled_at else ""
        done = one.prefilled_at or over
        gave = one.second.worker if one.second is not None and one.second.outcome == "won" else one.prefill
        found.append(make.span(first, b'"prefill"', CLIENT, one.at, done, decided + _worker(gave), broke))
        if not one.prefilled_at:
            return found
        begun, leg, decided = one.prefilled_at, first + 1, b""
    first_at = record.first_at if begun <= record.first_at <= over else 0.0  # of one that was carried on it came from the first
    if one.prefill is not None and (ready := first_at or (over if one.why or not record.first_at else 0.0)):
        pair = _text(b"fleet.prefill", gave.endpoint.name) + _text(b"fleet.decode", one.decode.endpoint.name)
        found.append(make.span(TRANSFER_NUMBER + number, b'"kv transfer"', INTERNAL, begun, ready, pair, under=leg))
    said = decided + _worker(one.decode)
    if first_at:
        said += FRACTION % (b"fleet.first_byte_s", msgspec.json.encode(round(first_at - begun, 6)))
    if last:
        said += WHOLE % (b"fleet.writes", record.writes)
    found.append(make.span(leg, b'"decode"', CLIENT, begun, over, said, one.why))
    return found


def _worker(worker: Worker) -> bytes:
    at = worker.endpoint
    return _of_worker(at.address, at.http_port, at.name, at.tier, at.revision)


@lru_cache(SAME_MOST)
def _of_worker(address: str, port: int, name: str, tier: str, revision: str) -> bytes:
    said = (b"fleet.worker", name), (b"fleet.tier", tier), (b"fleet.revision", revision)
    return _text(b"server.address", address) + WHOLE % (b"server.port", port) + b"".join(_text(key, value) for key, value in said)


@lru_cache(SAME_MOST)
def _of_request(path: bytes, tenant: str, slo_class: str, adapter: str, ended: str) -> tuple[bytes, bytes]:
    """(name of the root, what it says)."""
    route = path.decode("latin-1")
    said = {
        b"http.request.method": "POST", b"http.route": route, b"fleet.tenant": tenant, b"fleet.class": slo_class,
        b"fleet.adapter": adapter, b"fleet.ended": ended,
    }  # fmt: skip
    return msgspec.json.encode(f"POST {route}"), b"".join(_text(key, value) for key, value in said.items())


@lru_cache(SAME_MOST)
def _text(key: bytes, value: str) -> bytes:
    """An attribute; what is empty is none."""
    return TEXT % (key, msgspec.json.encode(value)) if value else b""
