"""Connections to workers: pooled protocols that hand a worker's bytes on as they come.

A connection serves one leg at a time. The parser only watches for status, headers and the end of the answer; body bytes reach
the leg as they arrived, framing included, so that a streamed chunk costs one parse in C and one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final, Protocol, cast

import httptools

from fleet_router.answerhead import ENCODING, LENGTH, UNKNOWN, AnswerHead, KnownAnswer, LastHead
from fleet_router.errors import NO_ROOM, OURS
from fleet_router.flood import FLOOD_S, Flood
from fleet_router.outbox import Outbox, Written, write
from fleet_router.repeated import around_length, worth_learning
from fleet_wire.address import authority

IDLE_CONNECTIONS: Final = 128
CONNECT_TIMEOUT_S: Final = 3.0
CLOSED: Final = "the worker closed the connection"
"""How it is told that one broke, whatever was said on it."""
STRANGER: Final = "another pod has its address"
MAX_HEAD_BYTES: Final = 65_536
HEAD_END: Final = b"\r\n\r\n"
FRAMING: Final = {LENGTH, ENCODING}


INTERIM_AFTER: Final = (b"HTTP/1.1 ", b"HTTP/1.0 ")
SWITCHING: Final = b"101"
BEFORE_BYTES: Final = 64
OK: Final = 200
NOT_HTTP: Final = "the worker's answer is not HTTP: {}"
NOTHING_TOLD: Final = AnswerHead([])


def chunks_end(before: bytes, data: bytes) -> int:
    """Where in this read a chunked body ends that ends in it, behind which nothing but line breaks stands. `before`: bytes before
    the read."""
    breaks = len(data) - len(data.rstrip(b"\r\n"))
    if breaks == len(HEAD_END) < len(data):
        return len(data)
    whole = before + data
    return len(data) - max(0, len(whole) - len(whole.rstrip(b"\r\n")) - len(HEAD_END))


def bug_of(error: Exception) -> Exception:
    """What a parser's callback of ours raised, and else `error`."""
    found = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
    return found if isinstance(found, Exception) else error


class Leg(Protocol):
    """Who waits for a worker's answer."""

    takes_whole: bool
    """`on_whole` may be called instead of all others."""

    def on_whole(self, known: KnownAnswer, data: bytes, body_at: int) -> None:
        """The whole answer, with a head that came before."""

    def on_head(self, status: int, head: AnswerHead) -> None:
        """Status and headers are complete."""

    def on_head_alone(self) -> None:
        """Nothing of the body came with the head: whoever waits should see the head now."""

    def on_raw(self, data: bytes) -> None:
        """Body bytes with their transfer framing."""

    def on_body(self, data: bytes) -> None:
        """Body bytes without framing; only on a CollectingUpstream."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_surplus(self) -> None:
        """After `on_end`: something stood behind the answer's end. Nobody gets it, and the connection is closed."""

    def on_lost(self, reason: str) -> None:
        """The connection broke before that."""

    def on_fault(self, error: Exception) -> None:
        """A bug of ours in what was done with the answer: nothing is known against the worker."""


