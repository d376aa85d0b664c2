"""A router process: follows its documents, serves clients, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleet_router.admission.tenants import Tenants
from fleet_router.config import RouterConfig
from fleet_router.context import Context
from fleet_router.desk import Desk
from fleet_router.explain.journal import Journal
from fleet_router.explain.recorder import Recorder
from fleet_router.exposition import exposition
from fleet_router.follow.capacity import follow_capacity
from fleet_router.follow.directory import follow_directory
from fleet_router.follow.documents import Documents
from fleet_router.follow.kube import api_server, follow_kube
from fleet_router.follow.tenants import follow_tenants
from fleet_router.gossip.link import GossipError, GossipSettings, Link
from fleet_router.gossip.share import Share
from fleet_router.hints import wanted_headers
from fleet_router.metrics import Metrics
from fleet_router.server import ClientConnection
from fleet_router.workers import WorkerTable, slots_of

SWEEP_S = 0.5
TICK_S = 0.05
DRAIN_S = 30.0
DRAIN_STEP_S = 0.05
BACKLOG = 1_024
GOSSIP_AGAIN_S = 5.0
MOST_PROBLEMS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    follow: str
    host: str
    port: int
    tenants: Path | None = None
    """The tenants file; None: everybody may ask."""
    gossip: GossipSettings | None = None
    """What this router tells others and hears of them; None: it goes by its own requests alone."""


class Router:
    """One process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._clock = time.monotonic
        self._desk = Desk(self._clock)
        self._desk.tenants_needed = settings.tenants is not None
        self._journal = Journal()
        self._recorder = Recorder(self._clock, self._journal)
        nothing = RouterConfig(fleet="", served_name="")
        self._context = Context(WorkerTable(), nothing, Metrics(), self._clock, self._desk, self._recorder)
        self._connections: set[ClientConnection] = set()
        self._followed_at: float | None = None
        self._last_problem = ""
        self._share = Share(secrets.randbits(64), self._clock())
        self._link = None if settings.gossip is None else Link(settings.gossip, self._share, self._clock, self._journal.say)

    # -- documents --------------------------------------------------------------------------------------------------
    def apply(self, documents: Documents) -> None:
        """New endpoints or configuration; running requests keep what they began with."""
        config, table, before = documents.config, self._context.table, dict(self._context.table.workers)
        self._context.config, self._context.wanted = config, wanted_headers(config)
        table.update(documents.endpoints, self._clock(), config)
        gone = [worker for uid, worker in before.items() if worker.role == "decode" and table.workers.get(uid) is not worker]
        self._context.holding.follow(documents.endpoints.at_zero, self._clock(), served=table.ready())
        self._desk.follow(config, slots_of(table, config), gone)
        self._recorder.follow(config.explain, config.traces, config.fleet)
        self._know_caches(config)
        self._share.follow(table.workers, self._desk.accounts, table.routing, self._clock())
        self._followed_at = self._clock()
        self._last_problem = ""
        self._journal.say("endpoints", workers=len(self._context.table.workers), policy=documents.config.policy)

    def _know_caches(self, config: RouterConfig) -> None:
        """Start, feed or end the reading of KV events."""
        context = self._context
        if config.prefix_index == "precise" and config.policy == "kvAware":
            if context.knowledge is None:
                from fleet_router.knowledge import Knowledge  # tokenizers and ZMQ: only who needs them pays for them

                context.knowledge = Knowledge(self._clock, lambda text: self._journal.say("kv", said=text))
            context.knowledge.follow([(worker.endpoint, worker.bit) for worker in context.table.workers.values()])
        elif (knowledge := context.knowledge) is not None:
            context.knowledge = None
            threading.Thread(target=knowledge.stop, daemon=True).start()  # it waits for threads that wait for this one

    def know(self, tenants: Tenants) -> None:
        """A new tenants file; names and counts are logged, nothing else of it."""
        problems = self._desk.know(tenants)
        table = self._context.table
        self._share.follow(table.workers, self._desk.accounts, table.routing, self._clock())
        self._journal.say("tenants", tenants=len(tenants.tenants), problems=problems[:MOST_PROBLEMS])

    def failed(self, problem: str) -> None:
        """Keep the last good set; say so once per problem."""
        self._context.metrics.follow_errors += 1
        if problem != self._last_problem:
            self._last_problem = problem
            self._journal.say("follow-failed", problem=problem)

    async def _follow(self) -> None:
        scheme, _, rest = self._settings.follow.partition(":")
        if scheme == "dir":
            await follow_directory(Path(rest), self.apply, self.failed)
        namespace, _, name = rest.partition("/")
        await follow_kube(namespace, name, self.apply, self.failed, api_server(os.environ))

    # -- plain routes -----------------------------------------------------------------------------------------------
    def plain(self, path: bytes) -> tuple[int, bytes, bytes]:
        """(status, content type, body) of the routes that need no worker."""
        context = self._context
        if path == b"/metrics":
            rows = [(w.endpoint.name, w.endpoint.role, w.endpoint.tier, w.own) for w in context.table.workers.values()]
            age_s = -1.0 if self._followed_at is None else self._clock() - self._followed_at
            text = context.metrics.exposition(rows, age_s, len(context.table.routing.index))
            text += "".join(f"{line}\n" for line in context.holding.lines())
            if self._link is not None:
                text += "".join(f"{line}\n" for line in self._link.lines())
            if context.knowledge is not None:
                text += "".join(f"{line}\n" for line in context.knowledge.lines())
            ready, waiting = len(context.table.by_role["decode"]), self._desk.gate.waiting
            text += "".join(
                f"{line}\n" for line in self._recorder.lines(context.config, ready, len(context.table.routing.index), waiting)
            )
            return 200, b"text/plain; version=0.0.4", (text + exposition(self._desk, self._clock())).encode()
        if path == b"/v1/models":
            return 200, b"application/json", msgspec.json.encode({"object": "list", "data": self._models()})
        if path == b"/ready":
            why = self._not_ready()
            return (503 if why else 200), b"text/plain", (why or "ready").encode() + b"\n"
        return 200, b"text/plain", b"ok\n"

    def _models(self) -> list[dict[str, object]]:
        """The model, and the adapters that some decode worker can answer for now."""
        config, decodes = self._context.config, self._context.table.by_role["decode"]
        card = {"object": "model", "created": 0, "owned_by": "inferencefleet"}
        there = {name for worker in decodes for name in worker.endpoint.adapters}
        adapters = [{"id": name, **card, "parent": config.served_name} for name in config.adapters if name in there]
        return [{"id": config.served_name, **card}, *adapters] if config.served_name else []

    def _not_ready(self) -> str:
        if self._context.draining:
            return "draining"
        if self._followed_at is None:
            return f"no endpoints yet: {self._last_problem}"
        if not self._desk.ready:
            return "no tenants yet"
        if self._context.table.ready() or self._context.holding.at_zero:
            return ""  # at zero the request that wakes the fleet must come in
        return "no worker can answer a whole request"

    # -- life -------------------------------------------------------------------------------------------------------
    async def run(self) -> int:
        """Serve until SIGTERM; 0 after a drain, 1 when the address is taken."""
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                self.connection,
                self._settings.host, self._settings.port, backlog=BACKLOG,
            )  # fmt: skip
        except OSError as error:
            print(
                f"AddressInUse: {self._settings.host}:{self._settings.port} cannot be bound: {error}", file=sys.stderr, flush=True
            )
            return 1
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self._journal.say("listening", host=self._settings.host, port=self._settings.port)
        tasks = [asyncio.create_task(task) for task in (self._follow(), self._sweep(), self._tick(), self._measure())]
        if self._settings.tenants is not None:
            tasks.append(asyncio.create_task(follow_tenants(self._settings.tenants, self.know, self.failed)))
        if self._link is not None:
            tasks.append(asyncio.create_task(self._gossip(self._link)))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            await self._close_listener(server)
            self._context.holding.stop()
            await self._drain()
        finally:
            for task in (stopping, *tasks):
                task.cancel()
            ended = await asyncio.gather(stopping, *tasks, return_exceptions=True)
            if self._context.knowledge is not None:
                await asyncio.to_thread(self._context.knowledge.stop)
            await asyncio.to_thread(self._recorder.stop)
        return self._exit_code(ended)

    async def _close_listener(self, server: asyncio.Server) -> None:
        """Stop listening. Connections that the kernel has accepted for us already are served: closing the listener alone would
        reset them."""
        self._context.draining = True
        loop = asyncio.get_running_loop()
        listeners = [socket.socket(fileno=os.dup(listener.fileno())) for listener in server.sockets]
        server.close()
        for listener in listeners:
            listener.setblocking(False)
            with contextlib.suppress(OSError), listener:
                while True:
                    accepted, _ = listener.accept()
                    accepted.setblocking(False)
                    await loop.connect_accepted_socket(self.connection, accepted)

    def connection(self) -> ClientConnection:
        """A protocol for one more client."""
        return ClientConnection(self._context, self._connections, self.plain)

    @staticmethod
    def _exit_code(ended: Sequence[object]) -> int:
        broken = [e for e in ended if isinstance(e, Exception)]
        for error in broken:
            print(f"RouterFailed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1 if broken else 0

    async def _gossip(self, link: Link) -> None:
        """A router that cannot gossip serves all the same."""
        while True:
            try:
                await link.run()
            except GossipError as error:
                self._journal.say("gossip-failed", problem=str(error))
            await asyncio.sleep(GOSSIP_AGAIN_S)

    async def _measure(self) -> None:
        table = self._context.table

        def know(worker: str, tokens: int) -> None:
            table.routing.index.resize(worker, int(tokens * table.routing.bytes_per_token.value))

        await follow_capacity(lambda: {uid: worker.endpoint for uid, worker in table.workers.items()}, know)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._clock()
            if self._context.knowledge is not None:
                self._context.knowledge.tick(now)
            self._context.table.routing.tick(now, self._context.config.slow_start_s)
            for connection in list(self._connections):
                connection.sweep(now)

    async def _tick(self) -> None:
        """Requests that wait for a slot must not wait for the sweep to be told that they waited too long."""
        while True:
            await asyncio.sleep(TICK_S)
            self._desk.tick()

    async def _drain(self) -> None:
        """Answer what came, then go; what is left when the time is over gets an error."""
        since = self._clock()
        while self._connections and self._clock() - since < DRAIN_S:
            self.drain_step(since)
            await asyncio.sleep(DRAIN_STEP_S)
        self._journal.say("drained", left=len(self._connections))
        for connection in list(self._connections):
            connection.cut()
        await asyncio.sleep(DRAIN_STEP_S)  # what was just written goes out

    def drain_step(self, since: float) -> None:
        """Close every connection that has nothing to answer."""
        now = self._clock()
        for connection in list(self._connections):
            connection.drain(now, since)
