"""A record as OpenTelemetry spans, in OTLP's JSON form (opentelemetry-proto 1.x, trace/v1). Pure.

The request is the root: SERVER. Below it: the wait for a slot or for workers, and for each attempt the prefill leg, the KV
transfer and the decode leg (CLIENT). Of a transfer the router sees when the decode leg was sent and when its first byte came:
that is the span, and the first decode step is in it.
"""

from __future__ import annotations

from typing import Any, Final

from fleet_router.explain.record import Record, Try
from fleet_router.explain.trace import Trace
from fleet_router.workers import Worker

Span = dict[str, Any]
INTERNAL, SERVER, CLIENT = 1, 2, 3
FAILED: Final = 2
SCOPE: Final = {"name": "fleet_router"}
QUEUE_NUMBER: Final = 1 << 32
TRANSFER_NUMBER: Final = 1 << 33
"""Span numbers of what is no leg; legs are 1, 2, 3 …"""


def request_of(records: list[tuple[Record, Trace]], service: str, instance: str, epoch_ns: int) -> dict[str, Any]:
    """ExportTraceServiceRequest. `epoch_ns`: added to the router's clock it makes Unix time."""
    spans = [span for record, trace in records for span in spans_of(record, trace, epoch_ns)]
    resource = _attributes({"service.name": "fleet-router", "service.namespace": service, "service.instance.id": instance})
    return {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": [{"scope": SCOPE, "spans": spans}]}]}


def spans_of(record: Record, trace: Trace, epoch_ns: int) -> list[Span]:
    """All of one request that has ended."""
    make = _Maker(trace, epoch_ns)
    status = record.status or (record.error.status if record.error is not None else 0)
    path = record.path.decode("latin-1")
    root = make.span(0, f"POST {path}", SERVER, record.came_at, record.ended_at, {
        "http.request.method": "POST", "http.route": path, "http.response.status_code": status or None,
        "fleet.request_id": record.request_id, "fleet.tenant": record.lane.account.name,
        "fleet.class": record.lane.slo_class.name,
        "fleet.adapter": record.adapter, "fleet.prompt_bytes": record.prompt_bytes, "fleet.tries": len(record.tries),
        "fleet.ended": record.ended, "error.type": record.error.code if record.error is not None else None,
    })  # fmt: skip
    if record.error is not None and record.error.status >= 500:
        root["status"] = {"code": FAILED, "message": record.error.code}
    found = [root]
    if record.waited and record.begun_at:
        found.append(make.span(QUEUE_NUMBER, "wait", INTERNAL, record.came_at, record.begun_at, {}))
    for number, one in enumerate(record.tries):
        found += _legs(make, record, one, number, last=number == len(record.tries) - 1)
    return found


class _Maker:
    def __init__(self, trace: Trace, epoch_ns: int) -> None:
        self._trace, self._epoch_ns = trace, epoch_ns

    def span(
        self, number: int, name: str, kind: int, begun: float, ended: float, said: dict[str, Any], *, under: int = 0
    ) -> Span:
        trace = self._trace
        made: Span = {
            "traceId": trace.trace_id, "spanId": trace.span(number), "name": name, "kind": kind,
            "startTimeUnixNano": self._ns(begun), "endTimeUnixNano": self._ns(max(begun, ended)), "attributes": _attributes(said),
        }  # fmt: skip
        parent = trace.span(under) if number else trace.parent
        if parent:
            made["parentSpanId"] = parent
        if trace.state:
            made["traceState"] = trace.state.decode()
        return made

    def _ns(self, at: float) -> str:
        return str(self._epoch_ns + int(at * 1e9))


def _legs(make: _Maker, record: Record, one: Try, number: int, *, last: bool) -> list[Span]:
    """The legs of one attempt; the one that went wrong ends then."""
    if one.decode is None:
        return []
    over = record.ended_at if last and not one.wrong_at else one.wrong_at
    found, first = [], 2 * number + 1
    decided = {"fleet.reason": one.reason, "fleet.decided_us": round(one.decided_s * 1e6)}
    if one.prefill is not None:
        done = one.prefilled_at or over
        found.append(make.span(first, "prefill", CLIENT, one.at, done, decided | _worker(one.prefill)))
        if not one.prefilled_at:
            return _failed(found, one)
        decided = {}
    begun, leg = (one.prefilled_at, first + 1) if one.prefill is not None else (one.at, first)
    first_at = record.first_at if begun <= record.first_at <= over else 0.0  # of one that was carried on it came from the first
    if one.prefill is not None and (ready := first_at or (over if one.why or not record.first_at else 0.0)):
        between = {"fleet.prefill": one.prefill.endpoint.name, "fleet.decode": one.decode.endpoint.name}
        found.append(make.span(TRANSFER_NUMBER + number, "kv transfer", INTERNAL, begun, ready, between, under=leg))
    said = decided | _worker(one.decode) | {"fleet.first_byte_s": round(first_at - begun, 6) if first_at else None}
    if last:
        said["fleet.writes"] = record.writes
    found.append(make.span(leg, "decode", CLIENT, begun, over, said))
    return _failed(found, one)


def _failed(found: list[Span], one: Try) -> list[Span]:
    if one.why:
        found[-1]["status"] = {"code": FAILED, "message": one.why}
    return found


def _worker(worker: Worker) -> dict[str, Any]:
    at = worker.endpoint
    return {
        "server.address": at.address, "server.port": at.http_port, "fleet.worker": at.name, "fleet.tier": at.tier,
        "fleet.revision": at.revision,
    }  # fmt: skip


def _attributes(said: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in said.items() if value not in (None, "")]


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
