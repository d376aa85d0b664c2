"""The engine thread: requests come in over one bounded queue, outputs leave to the event loop of the server.

Asyncio side: `submit` returns a bounded queue of outputs; `cancel` ends a request at any time. Engine side: `_run` steps the
core while there is work and sleeps otherwise. An exception in a step fails every open request and stops the loop: an engine
that once computed nonsense is not asked again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from fleet_worker.engine.core import EngineCore, Output
from fleet_worker.engine.errors import BadRequestError, EngineError, EngineStoppedError, OverloadedError
from fleet_worker.engine.sequence import Sequence
from fleet_worker.transfer.base import KvError

IDLE_WAIT_S = 0.02
PULL_WAIT_S = 0.0005
INTEGRITY_EVERY_S = 5.0
MAX_INBOX = 4_096
"""New requests that the engine thread has not looked at yet: bounds one long step; what waits afterwards, core.Limits bounds."""
Item = Output | Exception


class EngineLoop:
    """Runs one EngineCore in a thread."""

    def __init__(self, core: EngineCore, on_stop: Callable[[BaseException], None], on_step: Callable[[EngineCore], None]) -> None:
        self.core = core
        self._on_stop = on_stop
        self._on_step = on_step
        self._inbox: deque[Sequence | str | Callable[[EngineCore], None]] = deque()
        self._wake = threading.Event()
        self._sinks: dict[str, asyncio.Queue[Item]] = {}
        self._server_loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self.failure: BaseException | None = None
        self._begun_at: float | None = None
        """When the step that lasts now began; None between steps."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call from the server's event loop."""
        self._server_loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=10)

    def step_s(self) -> float:
        """Seconds that the step has lasted which the engine thread is in now; 0 when it is in none. Any thread."""
        begun_at = self._begun_at
        return 0.0 if begun_at is None else time.monotonic() - begun_at

    def submit(self, sequence: Sequence) -> asyncio.Queue[Item]:
        """Hand a request over; its outputs (or one exception) arrive in the queue, which its max_tokens bounds."""
        if self.failure is not None:
            raise EngineStoppedError(f"the engine stopped: {self.failure}")
        if len(self._inbox) >= MAX_INBOX:
            raise OverloadedError(f"{MAX_INBOX} requests are on their way to the engine already")
        sink: asyncio.Queue[Item] = asyncio.Queue()
        self._sinks[sequence.request_id] = sink
        self._post(sequence)
        return sink

    def cancel(self, request_id: str) -> None:
        """End a request; its queue gets nothing more. A lease that it got meanwhile ends, too: nobody heard of it."""
        if self._sinks.pop(request_id, None) is not None:
            self._post(request_id)

    def abandon(self, request_id: str) -> None:
        """As `cancel`, also when its last output was given out: nobody will hear of the lease in it."""
        self._sinks.pop(request_id, None)
        self._post(request_id)

    def complete(self, request_id: str) -> None:
        """End a request whose answer is complete before its last output was looked at (a stop string was met)."""
        self._sinks.pop(request_id, None)

        def end(core: EngineCore) -> None:
            core.finish(request_id, "stop")

        self._post(end)

    def give_back(self, belongs: Callable[[str], bool]) -> None:
        """End every request that belongs, running or leased: whoever asked for it will not read its answer."""
        for request_id in [found for found in self._sinks if belongs(found)]:
            self._sinks.pop(request_id).put_nowait(BadRequestError("the request was given back"))
            self._post(request_id)

        def release(core: EngineCore) -> None:
            for request_id in core.leased_requests():
                if belongs(request_id):
                    core.release_lease_of(request_id)

        self._post(release)

    def call(self, function: Callable[[EngineCore], None]) -> None:
        """Run a small function on the engine thread between two steps."""
        self._post(function)

    def _post(self, item: Sequence | str | Callable[[EngineCore], None]) -> None:
        self._inbox.append(item)
        self._wake.set()

    # -- engine thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        checked_at = time.monotonic()
        try:
            while not self._stopping:
                self._begun_at = time.monotonic()
                self._take()
                outputs = self.core.step()
                if outputs:
                    self._deliver(outputs)
                self._on_step(self.core)
                if not self.core.progressed:
                    now = time.monotonic()
                    if not self.core.sequences and now - checked_at >= INTEGRITY_EVERY_S:
                        self.core.check_integrity()
                        checked_at = now
                    self._begun_at = None
                    self._wake.wait(PULL_WAIT_S if self.core.is_moving else IDLE_WAIT_S)
                    self._wake.clear()
        except BaseException as error:
            self.failure = error
            self._begun_at = None
            self._fail_all(error)

    def _take(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, str):
                if self.core.abort(item) is None:  # it ended meanwhile
                    self.core.release_lease_of(item)
            elif isinstance(item, Sequence):
                try:
                    self.core.add(item)
                except (EngineError, KvError) as error:
                    self._to_server([(item.request_id, error)])
            else:
                item(self.core)

    def _deliver(self, outputs: list[Output]) -> None:
        self._to_server([(output.sequence.request_id, output.error or output) for output in outputs])

    def _to_server(self, items: list[tuple[str, Item]]) -> None:
        if self._server_loop is not None and not self._server_loop.is_closed():
            self._server_loop.call_soon_threadsafe(self._put, items)

    def _put(self, items: list[tuple[str, Item]]) -> None:
        for request_id, item in items:
            sink = self._sinks.get(request_id)
            if sink is not None:
                sink.put_nowait(item)
                if isinstance(item, Exception) or item.finish is not None:
                    del self._sinks[request_id]

    def _fail_all(self, error: BaseException) -> None:
        def tell() -> None:
            stopped = EngineStoppedError(f"the engine stopped: {type(error).__name__}: {error}")
            for sink in self._sinks.values():
                sink.put_nowait(stopped)
            self._sinks.clear()
            self._on_stop(error)

        if self._server_loop is not None and not self._server_loop.is_closed():
            self._server_loop.call_soon_threadsafe(tell)
