"""The client side: one asyncio protocol per connection, httptools for parsing, everything bounded before it is kept.

Requests of one connection are answered in order, one at a time; bytes that arrive meanwhile wait in a bounded buffer. A
message that could be read in two ways (two lengths, length and chunks, folded headers, no or two Host headers) is refused and
the connection closed.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
from collections.abc import Callable
from typing import cast
from uuid import uuid4

import httptools

from fleet_router.errors import PHRASES, RETRY_AFTER_S, RequestError, error_json
from fleet_router.flow import Context, Flow
from fleet_router.request import parse_body

COMPLETIONS = b"/v1/completions"
CHAT = b"/v1/chat/completions"
GENERATE = {COMPLETIONS: False, CHAT: True}
PLAIN = {b"/v1/models", b"/health", b"/ready", b"/metrics"}
HOST = re.compile(rb"^[A-Za-z0-9._\-]+(:\d{1,5})?$|^\[[0-9a-fA-F:.]+\](:\d{1,5})?$")
REQUEST_ID = re.compile(rb"^[A-Za-z0-9._\-]{1,128}$")
LOOKED_AT = frozenset({b"host", b"content-length", b"transfer-encoding", b"x-request-id", b"content-encoding", b"expect"})
PIPELINED_BYTES = 65_536
HIGH_WATER_BYTES = 256 * 1024
_PROCESS = uuid4().hex[:16]
_NUMBERS = itertools.count(1)


def new_request_id() -> str:
    """Unlike any other in any process; random once, then counted: a random number per request costs a system call."""
    return f"{_PROCESS}{next(_NUMBERS):016x}"


def check_framing(name: bytes, value: bytes, most_bytes: int) -> int:
    """RequestError for a body that we would not read; else 1 when the field says how long the body is."""
    if name == b"content-encoding":
        if value.strip().lower() != b"identity":
            raise RequestError(400, "compressed bodies are not read")
        return 0
    if name == b"content-length" and value.isdigit() and int(value) > most_bytes:
        raise RequestError(413, f"the body is larger than {most_bytes} bytes")
    if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
        raise RequestError(400, "the only transfer encoding that is read is chunked")
    return 1


class ClientConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(
        self, context: Context, connections: set[ClientConnection], plain: Callable[[bytes], tuple[int, bytes, bytes]]
    ) -> None:
        self._context = context
        self._connections = connections
        self._plain = plain
        self._bounds = context.config.bounds
        """Those that held when the request that is being received began."""
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = None
        self._waiting = bytearray()
        self._closing = False
        self.flow: Flow | None = None
        self.request_id = ""
        self.leg_id = ""
        self.begun_at: float | None = None
        """When the request that is being received began; None between requests."""
        self.in_body = False
        self.idle_since = context.clock()
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._hosts = 0
        self._framing = 0
        self._header_count = 0
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._complete = False
        self._keep_alive = True
        self.request_id = self.leg_id = new_request_id()
        self.begun_at = None
        self.in_body = False

    # -- asyncio ----------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse above the connection bound; no delay on small writes."""
        transport = cast("asyncio.Transport", transport)  # uvloop has a class of its own
        self._transport = transport
        made = transport.get_extra_info("socket")
        if made is not None:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._connections.add(self)
        if len(self._connections) > self._context.config.bounds.connections:
            self.request_id = new_request_id()
            self._answer_error(RequestError(503, "too many connections", code="connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: whatever runs for it ends."""
        self._connections.discard(self)
        flow, self.flow = self.flow, None
        if flow is not None:
            flow.cancel()

    def pause_writing(self) -> None:
        """The client reads slower than the worker writes."""
        if self.flow is not None:
            self.flow.pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        if self.flow is not None:
            self.flow.resume()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._closing:
            return
        if self.flow is not None:
            self._waiting += data
            if len(self._waiting) > PIPELINED_BYTES and self._transport is not None:
                self._transport.pause_reading()
            return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        if self.begun_at is None:
            self.begun_at = self._context.clock()
            self._bounds = self._context.config.bounds
        if self._parser is None:
            self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(data)
        except RequestError as error:
            self._answer_error(error)
            return
        except httptools.HttpParserUpgrade:
            self._answer_error(RequestError(400, "protocol upgrades are not supported"))
            return
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._answer_error(cause if isinstance(cause, RequestError) else RequestError(400, "malformed request"))
            return
        except httptools.HttpParserError as error:
            self._answer_error(RequestError(400, f"malformed HTTP request: {error}"))
            return
        if self._complete:
            self._dispatch(self._parser)

    # -- httptools --------------------------------------------------------------------------------------------------
    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if self._complete:
            raise RequestError(400, "pipelined requests are not read")
        self._url += url
        if len(self._url) > self._bounds.url_bytes:
            raise RequestError(414, f"the URL is longer than {self._bounds.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field; counted and checked, only a few are kept."""
        bounds = self._bounds
        self._header_count += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._header_count > bounds.header_count or self._header_bytes > bounds.header_bytes:
            raise RequestError(431, f"more than {bounds.header_count} header fields or {bounds.header_bytes} bytes of them")
        lower = name.lower()
        if lower not in LOOKED_AT:
            return
        if lower == b"host":
            self._hosts += 1
            if not HOST.match(value):
                raise RequestError(400, "the Host header is not a host")
        elif lower == b"x-request-id":
            if REQUEST_ID.match(value):
                self.request_id = value.decode()
                self.leg_id = f"{self.leg_id.partition('.')[0]}.{self.request_id}"
        elif lower == b"expect":
            if self._transport is not None:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        else:
            self._framing += check_framing(lower, value, bounds.body_bytes)

    def on_headers_complete(self) -> None:
        """Refuse what can be read in two ways before any body is kept."""
        self.in_body = True
        if self._hosts != 1:
            raise RequestError(400, "exactly one Host header is needed")
        if self._framing > 1:
            raise RequestError(400, "the body's length is given more than once")
        if self._parser is not None and self._parser.get_http_version() != "1.1":
            raise RequestError(505, "HTTP/1.1 is spoken here")

    def on_body(self, body: bytes) -> None:
        """A piece of body, without framing."""
        self._body_bytes += len(body)
        if self._body_bytes > self._bounds.body_bytes:
            raise RequestError(413, f"the body is larger than {self._bounds.body_bytes} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        """The request is whole; answered when the parser returns."""
        if self._complete:
            raise RequestError(400, "pipelined requests are not read")
        self._complete = True
        self._keep_alive = self._parser is None or self._parser.should_keep_alive()  # known only inside this callback

    # -- requests ---------------------------------------------------------------------------------------------------
    def _dispatch(self, parser: httptools.HttpRequestParser) -> None:
        method, path = parser.get_method(), self._url.split(b"?", 1)[0]
        try:
            if path in GENERATE:
                self._need(method == b"POST", 405, "POST is needed here")
                self._generate(path)
            elif path in PLAIN:
                self._need(method in (b"GET", b"HEAD"), 405, "GET is needed here")
                status, kind, body = self._plain(path)
                self._write_answer(status, body, kind, head_only=method == b"HEAD")
            else:
                raise RequestError(404, f"no such path: {path[:200].decode('latin-1')}")
        except RequestError as error:
            self._answer_error(error, keep_alive=True)

    @staticmethod
    def _need(condition: bool, status: int, message: str) -> None:
        if not condition:
            raise RequestError(status, message)

    def _generate(self, path: bytes) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        ask = parse_body(body, GENERATE[path], self._context.config)
        self._body = []
        self.begun_at = None
        self.flow = flow = Flow(self._context, self, path, ask)
        flow.begin()

    def _answer_error(self, error: RequestError, *, keep_alive: bool = False) -> None:
        self._context.metrics.requests[error.status] += 1
        self._write_answer(error.status, error_json(error, self.request_id), b"application/json", keep_alive=keep_alive)

    def _write_answer(self, status: int, body: bytes, kind: bytes, *, keep_alive: bool = True, head_only: bool = False) -> None:
        transport = self._transport
        if transport is None:
            return
        phrase = PHRASES.get(status, "Status")
        head = f"HTTP/1.1 {status} {phrase}\r\nx-request-id: {self.request_id}\r\ncontent-length: {len(body)}\r\n"
        if status == 503:
            head += f"retry-after: {RETRY_AFTER_S}\r\n"
        if not keep_alive:
            head += "connection: close\r\n"
        transport.write(head.encode() + b"content-type: " + kind + b"\r\n\r\n" + (b"" if head_only else body))
        if keep_alive:
            self._next_request()
        else:
            self._closing = True
            transport.close()

    def _next_request(self) -> None:
        """Ready for the next request of this connection, which may be waiting already."""
        keep = self._keep_alive
        self.flow = None
        self._reset()
        self.idle_since = self._context.clock()
        if self._transport is None:
            return
        if not keep:
            self._closing = True
            self._transport.close()
            return
        if self._waiting:
            data, self._waiting = bytes(self._waiting), bytearray()
            self._transport.resume_reading()
            self._feed(data)

    # -- the flow's side ------------------------------------------------------------------------------------------------
    def write(self, data: bytes) -> None:
        """Bytes of an answer: our head, then the body as the worker framed it."""
        if self._transport is not None:
            self._transport.write(data)

    def finish(self) -> None:
        """The answer is complete."""
        self._next_request()

    def refuse(self, error: RequestError) -> None:
        """No answer: tell why."""
        self._write_answer(error.status, error_json(error, self.request_id), b"application/json")

    def break_off(self, message: str, *, stream: bool) -> None:
        """The answer broke after its first byte: a stream gets an error event and no [DONE]; the connection closes."""
        transport = self._transport
        if transport is None:
            return
        self.flow = None
        self._closing = True
        if stream:
            event = b"data: " + error_json(RequestError(502, message), self.request_id) + b"\n\n"
            transport.write(f"{len(event):x}\r\n".encode() + event + b"\r\n0\r\n\r\n")
            transport.close()
        else:
            transport.abort()  # a shorter body than announced must not look like an end

    # -- deadlines --------------------------------------------------------------------------------------------------
    def sweep(self, now: float) -> None:
        """Called twice a second for every connection: one timer for all deadlines."""
        bounds = self._context.config.bounds
        if self.flow is not None:
            if now > self.flow.deadline:
                self.flow.expire()
        elif self.begun_at is not None:
            limit = bounds.body_deadline_s if self.in_body else bounds.header_deadline_s
            if now - self.begun_at > limit:
                self._answer_error(RequestError(408, f"the request was not complete within {limit} s"))
        elif now - self.idle_since > bounds.idle_s and self._transport is not None:
            self._closing = True
            self._transport.close()

    def close_when_idle(self) -> bool:
        """For shutdown: True when nothing runs here any more."""
        if self.flow is None and self._transport is not None:
            self._closing = True
            self._transport.close()
            return True
        return self.flow is None
