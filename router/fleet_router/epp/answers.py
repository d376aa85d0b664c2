"""Messages to the gateway. Pure: values in, protobuf out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from fleet_router.dialect.routes import error_body
from fleet_router.epp.messages import OVERWRITE, ProcessingResponse
from fleet_router.errors import RETRY_AFTER_S, RequestError

DESTINATION: Final = "x-gateway-destination-endpoint"
NAMESPACE: Final = "envoy.lb"
KEPT_BACK: Final = (
    "authorization", "x-api-key", "x-slo-class", "x-slo-ttft-ms", "x-fleet-explain", "content-encoding",
    "x-vllm-priority", "x-session-id", "x-data-parallel-rank", "endpoint-load-metrics-format",
)  # fmt: skip
"""Headers of a request that no worker is to see. To the last one vLLM answers how full its cache is and how many wait."""
OK: Final = 200
PIECE: Final = 60_000
"""Of a body in one message: gateways take 64 KiB."""

Header = tuple[str, bytes]


def lines_of(raw: bytes) -> list[Header]:
    """Header lines as pairs."""
    pairs = (line.partition(b": ") for line in raw.split(b"\r\n") if line)
    return [(name.decode("latin-1").lower(), value) for name, _, value in pairs]


def sent(leg_id: str, size: int) -> list[Header]:
    """What stands at the head of a leg of our own, too: vLLM refuses a body that its client does not call JSON."""
    return [("content-type", b"application/json"), ("x-request-id", leg_id.encode()), ("content-length", b"%d" % size)]


def _change(mutation: Any, headers: Iterable[Header], removed: Sequence[str] = ()) -> None:
    for name, value in headers:
        mutation.set_headers.add(header={"key": name, "raw_value": value}, append_action=OVERWRITE)
    mutation.remove_headers.extend(removed)


def picked(destinations: str, headers: Sequence[Header], *, buffered: bytes | None = None) -> Any:
    """Where the request goes. `buffered`: the body, where the gateway has sent all of it in one message. Its route stays (no
    `clear_route_cache`): it may be one that is found by a header that is taken away here."""
    said = ProcessingResponse()
    common = (said.request_headers if buffered is None else said.request_body).response
    _change(common.header_mutation, [(DESTINATION, destinations.encode()), *headers], KEPT_BACK)
    if buffered is not None:
        common.body_mutation.body = buffered
    said.dynamic_metadata.update({NAMESPACE: {DESTINATION: destinations}})
    return said


def pieces(body: bytes, *, end: bool = True) -> Iterable[Any]:
    """The body to send, after `picked`; `end`: no trailers follow."""
    for at in range(0, max(1, len(body)), PIECE):
        said = ProcessingResponse()
        streamed = said.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = body[at : at + PIECE], end and at + PIECE >= len(body)
        yield said


def passed(kind: str) -> Any:
    """Go on, nothing changes."""
    said = ProcessingResponse()
    getattr(said, kind).SetInParent()
    return said


def answer_head(headers: Sequence[Header]) -> Any:
    """The head of the worker's answer, with headers of ours."""
    said = ProcessingResponse()
    _change(said.response_headers.response.header_mutation, headers)
    return said


def answer_piece(body: bytes, *, end: bool) -> Any:
    """A piece of the worker's answer goes on as it is."""
    said = ProcessingResponse()
    streamed = said.response_body.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = body, end
    return said


def told(body: bytes, request_id: str) -> Any:
    """The client's answer is JSON of ours; to HEAD gateways send its head alone."""
    said = ProcessingResponse()
    answer = said.immediate_response
    answer.status.code = OK
    answer.body = body
    answer.details = "told_by_router"
    _change(answer.headers, [("content-type", b"application/json"), ("x-request-id", request_id.encode())])
    return said


def refused(error: RequestError, url: bytes, request_id: str) -> Any:
    """The client's answer is an error of ours."""
    said = ProcessingResponse()
    answer = said.immediate_response
    answer.status.code = error.status
    answer.body = error_body(url, error, request_id)
    answer.details = error.code
    headers = [("content-type", b"application/json"), ("x-request-id", request_id.encode()), *lines_of(error.headers.encode())]
    if error.status == 503 and "retry-after" not in error.headers:
        headers.append(("retry-after", b"%d" % RETRY_AFTER_S))
    _change(answer.headers, headers)
    return said
