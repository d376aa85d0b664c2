"""The proxy itself: TLS on both sides, a thread of its own, plain requests passed whole, watches passed line by line."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import aiohttp
import yaml
from aiohttp import web

from e2e.faultproxy.faults import Answer, Crash, Dice, EventFault
from e2e.faultproxy.ledger import Ledger, Request, where
from e2e.faultproxy.watching import Watch
from e2e.kube.controlplane import ControlPlane
from e2e.kube.service import free_ports
from fleet_operator.cluster.kube_http import TLS_CLOSE_S

FORWARDED = ("Authorization", "Accept", "Content-Type", "User-Agent")
REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
BODY_MOST_BYTES = 16 * 1024 * 1024


class FaultProxy:
    """A context manager. Attributes may be changed at any time; what is on its way is not called back."""

    def __init__(self, plane: ControlPlane, seed: int) -> None:
        self._plane = plane
        self.seed = seed
        self.ledger = Ledger()
        self.dice = Dice(seed)
        self.crash: Crash | None = None
        self.answers: list[Answer] = []
        self.event_faults: list[EventFault] = []
        self.latency_s = 0.0
        self.dead = False
        """Every connection is cut at once, as if nobody listened."""
        self.old_lists: dict[str, bytes] = {}
        """By plural: what a LIST that fills a cache answers instead of the truth."""
        self.watches: set[Watch] = set()
        self.hold_events = threading.Event()
        self.hold_events.set()
        """Cleared: every watch stands still, and goes on where it stood when set again."""
        (self.port,) = free_ports(1)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"faultproxy-{self.port}", daemon=True)

    def __enter__(self) -> FaultProxy:
        print(f"fault seed {self.seed}: FLEET_FAULT_SEED={self.seed} repeats it")
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        if self._thread.is_alive():
            raise RuntimeError("the proxy did not stop")

    def kubeconfig(self, original: Path) -> Path:
        """`original` with this proxy as its server; the API server's own certificate stands for both."""
        config = yaml.safe_load(original.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self.port}"
        path = original.with_name(f"proxy-{self.port}-{original.name}")
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config))
        return path

    # -- what a test asks -------------------------------------------------------------------------------------------
    def crash_at(self, k: int, when: Literal["before", "after"], kill: Callable[[], None]) -> Crash:
        """Kill at the k-th mutating request from now on."""
        self.crash = Crash(k, when, kill)
        return self.crash

    def heal(self) -> None:
        """No more faults; frozen watches stay frozen, as a dead connection does."""
        self.crash, self.answers, self.event_faults, self.latency_s, self.dead = None, [], [], 0.0, False
        self.old_lists = {}
        self.hold_events.set()

    def freeze(self, kinds: Iterable[str] = ()) -> int:
        """Open watches (of these plurals; none named: all) say nothing any more, not even that they ended. How many."""
        return self._each(kinds, Watch.freeze)

    def expire(self, kinds: Iterable[str] = ()) -> int:
        """Open watches end with 410 Gone. How many."""
        return self._each(kinds, Watch.expire)

    def cut(self, kinds: Iterable[str] = ()) -> int:
        """Open watches lose their connection. How many."""
        return self._each(kinds, Watch.cut)

    def fail_watches(self, code: int, kinds: Iterable[str] = ()) -> int:
        """Open watches get an ERROR event with this code and end. How many."""
        return self._each(kinds, lambda watch: watch.fail(code))

    def _each(self, kinds: Iterable[str], act: Callable[[Watch], None]) -> int:
        wanted = set(kinds)

        async def work() -> int:
            chosen = [watch for watch in list(self.watches) if not wanted or watch.kind in wanted]
            for watch in chosen:
                act(watch)
            return len(chosen)

        return self._ask(work())

    def _ask(self, work: Coroutine[Any, Any, int]) -> int:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    # -- the server -------------------------------------------------------------------------------------------------
    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(self._ended())
        finally:
            self._loop.close()

    async def _ended(self) -> None:
        """What was cut says its last word: a loop closed before that leaves sockets to the garbage collector."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(TLS_CLOSE_S)

    async def _serve(self) -> None:
        certs = self._plane.ca_file.parent
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certs / "apiserver.crt", certs / "apiserver.key")
        upstream = ssl.create_default_context(cafile=str(self._plane.ca_file))
        connector = aiohttp.TCPConnector(limit=0, ssl=upstream)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**22) as self._session:
            server = web.Server(self._handle, handler_cancellation=True)  # type: ignore[arg-type]
            runner = web.ServerRunner(server, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=context).start()
            self._started.set()
            await self._stopping.wait()
            for watch in list(self.watches):
                watch.cut()
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        watch = request.query.get("watch") in ("1", "true")
        record = self.ledger.open(
            request.method, where(request.path), watch=watch, agent=request.headers.get("User-Agent", ""),
            body=_parsed(body) if request.method != "GET" else None,
        )  # fmt: skip
        if self.dead:
            return _cut(request, record, "dead")
        if self.latency_s:
            record.held_s = self.latency_s
            await asyncio.sleep(record.held_s)
        crash = self.crash
        if crash is not None and crash.due(record):
            return await self._crash(crash, request, record, body)
        answer = next((answer for answer in self.answers if answer.applies(record, self.dice.draw)), None)
        if answer is not None:
            if answer.carried_out:
                await self._forward(request, body)
            record.status, record.fault = answer.status, f"answered {answer.status}"
            return _refusal(answer)
        return await self._pass_on(request, record, body)

    async def _pass_on(self, request: web.BaseRequest, record: Request, body: bytes) -> web.StreamResponse:
        try:
            if record.watch:
                return await self._watch(request, record)
            if fills_a_cache(request, record) and record.kind in self.old_lists:
                record.status, record.fault = 200, "old list"
                return web.Response(body=self.old_lists[record.kind], content_type="application/json")
            answered = await self._forward(request, body)
        except (aiohttp.ClientError, OSError) as error:
            return _cut(request, record, f"upstream: {type(error).__name__}")
        if self.dead:
            return _cut(request, record, "dead")
        record.status = answered.status
        return answered

    async def _crash(self, crash: Crash, request: web.BaseRequest, record: Request, body: bytes) -> web.StreamResponse:
        if crash.when == "after":
            answered = await self._forward(request, body)
            record.status = answered.status
        await self._loop.run_in_executor(None, crash.kill)
        return _cut(request, record, f"killed {crash.when} write {crash.k}", record.status)

    async def _forward(self, request: web.BaseRequest, body: bytes) -> web.Response:
        async with self._send(request, body) as answer:
            text = await answer.read()
            headers = {name: answer.headers[name] for name in ("Content-Type", "Retry-After") if name in answer.headers}
            return web.Response(status=answer.status, body=text, headers=headers)

    def _send(self, request: web.BaseRequest, body: bytes | None) -> Any:
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        url = f"{self._plane.url}{request.path_qs}"
        return self._session.request(request.method, url, data=body or None, headers=headers, allow_redirects=False)

    async def _watch(self, request: web.BaseRequest, record: Request) -> web.StreamResponse:
        async with self._send(request, None) as answer:
            record.status = answer.status
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            watch = Watch(self, record.kind, answer, response, asyncio.current_task())
            self.watches.add(watch)
            try:
                await watch.run()
            except (ConnectionError, aiohttp.ClientError):
                record.fault = record.fault or "watch cut"
            finally:
                self.watches.discard(watch)
                if watch.was_cut:
                    record.fault = "watch cut"
                    if request.transport is not None:
                        request.transport.abort()
        with suppress(ConnectionError):
            await response.write_eof()
        return response


def fills_a_cache(request: web.BaseRequest, record: Request) -> bool:
    """A list of everything, not the question about one object or one fleet: that one is always answered from the present."""
    asked = request.query.get("labelSelector", "")
    return request.method == "GET" and not record.name and "fieldSelector" not in request.query and "/fleet=" not in asked


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return None


def _cut(request: web.BaseRequest, record: Request, why: str, status: int | None = None) -> web.Response:
    record.status, record.fault = status or 0, why
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


def _refusal(answer: Answer) -> web.Response:
    status = {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": answer.status,
        "reason": REASONS.get(answer.status, "Unknown"), "message": f"the fault proxy answers {answer.status}",
    }  # fmt: skip
    headers = {"Retry-After": str(answer.retry_after_s)} if answer.retry_after_s is not None else {}
    return web.json_response(status, status=answer.status, headers=headers)


def monotonic_in(seconds: float) -> float:
    """A moment for `Answer.until_s`."""
    return time.monotonic() + seconds
