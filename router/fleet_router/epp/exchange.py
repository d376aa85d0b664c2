"""One HTTP exchange as ext_proc shows it: request in, decision out, answer passed on while its bytes are counted.

A gateway sends headers and body of a request and waits; in the protocol's own mode (FULL_DUPLEX_STREAMED) headers and body go on
together when the decision is made, in BUFFERED the headers go first and the decision comes with the body. What the gateway does
not show of the answer cannot be learnt from: without its body no token times, and a request counts as over when its head came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import unquote

from fleet_router.admission.lanes import Entry
from fleet_router.context import Context
from fleet_router.desk import models_of, one_of, usable
from fleet_router.dialect.routes import ALONE, COUNTING, TRANSLATED
from fleet_router.epp import answers
from fleet_router.epp.answers import Header
from fleet_router.epp.messages import BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX, NONE, STREAMED
from fleet_router.epp.picked import FULL, OWN, Picked, address_of
from fleet_router.errors import RequestError
from fleet_router.explain.route import ASKED
from fleet_router.explain.shown import header as decision_header
from fleet_router.hints import hints_of, kept_of
from fleet_router.inbound import ASKED_BY, REQUEST_ID, Incoming, asked_by, check_framing
from fleet_router.paths import GENERATE, MODELS, ONE_MODEL, WITH_BODY
from fleet_router.receiving import NO_ROOM, fewer
from fleet_router.request import parse_alone, parse_body
from fleet_router.workers import Worker

BODILESS = frozenset({b"GET", b"HEAD", b"OPTIONS"})
"""A POST without a body is none of OpenAI's, but engines have some: /sleep, /reset_prefix_cache."""
READING = frozenset({b"GET", b"HEAD"})
PREFLIGHT = b"access-control-request-method"
"""By this header a browser asks whether it may ask, and it does so without a key, whatever its page would send."""
ENCODING = b"content-encoding"
HEALTH = b"/health"
"""This, and models, may be asked without a body. What else engines answer (/metrics, /server_info) tells of others' requests."""
SUBSET, SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
SERVED_KEY = "x-gateway-destination-endpoint-served"
OVERLOADED = "x-envoy-overloaded"
"""Envoy answers with it what is above its own bounds (`circuit_breakers`) or what it sheds: no worker was asked."""


