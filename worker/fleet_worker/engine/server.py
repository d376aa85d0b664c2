"""HTTP surface of the torch engine: vLLM's routes and shapes over starlette."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.config import STEP_TIMEOUT_ENV, STEP_TIMEOUT_S, WorkerConfig
from fleet_worker.connections import LAST, is_too_long
from fleet_worker.engine import protocol as wire
from fleet_worker.engine.adapters import Adapters
from fleet_worker.engine.answer import Answer
from fleet_worker.engine.core import EngineCore, Output
from fleet_worker.engine.errors import (
    BadRequestError,
    EngineError,
    EngineLeavingError,
    TooLargeError,
    UnknownModelError,
)  # fmt: skip
from fleet_worker.engine.inflight import InFlight
from fleet_worker.engine.loop import EngineLoop, Item
from fleet_worker.engine.lora import Adapter
from fleet_worker.engine.metrics import EngineMetrics
from fleet_worker.engine.reader import Reader
from fleet_worker.engine.reading import Read, Terms, What, read_request, tell
from fleet_worker.engine.seedroute import seed
from fleet_worker.engine.sequence import Defaults, Sequence
from fleet_worker.engine.text import Text
from fleet_worker.transfer.base import KvError, KvReferenceError

METRICS_TIMEOUT_S = 2.0
SMALL_BYTES = 4_096
"""Parsed and tokenised within about 2 ms; a thread costs a tenth of that."""
LARGE_BYTES = 256 * 1024
"""What is larger is read by another process, one at a time (`reader.py`): a thread holds the interpreter's lock over it."""
MAX_SMALL_BYTES = 64 * 1024
"""Of bodies that name something: an adapter, a lease."""
MAX_REQUEST_ID = 128
T = TypeVar("T")
ROUTED = re.compile(r"^[0-9a-f]{32}\.")
"""How a router's name for a request begins when the client has a name of its own for it."""


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /kv/release."""

    lease_id: str = ""
    request_id: str = ""


class EngineServer:
    """Handlers; one instance per process."""

    def __init__(
        self, config: WorkerConfig, loop: EngineLoop, text: Text, metrics: EngineMetrics, token: str = "",
        step_timeout_s: float = STEP_TIMEOUT_S, defaults: Defaults = wire.NEUTRAL,
    ) -> None:  # fmt: skip
        """`token`: who shows it may load and unload adapters; empty: nobody. A step longer than `step_timeout_s` is stuck."""
        self._config = config
        self._adapters = Adapters(config.served_name, config.adapters.most, config.adapters.max_rank, token)
        self._loop = loop
        self._text = text
        self._metrics = metrics
        self._step_timeout_s, self._defaults = step_timeout_s, defaults
        self._random = random.SystemRandom()
        self._inflight = InFlight(self._routes())
        self._reader = Reader(text.folder, text.digest)
        self._is_leaving = False
        self._collected: asyncio.Future[None] | None = None
        """What the engine was asked to collect, for everybody who asks meanwhile."""

    def app(self) -> ASGIApp:
        """All routes."""
        return self._inflight

    def leave(self) -> None:
        """No new request from now on; the agent hears of it by /metrics, and drains."""
        self._is_leaving = True

    def holds(self) -> bool:
        """Requests or leases are left. Read in this order: a lease is granted before its request's end is told."""
        return self._inflight.open > 0 or self._leases_open() > 0

    def close(self) -> None:
        """End the process that reads large bodies."""
        self._reader.close()

    def _routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/kv/leases", self.leases),
                Route("/kv/release", self.release, methods=["POST"]),
                Route("/kv/seed", self.seed, methods=["POST"]),
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _refused},
        )

    # -- small routes -----------------------------------------------------------------------------------------------
    async def health(self, _: HttpRequest) -> Response:
        """200 while the engine thread lives, and it and the KV transfers come to the end of their steps."""
        if self._loop.failure is not None:
            return Response(status_code=503)
        connector = self._loop.core.connector
        turn_s = connector.turn_s() if connector else 0.0
        lasting = {"step of the engine": self._loop.step_s(), "turn of the KV transfers": turn_s}
        for what, lasts_s in lasting.items():
            if lasts_s > self._step_timeout_s:
                words = f"a {what} lasts {lasts_s:.0f} s; {STEP_TIMEOUT_ENV} allows {self._step_timeout_s:g} s\n"
                return PlainTextResponse(words, status_code=503)
        return Response(status_code=200)

    async def metrics(self, _: HttpRequest) -> Response:
        """Totals are collected between two steps; how many requests and leases are open is known at any time."""
        told = await self._collect()
        requests_open = self._inflight.open
        if not told:
            self._metrics.collect_overdue(self._loop.core, requests_open)
        self._metrics.collect_outside(requests_open, self._leases_open(), is_leaving=self._is_leaving)
        return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _: HttpRequest) -> Response:
        """The model that is served, and the adapters over it."""
        card = {
            "id": self._config.served_name, "object": "model", "created": 0, "owned_by": "inferencefleet",
            "max_model_len": self._loop.core.limits.max_model_len,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [card, *self._adapters.cards()]})

    async def load_adapter(self, request: HttpRequest) -> Response:
        """POST /v1/load_lora_adapter."""
        model = self._loop.core.model
        try:
            self._adapters.allow(request)
            return await self._adapters.load(await self._body(request, MAX_SMALL_BYTES), model.config, model.dtype)
        except EngineError as error:
            return failure(error, request_id_of(request))

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """POST /v1/unload_lora_adapter."""
        try:
            self._adapters.allow(request)
            return await self._adapters.unload(await self._body(request, MAX_SMALL_BYTES), self._loop)
        except EngineError as error:
            return failure(error, request_id_of(request))

    async def leases(self, _: HttpRequest) -> Response:
        """Open leases, counted."""
        return JSONResponse({"open": self._leases_open()})

    def _leases_open(self) -> int:
        return self._loop.core.requests_leases()

    async def release(self, request: HttpRequest) -> Response:
        """Give back what nobody will read: one lease by its id, or all that was asked for under one x-request-id."""
        connector = self._loop.core.connector
        try:
            given = msgspec.json.decode(await self._body(request, MAX_SMALL_BYTES), type=Release)
        except (*UNREADABLE, EngineError) as error:
            return failure(BadRequestError(f"lease_id or request_id: {error}", "lease_id"), request_id_of(request))
        if given.request_id:
            asked = given.request_id[:MAX_REQUEST_ID]
            self._loop.give_back(lambda request_id: request_id.rpartition("-")[0] == asked)
            return JSONResponse({"released": True})
        return JSONResponse({"released": bool(connector and connector.release(given.lease_id))})

    async def seed(self, request: HttpRequest) -> Response:
        """POST /kv/seed, for the agent alone."""
        try:
            self._adapters.allow(request)
            return await seed(await self._body(request, MAX_SMALL_BYTES), self._loop)
        except EngineError as error:
            return failure(error, request_id_of(request))

    async def _collect(self) -> bool:
        """False: the engine is in a step that lasts, or has stopped; its totals are those of before."""
        if self._collected is None or self._collected.done():
            loop = asyncio.get_running_loop()
            done = self._collected = loop.create_future()

            def run(core: EngineCore) -> None:
                self._metrics.collect(core)
                loop.call_soon_threadsafe(_resolve, done)

            self._loop.call(run)
        answered, _ = await asyncio.wait({self._collected}, timeout=METRICS_TIMEOUT_S)
        return bool(answered)

    async def tokenize(self, request: HttpRequest) -> Response:
        """POST /tokenize."""
        return await self._told(request, "tokenize")

    async def detokenize(self, request: HttpRequest) -> Response:
        """POST /detokenize."""
        return await self._told(request, "detokenize")

    async def _told(self, request: HttpRequest, what: What) -> Response:
        try:
            written = await self._read(await self._body(request), what, tell)
        except EngineError as error:
            return failure(error, request_id_of(request))
        return Response(written, media_type="application/json")

    async def embeddings(self, request: HttpRequest) -> Response:
        """POST /v1/embeddings: routers pass it on to every engine, and not every engine has them."""
        words = "embeddings are not served: this fleet's engine is torch, which generates text only"
        return failure(BadRequestError(words), request_id_of(request))

    # -- generation -------------------------------------------------------------------------------------------------
    async def completions(self, request: HttpRequest) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, "completion")

    async def chat(self, request: HttpRequest) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, "chat")

    async def _generate(self, http: HttpRequest, what: What) -> Response:
        try:
            if self._is_leaving:
                raise EngineLeavingError("this worker goes: it takes no new request")
            read = await self._read(await self._body(http), what, read_request)
            asked, sequence = read.asked, self._sequence(read, http.headers.get("x-request-id"))
            sink = self._loop.submit(sequence)
            answer = Answer(asked, sequence, self._text, asked.model)
            async with self._ends_with(http, sequence, sink):
                first = await self._next(sequence, sink)
                whole = None if asked.stream else await self._whole(answer, sink, first)
        except (EngineError, KvError) as error:
            return failure(error, request_id_of(http))
        if whole is None:
            stream = self._stream(answer, sink, first, request_id_of(http))
            return TokenStream(stream, lambda: None if answer.is_told else self._loop.abandon(sequence.request_id))
        if sequence.keep_for_remote:
            await _settled()
            if await http.is_disconnected():
                self._loop.abandon(sequence.request_id)
        return whole

    async def _body(self, request: HttpRequest, most: int = wire.MAX_BODY_BYTES) -> bytes:
        parts, size = [], 0
        if is_too_long(request, most):
            raise TooLargeError(f"the body is larger than {most} bytes")
        try:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise TooLargeError(f"the body is larger than {most} bytes")
                parts.append(part)
        except ClientDisconnect as error:
            raise BadRequestError("the client left") from error
        return b"".join(parts)

    def _sequence(self, read: Read, request_id: str | None) -> Sequence:
        asked, kv = read.asked, read.kv
        adapter = self._adapter(asked.model)  # it may have been unloaded meanwhile; from here on nothing waits
        limits = self._loop.core.limits
        room, most = max(1, limits.max_model_len - read.count), self._config.max_output_tokens
        sampling = wire.sampling_of(asked, room, most, self._defaults)
        if kv.do_remote_decode:
            decoded = wire.sampling_of(wire.decode_leg_of(asked, kv), room, most, self._defaults)
            self._loop.core.check_fits(read.count, decoded.max_tokens)
            self._loop.core.check_can_sample(decoded)
        self._loop.core.check_fits(read.count, sampling.max_tokens)
        number = f"{self._random.getrandbits(64):016x}"
        chosen = f"{request_id[:MAX_REQUEST_ID]}-{number}" if request_id else number  # without a name, nobody can give it back
        seed = sampling.seed if sampling.seed is not None else self._random.getrandbits(48)
        salt, prompt = asked.cache_salt or "", tuple(read.tokens)
        arrived_at, keep = time.monotonic(), kv.do_remote_decode
        return Sequence(chosen, prompt, sampling, seed, arrived_at, keep, read.reference, adapter, salt, read.said_at)

    async def _read(self, raw: bytes, what: What, function: Callable[[bytes, What, Text, Terms], T]) -> T:
        """What `function` makes of a body, which takes as long as its bytes do: of small ones here, of others in a thread, of
        large ones in another process, because this loop streams everybody's answers."""
        served = (self._config.served_name, *self._adapters.names())
        terms = Terms(served, self._loop.core.vocab_size, self._loop.core.limits.max_model_len)
        if len(raw) <= SMALL_BYTES:
            return function(raw, what, self._text, terms)
        found = await self._reader.read(raw, what, terms) if len(raw) > LARGE_BYTES else None
        if found is not None:
            return cast(T, found)  # the same function ran there
        return await asyncio.to_thread(function, raw, what, self._text, terms)

    def _adapter(self, model: str) -> Adapter | None:
        adapter = self._adapters.find(model)
        if adapter is None and model != self._config.served_name:
            raise UnknownModelError(f"The model `{model[: wire.MAX_TOLD]}` does not exist.", "model")
        return adapter

    @contextlib.asynccontextmanager
    async def _ends_with(self, http: HttpRequest, sequence: Sequence, sink: asyncio.Queue[Item]) -> AsyncIterator[None]:
        """A client that leaves ends its request: one task listens for that beside the tokens, which cost nothing more by it. A
        TokenStream listens for itself."""

        async def listen() -> None:
            message = await http.receive()
            while message["type"] != "http.disconnect":
                await asyncio.sleep(0)  # a server that has always something to say must not stop everybody else
                message = await http.receive()
            self._loop.cancel(sequence.request_id)
            sink.put_nowait(BadRequestError("the client left"))

        listening = asyncio.create_task(listen())
        try:
            yield
        finally:
            listening.cancel()

    async def _next(self, sequence: Sequence, sink: asyncio.Queue[Item]) -> Output:
        """The next token, or what there is instead: errors before the first one still get their status."""
        try:
            item = await sink.get()
        except BaseException:
            self._loop.cancel(sequence.request_id)
            raise
        if isinstance(item, Exception):
            raise item
        return item

    async def _whole(self, answer: Answer, sink: asyncio.Queue[Item], first: Output) -> Response:
        output = first
        while not self._take(answer, output):
            output = await self._next(answer.sequence, sink)
        return JSONResponse(answer.body())

    async def _stream(self, answer: Answer, sink: asyncio.Queue[Item], first: Output, request_id: str) -> AsyncIterator[bytes]:
        item: Item = first
        if answer.is_chat:
            yield event(answer.opening())
        while True:
            if isinstance(item, Exception):
                yield event(error_of(item, request_id)[1])  # and no [DONE]
                return
            ended = self._take(answer, item)
            yield event(answer.chunk(ended))
            if ended:
                break
            item = await sink.get()
        if answer.wants_usage:
            yield event(answer.usage_chunk())
        yield b"data: [DONE]\n\n"
        if answer.sequence.keep_for_remote:
            await _settled()  # ended here when the client is gone
        answer.is_told = True

    def _take(self, answer: Answer, output: Output) -> bool:
        """Add one output to the answer; True when it was the last."""
        now = time.monotonic()
        self._metrics.token(answer.sequence, now)
        ended = answer.add(output)
        if ended and output.finish is None:  # a stop string ended it: the engine does not know yet
            self._loop.complete(answer.sequence.request_id)
        if ended:
            self._metrics.finished(answer.sequence, now)
        return ended


