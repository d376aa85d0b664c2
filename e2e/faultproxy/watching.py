"""One open watch: the lines of the API server on their way to the operator."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from e2e.faultproxy.ledger import Passed

if TYPE_CHECKING:
    from e2e.faultproxy.proxy import FaultProxy

POLL_S = 0.02


class Watch:
    """Passes events on until either side ends it; what happens to each is in the ledger."""

    def __init__(
        self, proxy: FaultProxy, kind: str, answer: aiohttp.ClientResponse, response: web.StreamResponse,
        task: asyncio.Task[Any] | None,
    ) -> None:  # fmt: skip
        self._proxy = proxy
        self.kind = kind
        self._answer = answer
        self._response = response
        self._frozen = False
        self._last_words: bytes | None = None
        self._ended = asyncio.Event()
        self._later: set[asyncio.Task[None]] = set()
        self._before: dict[str, bytes] = {}
        self.was_cut = False

    def freeze(self) -> None:
        """Say nothing from now on, and keep the connection."""
        self._frozen = True

    def expire(self) -> None:
        """End with 410 Gone, as when the version is too old."""
        self.fail(410)

    def fail(self, code: int) -> None:
        """End with an ERROR event."""
        status = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
            "reason": "Expired" if code == 410 else "InternalError", "message": f"the fault proxy says {code}",
        }  # fmt: skip
        self._last_words = json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
        self._ended.set()

    def cut(self) -> None:
        """Lose the connection."""
        self.was_cut = True
        self._ended.set()

    async def run(self) -> None:
        """Until the API server ends the watch or a fault does; the operator's leaving cancels us."""
        tasks = [asyncio.ensure_future(work) for work in (self._ended.wait(), self._pump())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] not in done:
                return await tasks[1]
            if self._last_words is not None:
                self._note("ERROR", "", "expired" if b'"code": 410' in self._last_words else "failed")
                await self._response.write(self._last_words)
        finally:
            for task in (*tasks, *self._later):
                task.cancel()
            await asyncio.gather(*tasks, *self._later, return_exceptions=True)

    async def _pump(self) -> None:
        while line := await self._answer.content.readline():
            await self._pass(line)

    async def _pass(self, line: bytes) -> None:
        event = json.loads(line)
        type_, name = event["type"], event["object"].get("metadata", {}).get("name", "")
        while self._held():  # noqa: ASYNC110 - the test's thread sets and clears it
            await asyncio.sleep(POLL_S)
        if self._ended.is_set():
            return
        done = "frozen" if self._frozen else await self._fault(type_, name, line)
        self._note(type_, name, done)
        if type_ != "BOOKMARK":
            self._before[name] = line
        if done not in ("frozen", "dropped"):
            await self._response.write(line)
            if done == "duplicated":
                await self._response.write(line)

    def _held(self) -> bool:
        return not self._proxy.hold_events.is_set() and not self._ended.is_set()

    async def _fault(self, type_: str, name: str, line: bytes) -> str:
        for fault in list(self._proxy.event_faults):
            if not fault.applies(self.kind, type_, name):
                continue
            if fault.action == "delay":
                await asyncio.sleep(fault.hold_s)
                return "delayed"
            if fault.action == "replay":
                self._tell_later(self._before.get(name, line), fault.hold_s, type_, name)
                return "passed"
            return {"drop": "dropped", "duplicate": "duplicated"}[fault.action]
        return "passed"

    def _tell_later(self, line: bytes, hold_s: float, type_: str, name: str) -> None:
        async def tell() -> None:
            await asyncio.sleep(hold_s)
            self._note(type_, name, "replayed")
            await self._response.write(line)

        task = asyncio.ensure_future(tell())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def _note(self, type_: str, name: str, done: str) -> None:
        self._proxy.ledger.events.append(Passed(time.monotonic(), self.kind, type_, name, done))
