"""Bytes of a client connection to whole requests: httptools for parsing, everything bounded before it is kept.

A message that could be read in two ways (two lengths, length and chunks, folded headers, no or two Host headers) is an error.
Several requests in one packet come out in order; after an error nothing more is read.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final
from uuid import uuid4

import httptools

from fleet_router.admission.keys import MAX_KEY_BYTES, bearer
from fleet_router.ask import APART_BYTES
from fleet_router.config import HttpBounds
from fleet_router.errors import RequestError
from fleet_router.hints import kept_of
from fleet_router.receiving import NO_ROOM, Receiving, fewer
from fleet_router.repeated import Repeated, around_length, usual_parts, worth_learning

HOST: Final = re.compile(rb"^[A-Za-z0-9._\-]+(:\d{1,5})?\Z|^\[[0-9a-fA-F:.]+\](:\d{1,5})?\Z")
ABSOLUTE: Final = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
OFFER: Final = re.compile(rb"(?<=\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
NO_OFFER: Final = b"x-offer"
"""As long as what it replaces."""
REQUEST_ID: Final = re.compile(rb"^[A-Za-z0-9._\-]{1,128}\Z")
LOOKED_AT: Final = frozenset({b"host", b"content-length", b"transfer-encoding", b"x-request-id", b"content-encoding", b"expect"})
ASKED_BY: Final[frozenset[bytes]] = frozenset({b"authorization", b"x-api-key", b"x-slo-class", b"x-slo-ttft-ms"})
"""Headers that say who asks and how urgently; none of them goes to a worker."""
KEPT: Final = LOOKED_AT | ASKED_BY
NOTHING_KEPT: Final[dict[bytes, bytes]] = {}
SLICE_BYTES: Final = 4_096
"""So much is parsed at once, but for a body that says how long it is."""
AHEAD_MOST: Final = 16
"""With so many requests whole, no more are parsed: one takes ten times its bytes."""
AHEAD_BYTES: Final = 65_536
"""Nor when one is whole and so much was parsed: bodies of whole requests are counted by nobody."""
CLASS_MOST_BYTES: Final = 253
"""Of a class's name: none is longer."""
HEADS_MOST: Final = 256
"""Of connections' first requests; 2 MB at most."""
_PROCESS: Final = uuid4().hex[:16]
_BYTES: Final = [f"{byte:02x}" for byte in range(256)]