class Upstream:
    """One connection to one worker: an asyncio.Protocol, but not by name, so that it compiles to a plain struct."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._leg: Leg | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._told = NOTHING_TOLD
        self._head = b""
        self._in_head = True
        self._ended = self._more = False
        """The answer is whole; another message began behind it."""
        self._interim = 0
        """Bytes of interim answers before it."""
        self._left = UNKNOWN
        """Bytes of the body to come, where the head says how many."""
        self._before = b""
        """The last bytes before this read: the end of a body may have begun there."""
        self._keep_alive = False
        self._paused = False
        self._flood = Flood()
        self._outbox: Outbox | None = None
        self.used = False
        """Has been in the pool: the worker may have closed it meanwhile."""
        self.got_bytes = False
        self.idle_since = 0.0
        """When it was first seen idle since its last use; 0: not yet."""

    # -- asyncio ----------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Loops set TCP_NODELAY themselves: without it a first token would wait 40 ms for an acknowledgement."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop has a class of its own

    def connection_lost(self, exc: Exception | None) -> None:
        """An unfinished leg hears of it; an idle connection just leaves the pool."""
        if self._flood.bytes:
            self._read(self._flood.take(0.0))
        self._pool.forget(self)
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.on_lost(f"{CLOSED} ({exc or 'end of stream'})")

    def eof_received(self) -> bool:
        """The worker closed its half: so do we."""
        return False

    def pause_writing(self) -> None:
        """A request is small next to what a socket takes: nothing is held back."""

    def resume_writing(self) -> None:
        """See `pause_writing`."""

    def data_received(self, data: bytes) -> None:
        """Bytes from the worker."""
        if self._left < 0 and not self._in_head and self._leg is not None and self._outbox is not None:  # a body in chunks
            now = monotonic()
            if self._flood.holds(data, now):
                self._arm(self._outbox)
                return
            if self._flood.bytes:
                data = self._flood.take(now, data)
        self._read(data)

    def _arm(self, outbox: Outbox) -> None:
        if not self._flood.armed:
            self._flood.armed = True
            outbox.later(FLOOD_S, self._wait_over)

    def _wait_over(self) -> None:
        """What came thick and fast is handed on, unless its client does not read now."""
        self._flood.armed = False
        if self._flood.bytes and not self._paused:
            self._read(self._flood.take(monotonic()))

    def _read(self, data: bytes) -> None:
        leg, parser = self._leg, self._parser
        if leg is None or parser is None:
            self.abort()  # a worker that speaks unasked is not to be trusted
        else:
            try:
                if self._in_head:
                    self._begins(leg, parser, data)
                else:
                    self._goes_on(leg, parser, data)
            except Exception as error:  # out of a loop's hands it would look as if the worker had closed the connection
                if self._leg is None or self._leg is leg:  # and not the next request's already
                    self.abort()
                leg.on_fault(bug_of(error))

    def _begins(self, leg: Leg, parser: httptools.HttpResponseParser, data: bytes) -> None:
        """The head, or a part of it."""
        first, self.got_bytes = not self.got_bytes, True
        known = self._pool.known if first and leg.takes_whole else None
        if known is not None and 0 < (at := known.body_at(data)) < len(data):
            self._pool.misses = 0
            self._let_go()
            leg.on_whole(known, data, at)
            return
        try:
            body = self._feed_head(data, parser)
        except httptools.HttpParserCallbackError:
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(NOT_HTTP.format(error))
            return
        if body is None:
            return
        leg.on_head(parser.get_status_code(), self._told)
        if self._leg is not leg:
            return  # what it read made it give the connection up
        if self._ended:
            self._finish(surplus=bool(body))
        elif body:
            self._goes_on(leg, parser, body, data if first and not self._interim else b"")
        else:
            leg.on_head_alone()

    def _feed_head(self, data: bytes, parser: httptools.HttpResponseParser) -> bytes | None:
        """Collect the head and parse it; returns the body bytes behind it, None: it is not whole yet. Interim answers (RFC 9110,
        15.2) are passed over: we asked for nothing that they could tell us."""
        head = self._head + data if self._head else data
        while (at := head.find(HEAD_END)) >= 0 and head[:9] in INTERIM_AFTER and head[9:10] == b"1":
            if head[9:12] == SWITCHING:
                raise httptools.HttpParserError("it switches protocols, and nobody asked it to")
            self._interim += at + 4
            head = head[at + 4 :]
        if self._interim + (len(head) if at < 0 else 0) > MAX_HEAD_BYTES:
            raise httptools.HttpParserError(f"head longer than {MAX_HEAD_BYTES} bytes")
        if at < 0:
            self._head = head
            return None
        self._head, self._in_head = b"", False
        parser.feed_data(head[: at + 4])
        if parser.get_status_code() < OK:
            raise httptools.HttpParserError("its status line is odd")
        told = self._told = self._pool.last_head.of(self._headers)
        self._left = told.length
        if not (self._ended or told.is_framed):  # it would end where the worker closes: half of it would look whole to a client
            raise httptools.HttpParserError("it does not say where its body ends")
        return head[at + 4 :]

    def _goes_on(self, leg: Leg, parser: httptools.HttpResponseParser, data: bytes, came: bytes = b"") -> None:
        """Bytes of the body. `came`: the read that they are of, when it began with a head that may be learnt."""
        left, surplus = self._left, False
        if left >= 0:
            if len(data) > left:
                data, surplus = data[:left], True
            self._left = left - len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            if not self._ended:
                self._fail(NOT_HTTP.format(error))
                return
            self._more = True
        if not self._ended:
            if left < 0:
                self._before = data if len(data) >= BEFORE_BYTES else (self._before + data)[-BEFORE_BYTES:]
            leg.on_raw(data)
        else:
            self._ends(leg, data, surplus, came)

    def _ends(self, leg: Leg, data: bytes, surplus: bool, came: bytes) -> None:
        """The last bytes of the body. `surplus`: others behind them were cut off."""
        if self._left < 0:
            if self._more:  # who goes on behind the end of a stream may have ended it too early: it is carried on
                self._fail(NOT_HTTP.format("something stands behind its end"))
                return
            end = chunks_end(self._before, data)
            data, surplus = data[:end], end < len(data)
        leg.on_raw(data)
        if self._leg is None:
            return  # what it read made it give the connection up
        if came and not surplus and self._keep_alive and self._parser is not None and self._parser.get_status_code() == OK:
            self._pool.learn(came, self._headers)
        self._finish(surplus=surplus)

    def _finish(self, *, surplus: bool) -> None:
        """`surplus`: something came behind the end. It goes to nobody, and who knows what the next answer would be."""
        leg = self._leg
        if self._keep_alive and not surplus:
            self._let_go()
        else:
            self.abort()
        if leg is not None:
            leg.on_end()
            if surplus:
                leg.on_surplus()

    def _let_go(self) -> None:
        """The answer is whole, and another one may follow it."""
        self._leg = None
        self._before = b""
        if self._paused:  # the client may not have read it all yet, but whoever is next must hear the worker
            self.resume()
        self._pool.put(self)

    def _fail(self, reason: str) -> None:
        leg, self._leg = self._leg, None
        self.abort()
        if leg is not None:
            leg.on_lost(reason)

    # -- httptools --------------------------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        if not self._ended:
            self._headers.append((name, value))

    def on_message_begin(self) -> None:
        """Also of one that stands behind the answer."""
        self._more = self._ended

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._ended:
            return  # of another message behind it
        self._ended = True
        self._keep_alive = self._parser is not None and self._parser.should_keep_alive()  # known only inside this callback

    # -- use --------------------------------------------------------------------------------------------------------
    def send(self, leg: Leg, payload: Written, outbox: Outbox | None = None) -> None:
        """Write one request; `leg` hears the answer. `outbox` None: at once."""
        self._leg = leg
        self._headers = []
        self._head = self._before = b""
        self._in_head, self._ended, self._more, self.got_bytes = True, False, False, False
        self._left, self._interim = UNKNOWN, 0
        self.idle_since = 0.0
        self._outbox = outbox
        self._flood.forget()
        if self._parser is None:  # one per connection: it only ever carries on after an answer that was whole
            self._parser = httptools.HttpResponseParser(self)
        if self.transport is None:
            return
        if outbox is not None:
            outbox.write(self.transport, payload)
        else:
            write(self.transport, payload)

    @property
    def ended(self) -> bool:
        """The answer is whole: there is nothing behind the bytes that were handed on last."""
        return self._ended

    @property
    def sized(self) -> bool:
        """The head says how long the body is."""
        return self._left >= 0

    def is_open(self) -> bool:
        """May be written to."""
        return self.transport is not None and not self.transport.is_closing()

    def pause(self) -> None:
        """Back-pressure: the client reads slower than the worker writes. Once the answer is whole this is nobody's any more."""
        if self._leg is not None and self.transport is not None and self.is_open():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """The client caught up."""
        if self.transport is not None and self.is_open():
            self._paused = False
            self.transport.resume_reading()
            if self._flood.bytes and self._outbox is not None:
                self._arm(self._outbox)

    def goes_to(self, leg: Leg) -> None:
        """Somebody else hears the answer, of which nothing has come. It is read for, whoever was not before."""
        self._leg = leg
        if self._paused:
            self.resume()

    def abandon(self, leg: Leg) -> None:
        """Whoever hears the answer wants no more of it; nothing where that is somebody else, or the answer is whole."""
        if self._leg is leg:
            self.abort()

    def abort(self) -> None:
        """Close at once; the worker sees a client that left. The leg hears nothing more."""
        self._leg = None
        self._flood.forget()
        if self.transport is not None:
            self.transport.abort()