class TokenStream(StreamingResponse):
    """A stream that ends its request however it ends: also when the client left before the generator had begun, because a
    generator that never began has no `finally`."""

    def __init__(self, content: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _refused(request: HttpRequest, error: Exception) -> Response:
    """No such path or method; starlette would say so in plain text, which clients of OpenAI's API do not read."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    body = wire.error_body(f"{request.method} {request.url.path[:200]}: no such route", "BadRequestError", status)
    body["error"]["request_id"] = request_id_of(request)
    return JSONResponse(body, status_code=status, headers=getattr(error, "headers", None))


async def _settled() -> None:
    """A client's end that came in the same turn as the last token is known afterwards: the connection hears of it in the next
    turn, and who listens in the one after."""
    for _ in range(2):
        await asyncio.sleep(0)


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def event(body: dict[str, Any]) -> bytes:
    """One SSE event."""
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def error_of(error: Exception, request_id: str) -> tuple[int, dict[str, Any]]:
    """(status, body) of an error; the unexpected says nothing about our insides."""
    status, body = _plain_error(error)
    body["error"]["request_id"] = request_id
    return status, body


def _plain_error(error: Exception) -> tuple[int, dict[str, Any]]:
    if isinstance(error, KvError):
        status, kind = (400, "KvReferenceError") if isinstance(error, KvReferenceError) else (503, "KvTransferError")
        return status, wire.error_body(f"{error} ({error.reason})", kind, status, "kv_transfer_params", retryable=status == 503)
    if isinstance(error, EngineError):
        param = getattr(error, "param", None)
        return error.status, wire.error_body(str(error), error.kind, error.status, param, retryable=error.retryable)
    return 500, wire.error_body("internal error", "InternalServerError", 500)


def request_id_of(http: HttpRequest) -> str:
    """What the client calls its request; behind a router that is the part after the router's own number."""
    return ROUTED.sub("", http.headers.get("x-request-id", ""))[:MAX_REQUEST_ID]


def failure(error: Exception, request_id: str) -> Response:
    """An error as an HTTP answer."""
    status, body = error_of(error, request_id)
    return JSONResponse(body, status_code=status, headers=LAST if isinstance(error, TooLargeError | EngineLeavingError) else None)