class _Numbers:
    """Request ids: random once, then counted, for a random number per request costs a system call. Formatted two bytes at a time:
    Python's own formatting takes four times as long."""

    __slots__ = ("_before", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._before = ""
        """All but the last four digits."""

    def next(self) -> str:
        """32 hexadecimal digits."""
        number = self._next
        self._next = number + 1
        low = number & 0xFFFF
        if low == 0:
            self._before = f"{_PROCESS}{number >> 16:012x}"
        return self._before + _BYTES[low >> 8] + _BYTES[low & 255]


_NUMBERS: Final = _Numbers()


def new_request_id() -> str:
    """Unlike any other in any process."""
    return _NUMBERS.next()


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


def origin_form(target: bytes) -> bytes:
    """Path and query of a target that may be written with scheme and host before them (RFC 9112, 3.2.2); other targets as they
    are. That host takes the place of Host, which must be there all the same and counts for nothing. RequestError for no host."""
    found = ABSOLUTE.fullmatch(target)
    if found is None:
        return target
    if not HOST.match(found[1]):
        raise RequestError(400, "what the target names before its path is not a host")
    rest: bytes = found[2]
    return rest if rest.startswith(b"/") else b"/" + rest


def _without_offer(data: bytes) -> bytes:
    """Whoever offers another protocol is answered in this one (RFC 9110, 7.8; Java's client offers h2c with every request): the
    field gets another name, for the parser would stop behind the head. Only in a head that begins with these bytes and is whole;
    after the offer of one that is not, and of a second request in one packet, the connection ends with an error."""
    end = data.find(b"\r\n\r\n")
    if end < 0 or OFFER.search(data, 0, end) is None:
        return data
    return OFFER.sub(NO_OFFER, data[:end]) + data[end:]


class Incoming:
    """One request, whole or still being received."""

    __slots__ = (
        "begins", "body", "keep_alive", "kept", "key", "leg_id", "method", "path", "request_id", "slo_class", "slo_ttft_ms",
        "url",
    )  # fmt: skip

    def __init__(self) -> None:
        self.request_id = self.leg_id = new_request_id()
        self.method = b""
        """Empty until the headers are complete."""
        self.url = b""
        self.path = b""
        """Of `url`; a head that comes again has the same."""
        self.body: list[bytes] = []
        self.begins = 0
        """Where the body does in `body`: before a long one stands its head, so that it need not be copied."""
        self.keep_alive = False
        self.key = b""
        """API key, as it came; nobody but admission looks at it."""
        self.slo_class = b""
        self.kept: dict[bytes, bytes] = NOTHING_KEPT
        """Headers that routing goes by, by lower-case name."""
        self.slo_ttft_ms = 0
        """The client needs its first token within so many ms; 0: it does not say."""

    def take(self, *, apart: bool) -> tuple[bytes, int]:
        """The body, which is kept here no longer, and where it begins. `apart`: nothing is to stand before it."""
        pieces, self.body, begins = self.body, [], self.begins
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return (body[begins:], 0) if apart and begins else (body, begins)


def asked_by(request: Incoming, name: bytes, value: bytes) -> None:
    """A header of ASKED_BY. RequestError for what could be read in two ways."""
    if name == b"x-slo-class":
        value = value[: CLASS_MOST_BYTES + 1]  # as for keys
        if request.slo_class not in (b"", value):
            raise RequestError(400, "two different classes", param="x-slo-class")
        request.slo_class = value
    elif name == b"x-slo-ttft-ms":
        if not (value.isdigit() and len(value) < 10 and int(value) > 0):
            raise RequestError(400, f"x-slo-ttft-ms must be a number of milliseconds, 1 to {10**9 - 1}", param="x-slo-ttft-ms")
        if request.slo_ttft_ms not in (0, int(value)):
            raise RequestError(400, "two different budgets", param="x-slo-ttft-ms")
        request.slo_ttft_ms = int(value)
    elif key := bearer(value) if name == b"authorization" else value:
        key = key[: MAX_KEY_BYTES + 1]  # a longer one is nobody's, and would stay as long as its connection
        if request.key not in (b"", key):
            raise RequestError(400, "two different API keys")
        request.key = key


class Known(Repeated):
    """The head of a request that was read, and what it says. The request is used again: the one before it is over."""

    __slots__ = ("bounds", "request", "wanted")

    def __init__(self, around: tuple[bytes, bytes], request: Incoming, bounds: HttpBounds, wanted: frozenset[bytes]) -> None:
        super().__init__(around[0], around[1])
        self.request, self.bounds, self.wanted = request, bounds, wanted


class Heads:
    """What connections of this process began with lately: who makes a connection for each request sends the same head each time.

    They are found by Python's hash of bytes, which is keyed with a secret of the process, and compared only where all 64 bits are
    the same: how long it takes tells nobody how another client's key begins. Heads of other bounds are forgotten.
    """

    __slots__ = ("_bounds", "_requests", "_wanted")

    def __init__(self) -> None:
        self._bounds, self._wanted = HttpBounds(), frozenset[bytes]()
        self._requests: dict[tuple[bytes, bytes], Incoming] = {}

    def find(self, data: bytes, bounds: HttpBounds, wanted: frozenset[bytes]) -> Known | None:
        """The head of a connection's first packet, ready to be compared with."""
        if not self._requests or self._bounds is not bounds or self._wanted is not wanted:
            return None
        parts = usual_parts(data)
        request = self._requests.get((parts[0], parts[2])) if parts is not None else None
        if request is None or parts is None:
            return None
        known = Known((parts[0], parts[2]), same_head(request), bounds, wanted)
        known.look_for(len(parts[1]), len(parts[0]) + len(parts[1]))
        return known

    def put(self, known: Known, around: tuple[bytes, bytes]) -> None:
        """A connection's first head was read."""
        if self._bounds is not known.bounds or self._wanted is not known.wanted or len(self._requests) >= HEADS_MOST:
            self._bounds, self._wanted, self._requests = known.bounds, known.wanted, {}
        self._requests[around] = same_head(known.request)


def same_head(request: Incoming) -> Incoming:
    """Another request with this head and no body."""
    same = Incoming()
    same.method, same.url, same.path = request.method, request.url, request.path
    same.keep_alive, same.key = request.keep_alive, request.key
    same.slo_class, same.slo_ttft_ms, same.kept = request.slo_class, request.slo_ttft_ms, request.kept
    return same


class Inbound:
    """The parser of one connection and what it has read."""

    __slots__ = (
        "_body_bytes",
        "_bounds",
        "_framing",
        "_head_bytes",
        "_header_bytes",
        "_header_count",
        "_heads",
        "_held_bytes",
        "_hosts",
        "_length",
        "_misses",
        "_parser",
        "_receiving",
        "_wanted",
        "current",
        "error",
        "in_body",
        "keeps",
        "known",
        "looked_at",
        "owes_continue",
        "requests",
    )  # fmt: skip

    def __init__(self, heads: Heads | None = None, receiving: Receiving | None = None) -> None:
        self._heads, self._receiving = heads, receiving
        """Of the process."""
        self._held_bytes = 0
        """Of the body of `current`, as `receiving` knows them."""
        self._parser: httptools.HttpRequestParser | None = None
        self.known: Known | None = None
        """The head that came last, where it may come again."""
        self._misses = 0
        self._bounds, self._wanted = HttpBounds(), frozenset[bytes]()
        self._framing = self._hosts = self._length = 0
        """Headers that say how long the body is, Host headers, and that length: 0 where none was told."""
        self.requests: deque[Incoming] = deque()
        """Whole requests that nobody has taken yet; they came in one packet."""
        self.current: Incoming | None = None
        """The request that is being received."""
        self.error: RequestError | None = None
        """What is wrong with `current`: the answer after those of `requests`, and the last one."""
        self.in_body = self.looked_at = False
        """The head of `current` is whole; whether it was asked who sends it, which others do."""
        self.keeps = True
        """The body of `current` is of use to somebody."""
        self._head_bytes = self._body_bytes = 0
        """Of the head of `current` so far, or of what stands between and behind the chunks of its body (-1 in the packet in which
        it begins), and of that body."""
        self.owes_continue = False
        """The client of `current` waits for 100 Continue before it sends the body."""

    def feed(self, data: bytes, bounds: HttpBounds, wanted: frozenset[bytes] = frozenset()) -> bytes:
        """Read; never raises. `wanted`: headers to keep, by lower-case name. Returns what was not read, because enough requests
        wait already: it is to come again when nobody waits for these any more."""
        begins = self.current is None
        if begins:
            self._bounds, self._wanted = bounds, wanted  # those that hold when a request begins hold to its end
        parsed = _without_offer(data) if begins else data
        rest = self._parse_slices(parsed) if len(parsed) > SLICE_BYTES else self._parse(parsed)
        if self.current is not None or self._held_bytes:
            self._count_kept(self._body_bytes if self.current is not None and self.error is None and self.keeps else 0)
        if begins and len(self.requests) == 1 and self.current is None and self.error is None and not rest:
            self._learn(data, self.requests[0])
        return rest

    def _parse_slices(self, data: bytes) -> bytes:
        """Packets may hold thousands of requests. Returns what is left of them."""
        at = 0
        while at < len(data) and self.error is None:
            whole = len(self.requests)
            if whole >= AHEAD_MOST or (whole and at >= AHEAD_BYTES):
                return data[at:]
            left = self._length - self._body_bytes if self.in_body and not whole else 0
            until = at + max(SLICE_BYTES, left)
            self._parse(data[at:until])
            at = until
        return b""

    def again(self, data: bytes, bounds: HttpBounds, wanted: frozenset[bytes]) -> Incoming | None:
        """The request in `data` where it has the same head as the one before, or as others of the process began with, and its
        whole body: nothing is to be parsed. None for all others; `feed` is for these."""
        known = self.known
        if known is None and self._parser is None and self._heads is not None:
            known = self.known = self._heads.find(data, bounds, wanted)
        if known is None or self.current is not None or self.requests or self.error is not None:
            return None
        at = known.body_at(data)
        if not at or known.bounds is not bounds or known.wanted is not wanted or len(data) - at > bounds.body_bytes:
            return None
        request = known.request
        request.request_id = request.leg_id = new_request_id()
        apart = len(data) <= APART_BYTES
        request.body, request.begins = [data[at:] if apart else data], 0 if apart else at
        self._misses = 0
        return request

    def drop(self) -> bool:
        """The connection ends: nothing of what came is kept. Whether there was something that nobody answers, or that goes on."""
        found = self.error is not None or self.current is not None or bool(self.requests)
        if self.current is not None:
            self.current.body = []
        self._count_kept(0)
        self.requests.clear()
        self.current = None
        return found

    def first(self) -> Incoming:
        """Whose turn it is, whole or in part."""
        return self.requests.popleft() if self.requests else self.current or Incoming()

    def _count_kept(self, size: int) -> None:
        """So many bytes are kept of a body that goes on."""
        before, self._held_bytes = self._held_bytes, size
        receiving = self._receiving
        if receiving is not None and size != before and not receiving.room(before, size, self._bounds.receiving_bytes):
            self._held_bytes = 0
            self._fail(RequestError(503, NO_ROOM, code="receiving"))

    def _learn(self, data: bytes, request: Incoming) -> None:
        """A request that came in one packet. One that has a name of its own is not repeated."""
        self._misses += 1
        if not worth_learning(self._misses):
            return
        around = around_length(data) if self._framing == 1 and request.leg_id == request.request_id else None
        self.known = None
        if around is not None and request.keep_alive:
            self.known = Known(around, request, self._bounds, self._wanted)
            if self._misses == 1 and self._heads is not None:
                self._heads.put(self.known, around)

    def pass_over(self) -> None:
        """Nobody reads this body: its bytes are counted to its end, and not kept."""
        self.keeps = False
        if self.current is not None:
            self.current.body = []
        self._count_kept(0)

    def refuse(self, error: RequestError) -> None:
        """Nothing more is read: an error that is told behind what is whole, and the last answer."""
        self._fail(error)
        self._count_kept(0)

    def _parse(self, data: bytes) -> bytes:
        """All of it: nothing is left."""
        if self._parser is None:
            self._parser = httptools.HttpRequestParser(self)
        had = self._body_bytes
        try:
            self._parser.feed_data(data)
            if self.current is not None:
                self._count_fields(len(data), had)
        except httptools.HttpParserUpgrade:
            # The parser took the request for whole, without its body.
            self.current = self.requests.pop() if self.requests else None
            self._fail(RequestError(400, "protocol upgrades are not supported"))
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._fail(cause if isinstance(cause, RequestError) else RequestError(400, "malformed request"))
        except httptools.HttpParserError as error:
            self._fail(RequestError(400, f"malformed HTTP request: {error}"))
        return b""

    def _count_fields(self, size: int, had: int) -> None:
        """The parser keeps a field until it is whole, however long it grows, and copies it each time: what comes in packets after
        the one in which the request began is counted, behind the head what comes without a byte of the body. `had`: its bytes
        before this packet."""
        if self.in_body and self._body_bytes != had:
            self._head_bytes = 0
        elif self._head_bytes >= 0:
            self._head_bytes += size
            if self._head_bytes > self._bounds.header_bytes + self._bounds.url_bytes:
                self._fail(RequestError(431, f"more than {self._bounds.header_bytes} bytes of header fields"))
        else:
            self._head_bytes = 0

    def _fail(self, error: RequestError) -> None:
        self.error = error
        if self.current is None:
            self.on_message_begin()
        else:
            self.current.body = []  # nobody reads it, and the connection may linger

    # -- httptools --------------------------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """A request begins."""
        self.current = Incoming()
        self._hosts = self._framing = self._length = self._header_count = self._header_bytes = self._body_bytes = 0
        self.in_body = self.looked_at = self.owes_continue = False
        self.keeps = True
        self._head_bytes = -1

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        current = self.current
        if current is None:
            return
        current.url = current.url + url if current.url else url
        if len(current.url) > self._bounds.url_bytes:
            raise RequestError(414, f"the URL is longer than {self._bounds.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field, or one behind a chunked body; counted and checked, only a few are kept."""
        self._count_field(len(name) + len(value) + 4)
        if self.in_body:
            return  # a trailer says nothing of how the request is framed, routed or whose it is (RFC 9110, 6.5.1)
        lower = name.lower()
        if lower in self._wanted:
            self._keep(lower, value)
        if lower not in KEPT:
            return
        if lower == b"host":
            self._hosts += 1
            if not HOST.match(value):
                raise RequestError(400, "the Host header is not a host")
        elif lower == b"x-request-id":
            self._name(value)
        elif lower == b"expect":
            self.owes_continue = True
        elif lower in ASKED_BY:
            if self.current is not None:
                asked_by(self.current, lower, value)
        else:
            self._framing += check_framing(lower, value, self._bounds.body_bytes)
            self._length = int(value) if lower == b"content-length" and value.isdigit() else self._length

    def _count_field(self, size: int) -> None:
        """The first one tells that the target is whole."""
        bounds = self._bounds
        self._header_count += 1
        self._header_bytes += size
        if self._header_count > bounds.header_count or self._header_bytes > bounds.header_bytes:
            raise RequestError(431, f"more than {bounds.header_count} header fields or {bounds.header_bytes} bytes of them")
        if self._header_count == 1 and self.current is not None and not self.current.url.startswith(b"/"):
            self.current.url = origin_form(self.current.url)

    def _keep(self, lower: bytes, value: bytes) -> None:
        """For routing, and for who may see what: there it counts that it was forwarded, however long the way was."""
        current, kept = self.current, kept_of(lower, value)
        if current is not None and kept is not None:
            current.kept = {**current.kept, lower: kept}

    def _name(self, value: bytes) -> None:
        current = self.current
        if current is not None and REQUEST_ID.match(value):
            current.request_id = value.decode()
            current.leg_id = f"{current.leg_id.partition('.')[0]}.{current.request_id}"

    def on_headers_complete(self) -> None:
        """Refuse what can be read in two ways before any body is kept."""
        self.in_body = True
        parser, current = self._parser, self.current
        if parser is None or current is None:
            return
        current.method, current.path = parser.get_method(), current.url.split(b"?", 1)[0]
        if (version := parser.get_http_version()) != "1.1":  # before Host, which it needs not have
            raise RequestError(505, f"HTTP/{version} is not served: send HTTP/1.1 (in nginx: proxy_http_version 1.1)")
        if self._hosts != 1:
            raise RequestError(400, "exactly one Host header is needed")
        if self._framing > 1:
            raise RequestError(400, "the body's length is given more than once")

    def on_body(self, body: bytes) -> None:
        """A piece of body, without framing."""
        self._body_bytes += len(body)
        if self._body_bytes > self._bounds.body_bytes:
            raise RequestError(413, f"the body is larger than {self._bounds.body_bytes} bytes")
        if self.current is not None and self.keeps:
            pieces = self.current.body
            pieces.append(body)
            self.current.body = fewer(pieces, self._body_bytes)

    def on_message_complete(self) -> None:
        """The request is whole."""
        current, self.current = self.current, None
        if current is not None and self._parser is not None:
            current.keep_alive = self._parser.should_keep_alive()  # known only inside this callback
            self.requests.append(current)
        self.in_body = self.owes_continue = False