class CollectingUpstream(Upstream):
    """A connection whose legs read the answer. Only where needed: a callback per chunk costs more than the parsing of it."""

    def on_body(self, body: bytes) -> None:
        """A piece of body without framing."""
        if self._leg is not None and not self._ended:
            self._leg.on_body(body)


OnConnection = Callable[[Upstream | None, str], None]
Proven = Callable[[], Awaitable[bool]]


class Pool:
    """Connections to one worker."""

    def __init__(self, address: str, port: int, kind: type[Upstream] = CollectingUpstream, proven: Proven | None = None) -> None:
        """`proven` is asked after each connect: whether the worker that was meant is the one that answers at the address."""
        self._proven = proven
        self.address = address
        self.port = port
        self._kind = kind
        self.authority = authority(address, port).encode()
        self._idle: list[Upstream] = []
        self._retired = False
        self.known: KnownAnswer | None = None
        """The head that the worker gave last, to compare with."""
        self.last_head = LastHead()
        self.misses = 0
        """Answers in a row that had another one."""
        self.closed_by_peer = 0
        """Connections that the worker, or its end, closed."""
        self._connecting: set[asyncio.Task[None]] = set()

    def take(self, then: OnConnection, *, fresh: bool = False) -> None:
        """An idle connection at once, or a new one later; `then` gets (connection, "") or (None, why)."""
        connection = None if fresh else self.idle()
        if connection is not None:
            then(connection, "")
            return
        task = asyncio.get_running_loop().create_task(self._connect(then))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def idle(self) -> Upstream | None:
        """A connection that can be used at once."""
        while self._idle:
            connection = self._idle.pop()
            transport = connection.transport
            if transport is not None and not transport.is_closing():
                return connection
        return None

    def learn(self, answer: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """A 200 that came in one piece: the next one may have the same head."""
        self.misses += 1
        if worth_learning(self.misses):
            framing = [name for name, _ in headers if name.lower() in FRAMING]
            around = around_length(answer) if len(framing) == 1 else None
            self.known = KnownAnswer(around, headers) if around is not None else None

    async def _connect(self, then: OnConnection) -> None:
        loop, connection = asyncio.get_running_loop(), self._kind(self)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: cast("asyncio.Protocol", connection), self.address, self.port)
        except OSError as error:  # a timeout is one, too
            then(None, NO_ROOM if error.errno in OURS else f"cannot connect: {str(error) or 'timeout'}")
            return
        if not await self.proven():
            connection.abort()
            then(None, STRANGER)
            return
        if not connection.is_open():  # it died while its agent was asked: nobody would hear of what is sent on it
            then(None, "cannot connect: closed at once")
            return
        then(connection, "")

    async def proven(self) -> bool:
        """The worker that was meant is the one that answers at the address, as far as anybody says: asked after each connect."""
        return self._proven is None or await self._proven()

    def put(self, connection: Upstream) -> None:
        """Back into the pool, unless that is full or the worker is gone."""
        connection.used = True
        if self._retired or len(self._idle) >= IDLE_CONNECTIONS:
            connection.abort()
        else:
            self._idle.append(connection)

    def expire(self, now: float, idle_s: float) -> None:
        """Called now and then: close what has been idle for so long. Its other end, or what stands between, would some day, and
        the first request after that would find out."""
        for connection in list(self._idle):
            if not connection.idle_since:
                connection.idle_since = now
            elif now - connection.idle_since > idle_s:
                self._idle.remove(connection)
                connection.abort()

    def forget(self, connection: Upstream) -> None:
        """A connection that closed."""
        if connection in self._idle:
            self.closed_by_peer += 1
            self._idle.remove(connection)

    def retire(self) -> None:
        """The worker left the endpoints: idle connections close now, busy ones when their answer ends."""
        self._retired = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()
