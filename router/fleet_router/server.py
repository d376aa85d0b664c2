"""The client side: one asyncio protocol per connection, with deadlines for everything that a client can keep us waiting for.

Requests of one connection are answered in order, one at a time; bytes that arrive meanwhile wait in a bounded buffer. While the
router drains, an answer is the last one of its connection and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import unquote

from fleet_router.admission.lanes import Entry
from fleet_router.admission.tenants import Decisions
from fleet_router.cascade.climb import Climb, flow_of
from fleet_router.closing import NEVER, Lingering, Taking, ask_if_there, close, is_paused, pause, reset_by_client, unread
from fleet_router.config import HttpBounds
from fleet_router.context import Context
from fleet_router.desk import one_of, usable
from fleet_router.dialect.routes import COUNTING, ask_of, error_body, names_of, translation_of
from fleet_router.dialect.translation import Translation
from fleet_router.ending import CONTINUE, END, framed
from fleet_router.errors import RequestError, leaving
from fleet_router.explain.route import ASKED as EXPLAIN
from fleet_router.explain.route import NOT_WATCHED, rights_of
from fleet_router.explain.route import answer as decisions
from fleet_router.flow import Flow
from fleet_router.gathering import WITHIN_S, Gathering
from fleet_router.heads import own_head
from fleet_router.hints import hints_of
from fleet_router.inbound import Inbound, Incoming
from fleet_router.listening import Listening, wait_of
from fleet_router.misplaced import check_port, need
from fleet_router.paths import DECISIONS, GENERATE, HELD, KINDS, KNOWN, MODELS, OF_ALL, ONE_MODEL, PLAIN, WATCHED, WITH_BODY
from fleet_router.receiving import HIGH_WATER_BYTES, NO_ROOM_TO_WAIT, TURN_MOST, WAITING_BYTES, Waiting
from fleet_router.request import parse_alone, parse_body

DRAIN_IDLE_S: Final = 1.0
"""How long an idle connection is kept while the router drains: a request may be on its way."""
NOBODY: Final = Incoming()
"""Stands for the request of a connection that has none."""


class ClientConnection:
    """One client connection: an asyncio.Protocol, but not by name, so that it compiles to a plain struct."""

    def __init__(
        self,
        context: Context,
        connections: set[ClientConnection],
        plain: Callable[[bytes], tuple[int, bytes, bytes]],
        *,
        admin: bool = False,
    ) -> None:
        self._context = context
        self._admin = admin
        """Of the port for probes and scrapes: it answers no requests for tokens."""
        self._connections = connections
        self._plain = plain
        self._transport: asyncio.Transport | None = None
        self._inbound = Inbound(context.heads, context.receiving)
        self._request = NOBODY
        """The one that is being answered, or was last."""
        self._waiting = Waiting(context.unread)
        self._translation: Translation | None = None
        """Of the request that is being answered."""
        self._half_closed = False
        """The client has said that it sends no more."""
        self._answering = False
        """`_answer_next` runs: whoever ends an answer below it must not run it again, or a packet of small requests recurses."""
        self._unread = self._yielded = False
        """The client does not take our answers: no new one is made. Other connections have a turn first."""
        self._taking = Taking()
        self._closed_at: float | None = None
        """When we closed; what is left to send may still be on its way."""
        self._lingering: Lingering | None = None
        """We closed before the client had sent all."""
        self.flow: Flow | Climb | Listening | Gathering | None = None
        self.begun_at: float | None = None
        """When the request that is being received began; None between requests."""
        self.idle_since = context.clock()

    @property
    def request_id(self) -> str:
        """What the client calls the request that is being answered."""
        return self._request.request_id

    @property
    def leg_id(self) -> str:
        """What workers call it."""
        return self._request.leg_id

    # -- asyncio ----------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Above the connection bound probes alone are answered. Small writes are not delayed: loops set TCP_NODELAY themselves,
        and asking for the socket to set it again took a tenth of what a new connection costs."""
        transport = cast("asyncio.Transport", transport)  # uvloop has a class of its own
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        context, there = self._context, len(self._connections)
        bounds = context.config.bounds
        if there < bounds.connections or not context.spares.take(transport, there, bounds, self._plain, admin=self._admin):
            self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: whatever runs for it ends."""
        self._connections.discard(self)
        self._transport = None
        self._inbound.drop()
        self._waiting.take()
        flow, self.flow = self.flow, None
        if flow is not None:
            flow.cancel()

    def eof_received(self) -> bool:
        """The client sends no more: it left, or only closed its half and still reads. 100 Continue finds out: one that left
        resets the connection, others pass over it (RFC 9110, 15.2); of one that leaves later its kernel is asked. Answers that
        are owed are given; half a request is told so, also to one who does not hear it."""
        self._half_closed = True
        self._context.outbox.flush()  # whoever closes behind us must not overtake an answer
        secure = self._transport is not None and self._transport.get_extra_info("sslcontext") is not None
        if self.flow is None:
            self._answer_next()
            while secure and self._yielded:  # there is no later turn
                self._go_on()
        elif not secure:
            ask_if_there(self._transport)
            if not self.flow.started:
                self.write(CONTINUE)
        if secure:
            # TLS has no half here: loops close it behind us, and what runs ends with it (without close_notify before they ask)
            self._context.outbox.flush()
            return False
        return self._transport is not None and self._closed_at is None

    def pause_writing(self) -> None:
        """The client reads slower than the worker writes."""
        self._unread = True
        self._taking = Taking()
        if self.flow is not None:
            self.flow.pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        self._unread = False
        if self.flow is not None:
            self.flow.resume()
        else:
            self._answer_next()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._closed_at is not None:
            if self._lingering is not None:
                self._lingering.read(len(data))
            return
        if self.flow is not None or self._unread or self._yielded:
            self._wait(data)
            return
        inbound, context = self._inbound, self._context
        request = inbound.again(data, context.config.bounds, context.wanted)
        if request is not None:
            self._answer(request)
        else:
            self._wait(inbound.feed(data, context.config.bounds, context.wanted))
            self._answer_next()

    def _wait(self, data: bytes) -> None:
        """Bytes that are read when what is before them was answered. Behind an error they never are, but to throw them away would
        be to take as many as the client sends, for as long as the answer before it takes."""
        if not data:
            return
        if not self._waiting.add(data, self._context.config.bounds.receiving_bytes):
            if self._inbound.error is None:
                self._inbound.refuse(RequestError(503, NO_ROOM_TO_WAIT, code="receiving"))
        elif len(self._waiting) <= WAITING_BYTES:
            return
        if self._transport is not None:
            pause(self._transport)

    # -- requests ---------------------------------------------------------------------------------------------------
    def _answer(self, request: Incoming) -> None:
        """One that came alone."""
        self._answering = True
        try:
            self._request = request
            self._dispatch(request)
        finally:
            self._answering = False
        if self.flow is None:
            self._answer_next()

    def _answer_next(self) -> None:
        """Answer what was received, in order, until something runs or nothing is whole."""
        if self._answering:
            return
        self._answering = True
        try:
            self._answer_all()
        finally:
            self._answering = False

    def _answer_all(self) -> None:
        inbound, left = self._inbound, TURN_MOST
        while self.flow is None and self._closed_at is None and self._transport is not None and not self._unread:
            if inbound.requests:
                if left == 0:
                    self._yielded = True
                    asyncio.get_running_loop().call_soon(self._context.desk.faults.run, self._go_on, self.fail)
                    return
                left -= 1
                self._request = inbound.requests.popleft()
                self.begun_at = None
                self._dispatch(self._request)
            elif inbound.error is not None:
                self._request = inbound.current or Incoming()
                self._answer_error(inbound.error)
            elif self._waiting:
                self._waiting.put_back(inbound.feed(self._waiting.take(), self._context.config.bounds, self._context.wanted))
                if len(self._waiting) <= WAITING_BYTES:
                    self._transport.resume_reading()
            else:
                self._wait_for_more()
                return

    def _go_on(self) -> None:
        """It is its turn again."""
        self._yielded = False
        self._answer_next()

    def _wait_for_more(self) -> None:
        """Nothing is whole."""
        if self._half_closed and self._inbound.current is not None:
            self._request = self._inbound.current
            self._answer_error(RequestError(400, "the request ended early: the client sends no more", reason="ended_early"))
        elif self._half_closed:
            self._close()
        elif self._inbound.current is not None:
            if self.begun_at is None:
                self.begun_at = self._context.clock()
            if self._inbound.in_body and not self._inbound.looked_at:
                self._begin_body(self._inbound.current)

    def _begin_body(self, request: Incoming) -> None:
        """Its head is whole, its body is not: of whom nobody knows it is not read, nor kept where nobody would look at it."""
        self._inbound.looked_at = True
        try:
            check_port(request.path, admin=self._admin)
            if request.path in WITH_BODY:
                self._context.desk.entry(request.key)
            else:
                self._inbound.pass_over()
        except RequestError as error:
            self._request = request
            self._refused(error, keep_alive=False)
            return
        if self._inbound.owes_continue:
            self.write(CONTINUE)

    def _refused(self, error: RequestError, *, keep_alive: bool) -> None:
        request, context = self._request, self._context
        tenant, path = context.desk.tenant_of(request.key), request.path if request.path in KNOWN else b""
        context.recorder.refused(request.request_id, path, tenant, error)
        self._answer_error(error, keep_alive=keep_alive)

    def _dispatch(self, request: Incoming) -> None:
        method, path = request.method, request.path
        try:
            check_port(path, admin=self._admin)
            if path in WITH_BODY:
                need(method, b"POST")
                self._generate(request, path)
            elif path == HELD:
                need(method, b"GET")
                self._check_may_watch(request)
                self._listen(request.url, wait_of(request.url))
            elif path == DECISIONS:
                need(method, b"GET")
                self._tell_decisions(request)
            elif path in PLAIN:
                need(method, b"GET", b"HEAD")
                self._check_may_watch(request, path)
                if path in OF_ALL and self._context.gather is not None:
                    self._gather(path)
                    return
                status, kind, body = self._plain(path)
                self._write_answer(status, self._usable(request, body) if path == MODELS else body, kind)
            elif path.startswith(ONE_MODEL):
                need(method, b"GET", b"HEAD")
                models = self._usable(request, self._plain(MODELS)[2])
                self._write_answer(200, one_of(models, unquote(path[len(ONE_MODEL) :].decode("latin-1"))), b"application/json")
            else:
                raise RequestError(404, f"no such path: {path[:200].decode('latin-1')}")
        except RequestError as error:
            self._refused(error, keep_alive=True)
        except Exception as error:  # a bug of ours: whoever asked is told, and other requests go on
            self._context.desk.faults.end(error, self._answer_error if self.flow is None else self.fail, request.request_id)

    def _usable(self, request: Incoming, models: bytes) -> bytes:
        """Those that the key may ask for; RequestError for a key that nobody has."""
        names = self._context.desk.entry(request.key).named.models
        return models if names is None else usable(models, names)

    def _check_may_watch(self, request: Incoming, path: bytes = HELD) -> None:
        """With tenants, only who may see all of them, and the router's own host; RequestError 401, 403."""
        if path not in WATCHED or self._admin or not self._context.desk.tenants_needed:
            return
        own_host = rights_of(False, "none", self._peer(), request.kept) == "all"
        if not own_host and self._context.desk.entry(request.key).decisions != "all":
            raise RequestError(403, NOT_WATCHED, code="metrics_not_allowed")

    def _peer(self) -> object:
        return self._transport.get_extra_info("peername") if self._transport is not None else None

    def _tell_decisions(self, request: Incoming) -> None:
        entry = self._context.desk.entry(request.key)
        rights = self._rights(entry, request)
        if self._context.gather is not None:
            self._gather(b"%b %b %b" % (request.url, rights.encode(), entry.account.name.encode()))
            return
        told = decisions(self._context.recorder, request.url, rights, entry.account.name, self._context.clock())
        self._write_answer(200, told, b"application/json")

    def _rights(self, entry: Entry, request: Incoming) -> Decisions:
        return rights_of(self._context.desk.tenants_needed, entry.decisions, self._peer(), request.kept)

    def _generate(self, request: Incoming, path: bytes) -> None:
        body, begins = request.take(apart=path not in GENERATE)
        desk = self._context.desk
        lane = desk.lane(request.key, request.slo_class)
        translation = None
        if path in GENERATE:
            ask = parse_body(body, GENERATE[path], lane.config, begins)
        elif (translation := translation_of(path, body, request.request_id)) is not None:
            translation.ends = self._context.ends
            path, ask = translation.path, ask_of(translation, lane.config)
        else:
            ask = parse_alone(body, lane.config, counts=path in COUNTING)
        self._translation = translation
        ask, ticket = desk.admit(lane, ask, request.slo_ttft_ms)
        try:
            hints = hints_of(self._context.config, lane.slo_class, request.kept) if request.kept else lane.hints
            self.flow = flow = flow_of(self._context, self, path, ask, ticket, translation, hints)
        except BaseException:
            desk.forget(ticket)
            raise
        if EXPLAIN in request.kept:
            flow.record.shown = self._rights(desk.entry(request.key), request) != "none"
        desk.start(ticket, flow)

    def _gather(self, url: bytes, wait_s: float = 0.0) -> None:
        if self._context.gather is not None:
            self.flow = Gathering(self, self._context.gather(url), self._context.clock() + wait_s + WITHIN_S)

    def _listen(self, url: bytes, wait_s: float) -> None:
        if self._context.gather is not None:
            self._gather(url, wait_s)
            return
        self.flow = listening = Listening(self._context.holding, self, self._context.clock, wait_s)
        listening.begin(wait_s)

    def tell(self, body: bytes, status: int = 200) -> None:
        """A short answer that was waited for."""
        self._write_answer(status, body, KINDS.get(self._request.url.partition(b"?")[0], b"text/plain"))
        self._answer_next()

    def _answer_error(self, error: RequestError, *, keep_alive: bool = False) -> None:
        self._context.metrics.requests[error.status] += 1
        body = error_body(self._request.url, error, self.request_id)
        self._write_answer(error.status, body, b"application/json", keep_alive=keep_alive, headers=error.headers)

    def _write_answer(self, status: int, body: bytes, kind: bytes, *, keep_alive: bool = True, headers: str = "") -> None:
        if self._transport is None:
            return
        keep_alive = keep_alive and self._request.keep_alive and not self._context.draining
        head = own_head(status, names_of(self._request.url, self.request_id), len(body), headers, kind, keep_alive=keep_alive)
        self.write(head if self._request.method == b"HEAD" else head + body)
        self._answered(keep_alive)

    def _answered(self, keep_alive: bool) -> None:
        """An answer is complete."""
        self.flow = self.begun_at = self._translation = None  # which has the whole request
        self._request.body.clear()  # of one that was refused, or should have had none: it would wait for the next request
        self.idle_since = self._context.clock()
        if not keep_alive:
            self._close()

    def _close(self, *, idle: bool = False) -> None:
        """What was written still goes out; what comes is nobody's. A client that asked for the end sends no more; any other may
        have sent before it hears of the end. `idle`: it has no request, and was not told."""
        self._closed_at = now = self._context.clock()
        dropped, waited = self._inbound.drop(), bool(self._waiting.take())
        more = (dropped or waited or self._request.keep_alive) and not self._half_closed
        if self._transport is not None:
            self._context.outbox.flush()
            self._lingering = close(self._transport, self._context.config.bounds, now, more=more, idle=idle)

    # -- the flow's side ------------------------------------------------------------------------------------------------
    @property
    def last_answer(self) -> bool:
        """The connection closes after this answer, which must say so."""
        return self._context.draining or not self._request.keep_alive

    def write(self, data: bytes) -> None:
        """Bytes of an answer: our head, then the body as the worker framed it."""
        if self._transport is not None:
            self._context.outbox.write(self._transport, data)

    def finish(self, *, last: bool) -> None:
        """The answer is complete; `last`: its head said that it is this connection's last one."""
        self._answered(not last)
        if self._waiting or self._inbound.requests or self._inbound.current or self._inbound.error or self._half_closed:
            self._answer_next()

    def refuse(self, error: RequestError) -> None:
        """No answer: tell why."""
        body = error_body(self._request.url, error, self.request_id)
        self._write_answer(error.status, body, b"application/json", headers=error.headers)
        self._answer_next()

    def break_off(self, error: RequestError, *, stream: bool, last: bool) -> None:
        """The answer broke after its first byte: a stream gets an error event and no [DONE], and then it is as whole as any other
        answer. Its client keeps the connection unless the head said otherwise (`last`), lest its next request meets a reset."""
        if stream and self._transport is not None:
            other, body = self._translation, error_body(self._request.url, error, self.request_id)
            self.write(framed(b"data: %b\n\n" % body if other is None else other.failed(error)) + END)
            self.finish(last=last or self._context.draining)
        else:
            self.flow = None
            self.abort()  # a shorter body than announced must not look like an end

    def abort(self) -> None:
        """Close at once: whoever is there does not read, or must not take what it got for whole."""
        self._closed_at = self._context.clock()
        if self._transport is not None:
            self._transport.abort()

    # -- deadlines --------------------------------------------------------------------------------------------------
    def sweep(self, now: float) -> None:
        """Called twice a second for every connection: one timer for all deadlines."""
        bounds = self._context.config.bounds
        taken_at = self._taking.last(self._transport, now) if self._unread or self._closed_at is not None else NEVER
        if self._closed_at is not None:
            if self._lingering is not None:
                self._lingering.sweep(now)
            if now - max(self._closed_at, taken_at) > bounds.stalled_client_s:
                self.abort()
        elif self.flow is not None:
            if (self._half_closed or is_paused(self._transport)) and reset_by_client(self._transport):
                self.abort()
            elif now > max(self.flow.deadline, taken_at + bounds.stalled_client_s):
                self.flow.expire(now)
        else:
            self._sweep_without_flow(now, bounds, taken_at)

    def _sweep_without_flow(self, now: float, bounds: HttpBounds, taken_at: float) -> None:
        if self._unread:
            if now - max(self.idle_since, taken_at) > bounds.stalled_client_s:
                self.abort()
        elif self.begun_at is not None:
            limit = bounds.body_deadline_s if self._inbound.in_body else bounds.header_deadline_s
            if now - self.begun_at > limit:
                self._request = self._inbound.current or Incoming()
                self._answer_error(RequestError(408, f"the request was not complete within {limit} s"))
        elif self._idle_for(now, bounds.idle_s, 0.0):
            self._close(idle=True)

    def _idle_for(self, now: float, most_s: float, since: float) -> bool:
        """So long without a request, and none has come that the loop has yet to tell of."""
        return now - max(since, self.idle_since) > most_s and (self._unread or not unread(self._transport))

    def fail(self, error: RequestError) -> None:
        """A bug of ours in what was done for it: its request is told so; the connection ends where it cannot be."""
        flow, told = self.flow, False
        try:
            if flow is not None:
                flow.cut(error)
                told = self.flow is not flow
        finally:
            if not told:
                self.abort()

    def drain(self, now: float, since: float) -> None:
        """Again and again while the router drains (since `since`): a connection without a request closes, but not at once."""
        if self.flow is None and self.begun_at is None and self._closed_at is None and self._idle_for(now, DRAIN_IDLE_S, since):
            self._close(idle=True)

    def cut(self) -> None:
        """The drain is over: nobody goes without an answer."""
        error = leaving()
        if self._closed_at is not None:
            self.abort()
        elif self.flow is not None:
            self.flow.cut(error)
        elif self.begun_at is not None or self._inbound.requests:
            self._request = self._inbound.first()
            self._answer_error(error)
        else:
            self._close()