class Exchange:
    """The gateway's side of one request. `gateway`: whose it is; `telling`: those that say who served, and so take several
    endpoints for a request; None: this one takes one, whatever it says. Others take a list for one address (Envoy's ORIGINAL_DST,
    with which Envoy AI Gateway goes by the header), and find nobody there."""

    def __init__(self, context: Context, gateway: str = "", telling: set[str] | None = None) -> None:
        self._context = context
        self._gateway = gateway
        self._telling = set[str]() if telling is None else telling
        self._request = Incoming()
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._comes = True
        """There is more of the request to come, for all that is known."""
        loop, self._limit_s = asyncio.get_running_loop(), context.config.bounds.body_deadline_s
        self._until = loop.time() + self._limit_s
        """When the request is to be whole, and an answer without a decision over."""
        self._modes = (FULL_DUPLEX, FULL_DUPLEX)
        self._subset: frozenset[str] | None = None
        self._preflight = False
        self._decided: asyncio.Future[tuple[list[Worker], bytes] | RequestError | None] = loop.create_future()
        """None: nobody waits for it any more."""
        self._messages: AsyncIterator[Any] | None = None
        self._ahead: asyncio.Future[Any] | None = None
        """The next message, where it is looked for before the decision."""
        self.flow: Picked | None = None

    # -- Client, Gateway ------------------------------------------------------------------------------------------------
    @property
    def request_id(self) -> str:
        """What the client calls the request."""
        return self._request.request_id

    @property
    def leg_id(self) -> str:
        """What workers call it."""
        return self._request.leg_id

    @property
    def last_answer(self) -> bool:
        """Connections are the gateway's."""
        return False

    def picked(self, workers: list[Worker], body: bytes) -> None:
        """The decision."""
        if not self._decided.done():
            self._decided.set_result((workers, body))

    def refuse(self, error: RequestError) -> None:
        """There will be none."""
        if not self._decided.done():
            self._decided.set_result(error)

    def write(self, data: bytes) -> None:
        """The answer's bytes are the gateway's."""

    def finish(self, *, last: bool) -> None:
        """The answer is whole."""

    def break_off(self, error: RequestError, *, stream: bool, last: bool) -> None:
        """The gateway sees for itself that the worker broke."""

    def abort(self) -> None:
        """The gateway has its own bounds for clients that do not read."""

    # -- ext_proc -------------------------------------------------------------------------------------------------------
    async def answers(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """What to say to each message."""
        self._messages = messages
        while True:
            try:
                message = await self._next(messages)
            except RequestError as error:
                yield self._refused(error)
                return
            match None if message is None else message.WhichOneof("request"):
                case "response_headers" | "response_body" | "response_trailers" as kind:
                    yield self._shown(kind, message)
                case None:
                    return
                case kind:
                    async for said in self._guarded(kind, message):
                        yield said

    async def _guarded(self, kind: str, message: Any) -> AsyncIterator[Any]:
        """A bug of ours is told as one: a call that only fails is let in by a gateway that fails open."""
        try:
            async for said in self._said(kind, message):
                yield said
        except Exception as error:
            found: list[RequestError] = []
            self._context.desk.faults.end(error, found.append, self.request_id)
            self.fail(found[0])
            yield self._refused(found[0])

    def _said(self, kind: str, message: Any) -> AsyncIterator[Any]:
        """What to say to a part of the request."""
        match kind:
            case "request_headers":
                return self._headers(message)
            case "request_body":
                return self._piece(message.request_body)
        return self._trailers()

    async def _next(self, messages: AsyncIterator[Any]) -> Any:
        """None: there are no more, or nothing is expected any more of a call that would be held as long as its gateway likes.
        RequestError where the rest of a body does not come, as gateways wait for it for ever."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return await ahead
        if self.flow is not None:
            return await anext(messages, None)
        try:
            async with asyncio.timeout_at(self._until):
                return await anext(messages, None)
        except TimeoutError:
            if not (self._comes and self._request.method):
                return None
            raise RequestError(408, f"the request was not complete within {self._limit_s} s") from None

    async def _headers(self, message: Any) -> AsyncIterator[Any]:
        try:
            self._read(message)
            if not message.request_headers.end_of_stream:
                self._context.desk.entry(self._request.key)  # of whom nobody knows no body is kept
                self._refuse_endless()
        except RequestError as error:
            yield self._refused(error)
            return
        if message.request_headers.end_of_stream:
            self._comes = False
            yield self._pick_any()
        elif self._modes[0] == BUFFERED:
            yield answers.passed("request_headers")

    def _refuse_endless(self) -> None:
        """RequestError for what is not served and may have no end: WebSocket, CONNECT. Of models is told by key alone."""
        request = self._request
        if request.method != b"POST" and not request.url.startswith(ONE_MODEL) and not self._is_ours():
            raise RequestError(404, "not served behind a gateway")

    def _read(self, message: Any) -> None:
        """RequestError for what is not served here."""
        request, wanted, encoding = self._request, self._context.wanted, b"identity"
        if message.HasField("protocol_config"):
            self._modes = (message.protocol_config.request_body_mode, message.protocol_config.response_body_mode)
        for one in message.request_headers.headers.headers:
            name, value = one.key.lower().encode(), one.raw_value or one.value.encode()
            if name == b":path":
                request.url = value
            elif name == b":method":
                request.method = value
            elif name == PREFLIGHT:
                self._preflight = True
            elif name == b"x-request-id" and REQUEST_ID.match(value):
                request.request_id = value.decode()
                request.leg_id = f"{request.leg_id}.{request.request_id}"
            elif name in ASKED_BY:
                asked_by(request, name, value)
            elif name == ENCODING:
                encoding = value
            if name in wanted and (kept := kept_of(name, value)) is not None:
                request.kept = {**request.kept, name: kept}
        self._subset = _subset(message)
        self._check_body(encoding, comes=not message.request_headers.end_of_stream)

    def _check_body(self, encoding: bytes, *, comes: bool) -> None:
        """RequestError for one that is not read as it comes."""
        check_framing(ENCODING, encoding, 0)
        if comes and self._modes[0] not in (FULL_DUPLEX, BUFFERED):
            raise RequestError(500, "the gateway must send request bodies FULL_DUPLEX_STREAMED or BUFFERED", code="gateway_mode")

    def _pick_any(self, buffered: bytes | None = None) -> Any:
        """A request without a body: any worker that decodes, but for models, which workers tell of without asking who may use
        which. A browser's preflight has no key: engines answer it from what they allow to every origin."""
        try:
            if self._request.method not in BODILESS:
                raise RequestError(404, "not served behind a gateway: a request that changes something has a body")
            allowed = self._preflight and self._request.method == b"OPTIONS"
            entry = None if allowed else self._context.desk.entry(self._request.key)
            if entry is not None and self._request.method in READING and (models := self._models(entry)) is not None:
                return answers.told(models, self.request_id)
            if not self._is_ours():
                raise RequestError(404, "not served behind a gateway: without a body /v1/models and /health are")
            found = self._context.table.candidates(self._context.clock(), frozenset())["decode"]
            usable = [worker for worker in found if self._subset is None or address_of(worker) in self._subset]
            if not usable:
                raise RequestError(503, "no decode worker is serving")
        except RequestError as error:
            return self._refused(error)
        return answers.picked(address_of(min(usable, key=lambda worker: worker.inflight)), [], buffered=buffered)

    def _models(self, entry: Entry) -> bytes | None:
        """Those that the key may use, or the one that is asked for (404: it may not, or there is none); None: not asked for."""
        path, context = self._request.url.split(b"?", 1)[0], self._context
        if path != MODELS and not path.startswith(ONE_MODEL):
            return None
        names, found = entry.named.models, models_of(context.config, context.table.adapters())
        if names is not None:
            found = usable(found, names)
        return found if path == MODELS else one_of(found, unquote(path[len(ONE_MODEL) :].decode("latin-1")))

    def _is_ours(self) -> bool:
        """A path of the API: models by name only, so that nothing hides behind `..`; of the others what a browser asks first."""
        path, config = self._request.url.split(b"?", 1)[0], self._context.config
        if path.startswith(ONE_MODEL):
            return unquote(path[len(ONE_MODEL) :].decode("latin-1")) in {config.served_name, *config.adapters}
        return path in {MODELS, HEALTH} or (self._request.method == b"OPTIONS" and path in {*GENERATE, *ALONE})

    async def _piece(self, piece: Any) -> AsyncIterator[Any]:
        if not self._comes:
            return
        if (error := self._keep(piece.body)) is not None:
            yield self._refused(error)
            return
        if piece.end_of_stream or self._modes[0] == BUFFERED:  # which comes at once, and trailers only when it was answered
            async for said in self._decide(end=True):
                yield said

    def _keep(self, data: bytes) -> RequestError | None:
        """A piece of the body; why it is not kept."""
        before, bounds = self._body_bytes, self._context.config.bounds
        size = before + len(data)
        if size > bounds.body_bytes:
            return RequestError(413, f"the body is larger than {bounds.body_bytes} bytes")
        if not self._context.receiving.room(before, size, bounds.receiving_bytes):
            self._body_bytes = 0
            return RequestError(503, NO_ROOM, code="receiving")
        self._body.append(data)
        self._body, self._body_bytes = fewer(self._body, size), size
        return None

    def _taken(self) -> bytes:
        """The body, which is no longer kept here."""
        body, self._body = b"".join(self._body), []
        self._context.receiving.bytes -= self._body_bytes
        self._body_bytes = 0
        return body

    async def _trailers(self) -> AsyncIterator[Any]:
        """Where there are any, no piece of a body was the last one."""
        if self._comes:
            async for said in self._decide(end=False):
                yield said
        yield answers.passed("request_trailers")

    async def _decide(self, *, end: bool) -> AsyncIterator[Any]:
        """The request is whole; `end`: nothing comes behind its body."""
        self._comes = False
        body = self._taken()
        if not body and self._request.method in BODILESS:
            for said in self._without_body(end=end):
                yield said
            return
        try:
            self._begin(body)
        except RequestError as error:
            yield self._refused(error)
            return
        if (found := await self._decided) is None:
            return
        for said in [self._refused(found)] if isinstance(found, RequestError) else self._told(*found, end=end):
            yield said

    def _without_body(self, *, end: bool) -> Iterator[Any]:
        """It has an empty one, of which its head could not tell."""
        said = self._pick_any(b"" if self._modes[0] == BUFFERED else None)
        yield said
        if said.HasField("request_headers"):
            yield from answers.pieces(b"", end=end)

    def _begin(self, body: bytes) -> None:
        context, request = self._context, self._request
        path = request.url.split(b"?", 1)[0]
        if request.method != b"POST" or path not in {*GENERATE, *ALONE}:
            other = " (the router itself speaks it)" if path in TRANSLATED else ""
            raise RequestError(404, f"not served behind a gateway{other}")
        lane = context.desk.lane(request.key, request.slo_class)
        if path in ALONE:
            ask = parse_alone(body, lane.config, counts=path in COUNTING)
        else:
            ask = parse_body(body, GENERATE[path], lane.config)
        ask, ticket = context.desk.admit(lane, ask, request.slo_ttft_ms)
        try:
            hints = hints_of(context.config, lane.slo_class, request.kept)
            self.flow = flow = Picked(context, self, path, ask, ticket, hints, self._subset)
        except BaseException:
            context.desk.forget(ticket)
            raise
        flow.record.shown = ASKED in request.kept and context.desk.entry(request.key).decisions != "none"
        context.desk.start(ticket, flow)

    def _told(self, workers: list[Worker], body: bytes, *, end: bool) -> Iterator[Any]:
        onward = self.flow.record.onward if self.flow is not None else b""
        headers = [*answers.sent(self.leg_id, len(body)), *answers.lines_of(onward)]
        destinations = ",".join(address_of(worker) for worker in (workers if self._gateway in self._telling else workers[:1]))
        if self._modes[0] == BUFFERED:
            yield answers.picked(destinations, headers, buffered=body)
            return
        yield answers.picked(destinations, headers)
        yield from answers.pieces(body, end=end)

    def _refused(self, error: RequestError) -> Any:
        self._comes = False
        self._taken()
        if self.flow is None:  # else its record tells
            path = self._request.url.split(b"?", 1)[0]
            self._context.metrics.requests[error.status] += 1
            known = path if path in WITH_BODY else b""
            self._context.recorder.refused(self.request_id, known, self._context.desk.tenant_of(self._request.key), error)
        return answers.refused(error, self._request.url, self.request_id)

    # -- the answer -----------------------------------------------------------------------------------------------------
    def _shown(self, kind: str, message: Any) -> Any:
        """What to say to a part of the answer. After a bug of ours it goes on as it is, and we count no more of it."""
        headers = [("x-request-id", self.request_id.encode())] if self.flow is not None else list[Header]()
        try:
            match kind:
                case "response_headers":
                    headers = self._answer_head(message)
                case "response_body":
                    self._count_piece(message.response_body)
                case _:
                    self._count_end()
        except Exception as error:
            self._context.desk.faults.end(error, self.fail, self.request_id)
        match kind:
            case "response_headers":
                return answers.answer_head(headers)
            case "response_body" if self._modes[1] not in (BUFFERED, STREAMED):
                return answers.answer_piece(message.response_body.body, end=message.response_body.end_of_stream)
        return answers.passed(kind)

    def _answer_head(self, message: Any) -> list[Header]:
        """Headers to add to it."""
        flow, headers = self.flow, list[Header]()
        if flow is not None and not flow.done:
            status, found = _head_of(message)
            if self._modes[1] in (BUFFERED, BUFFERED_PARTIAL):
                flow.collects()
            served = _served(message)
            flow.served(served, status, self._unasked(served, status, found))
            now_ns = int(self._context.clock() * 1e9)
            headers = answers.lines_of(flow.lane.account.headers(now_ns))
            headers.append(("x-request-id", self.request_id.encode()))
            if flow.record.shown:
                headers += answers.lines_of(decision_header(flow.record))
            if message.response_headers.end_of_stream or self._modes[1] == NONE:  # it shows us no more of it
                flow.end()
        return headers

    def _unasked(self, served: str, status: int, found: dict[str, bytes]) -> str:
        """Why no worker can have said so; empty: one may have. Who says who served says so of each answer of a worker."""
        if not served and status != answers.OK and self._gateway in self._telling:
            return OWN
        (self._telling.add if served else self._telling.discard)(self._gateway)
        return FULL if OVERLOADED in found else ""

    def _count_piece(self, piece: Any) -> None:
        if self.flow is not None and not self.flow.done and piece.body:
            self.flow.raw(piece.body)
        if piece.end_of_stream:
            self._count_end()

    def _count_end(self) -> None:
        if self.flow is not None and not self.flow.done:  # what stood in its last piece may have ended it
            self.flow.end()

    # -- ends -----------------------------------------------------------------------------------------------------------
    def sweep(self, now: float) -> None:
        """Twice a second."""
        if self.flow is not None and not self.flow.done and now > self.flow.deadline:
            self.flow.expire(now)
        if self.flow is not None and not self._decided.done() and self._ahead is None and self._messages is not None:
            self._ahead = asyncio.ensure_future(anext(self._messages, None))
            self._ahead.add_done_callback(self._came_first)

    def _came_first(self, ahead: asyncio.Future[Any]) -> None:
        """Before the decision: an answer of the gateway's own, or the end of its side: a client left. Neither needs one."""
        if self.flow is None or self._decided.done() or ahead.cancelled() or ahead.exception() is not None:
            return
        message = ahead.result()
        if message is None or message.HasField("response_headers"):
            self._decided.set_result(None)
            self.flow.left(0 if message is None else _head_of(message)[0])

    def cut(self, error: RequestError) -> None:
        """The router goes: where nothing is decided yet, nothing will be."""
        if self.flow is not None and not self._decided.done():
            self.flow.cut(error)

    def fail(self, error: RequestError) -> None:
        """A bug of ours in what was done for it."""
        if self.flow is not None and not self.flow.done:
            self.flow.cut(error)

    def gone(self) -> None:
        """The gateway has ended the exchange."""
        if self._ahead is not None:
            self._ahead.cancel()
        self._taken()
        if self.flow is not None and not self.flow.done:
            self.flow.cancel()


def _subset(message: Any) -> frozenset[str] | None:
    """Endpoints that may be picked; None: all."""
    found = message.metadata_context.filter_metadata
    if SUBSET not in found or SUBSET_KEY not in found[SUBSET].fields:
        return None
    given = found[SUBSET].fields[SUBSET_KEY]
    values = [value.string_value for value in given.list_value.values] or given.string_value.split(",")
    return frozenset(value.strip() for value in values if value.strip())


def _head_of(message: Any) -> tuple[int, dict[str, bytes]]:
    """Status and headers of an answer."""
    found = {one.key: one.raw_value or one.value.encode() for one in message.response_headers.headers.headers}
    return int(found.get(":status", b"0")), found


def _served(message: Any) -> str:
    """Who answered, where the gateway says so."""
    found = message.metadata_context.filter_metadata
    return str(found[answers.NAMESPACE].fields[SERVED_KEY].string_value) if answers.NAMESPACE in found else ""
