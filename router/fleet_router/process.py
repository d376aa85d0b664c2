"""A router process: follows its documents, serves clients, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from fleet_router.admission.tenants import Tenants
from fleet_router.config import RouterConfig
from fleet_router.context import Context
from fleet_router.desk import Desk, models_of
from fleet_router.explain.journal import Journal
from fleet_router.explain.recorder import Recorder
from fleet_router.exposition import exposition
from fleet_router.faults import places
from fleet_router.follow.capacity import follow_capacity
from fleet_router.follow.directory import follow_directory
from fleet_router.follow.documents import Documents
from fleet_router.follow.emptied import KEPT_S, Emptied, any_serves
from fleet_router.follow.identity import follow_identity
from fleet_router.follow.kube import follow_kube
from fleet_router.follow.kube_http import api_server
from fleet_router.follow.tenants import follow_tenants
from fleet_router.gathering import decisions_here, gathered, held_by_all, held_here
from fleet_router.gossip.link import GossipError, GossipSettings, Link
from fleet_router.gossip.share import Share
from fleet_router.hints import wanted_headers
from fleet_router.histogram import fold_all
from fleet_router.kept import Kept, there_now
from fleet_router.listening import wait_of
from fleet_router.members import Answer, Member, serve
from fleet_router.metrics import COMPILED, Metrics
from fleet_router.paths import DECISIONS, HELD
from fleet_router.port import Port
from fleet_router.prewarm import Prewarm
from fleet_router.server import ClientConnection
from fleet_router.stops import ending
from fleet_router.tls import Certificates, Certified, TlsError, TlsFiles
from fleet_router.watching import Connection, Probes, Returns, watch
from fleet_router.workers import WorkerTable, place_of, slots_of
from fleet_wire.address import authority

if TYPE_CHECKING:
    from fleet_router.epp.server import EndpointPicker
    from fleet_wire.endpoints import Endpoint

HANDSHAKES_LEAST = 64
SWEEP_S = 0.5
TICK_S = 0.05
DRAIN_S = 30.0
IDLE_STEP_S = 5.0
DRAIN_STEP_S = 0.05
GOSSIP_AGAIN_S = 5.0
MOST_PROBLEMS = 8
ENDPOINTS = "endpoints"


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
    ext_proc_port: int | None = None
    """Where gateways ask which endpoint to use; None: nowhere."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"
    """What they are told while nothing can be decided."""
    member: Member = field(default_factory=Member)
    """Which of several processes behind the port."""
    tls: TlsFiles | None = None
    """None: plain HTTP."""
    admin_port: int = 0
    """Plain HTTP for probes and scrapes; 0: none."""
    drain_s: float = DRAIN_S
    """Longest wait, after SIGTERM, for answers that are under way. Not part of the documents: it belongs to the pod's grace
    period, which does not change while the pod lives."""
    counts: int | None = None
    """Of one of several processes: where what it has counted outlives it (a file descriptor)."""


class Router:
    """One process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._clock = time.monotonic
        self._desk = Desk(self._clock)
        self._desk.tenants_needed = settings.tenants is not None
        self._journal = Journal()
        self._recorder = Recorder(self._clock, self._journal)
        self._desk.faults.tell, self._desk.faults.tell_unguarded = self._fault, self._unguarded
        nothing = RouterConfig(fleet="", served_name="")
        self._context = Context(WorkerTable(), nothing, Metrics(), self._clock, self._desk, self._recorder)
        self._connections: set[ClientConnection] = set()
        self._picker: EndpointPicker | None = None
        self._probes = Probes(self._context, self._asking)
        self._returns = Returns(self._context)
        self._prewarm = Prewarm(self._context, settings.member, self._journal.say)
        self._followed_at: float | None = None
        self._problems: dict[str, str] = {}
        """The last one of each that is followed, until it is over."""
        shared = settings.member.size > 1
        self._certificates = None if settings.tls is None else Certificates(settings.tls)
        self._ports = [Port(settings.host, settings.port, self.connection, shared=shared, room=self._handshakes_most)]
        if settings.admin_port:
            self._ports.append(Port(settings.host, settings.admin_port, self.admin_connection, shared=shared))
        self._context.gather = self.gather if shared else None
        self._kept = Kept(settings.counts)
        self._documents: Documents | None = None
        """Those in force."""
        self._emptied = Emptied()
        self._share = Share(secrets.randbits(64), self._clock())
        self._link = None if settings.gossip is None else Link(settings.gossip, self._share, self._clock, self._journal.say)

    # -- documents --------------------------------------------------------------------------------------------------
    def apply(self, documents: Documents) -> None:
        """New endpoints or configuration; running requests keep what they began with."""
        if not self._keeps(documents):
            self._take(documents)

    def _take(self, documents: Documents) -> None:
        config, table, before = documents.config, self._context.table, dict(self._context.table.workers)
        self._context.config, self._context.wanted = config, wanted_headers(config)
        table.update(documents.endpoints, self._clock(), config)
        gone = [worker for uid, worker in before.items() if worker.role == "decode" and table.workers.get(uid) is not worker]
        self._context.holding.follow(documents.endpoints.at_zero, self._clock(), served=table.ready(), reached=table.reached())
        if odd := self._desk.follow(config, slots_of(table, config), gone):
            self._journal.say("tenants", tenants=self._desk.tenants, problems=odd[:MOST_PROBLEMS])
        self._recorder.follow(config)
        self._context.metrics.live = frozenset((one.tier, one.revision) for one in documents.endpoints.workers)
        self._know_caches(config)
        self._share.follow(table.workers, self._desk.accounts, table.routing, self._clock())
        if self._link is not None:
            self._link.follow(documents.endpoints.routers)
        if documents is not self._documents:  # for the sake of a stranger they are taken again, and nobody has said anything
            self._documents, self._followed_at = documents, self._clock()
            self._problems.pop(ENDPOINTS, None)
        self._journal.say("endpoints", workers=len(self._context.table.workers), policy=documents.config.policy)

    def _keeps(self, documents: Documents) -> bool:
        """A document without any worker, where workers serve and no tier rests, is taken for a mistake for a while. When the
        workers are gone indeed, requests find out at once."""
        found = documents.endpoints
        if found.workers or found.at_zero or not self._context.table.workers:
            self._emptied.over()
            return False
        self._emptied.came(documents, self._clock())
        self.failed(f"the endpoints name no worker: the last ones are kept for {KEPT_S:g} s, and while one of them serves")
        return True

    def same(self) -> None:
        """What came last is what is there now: in force, unless it is one that `_keeps` away."""
        if self._emptied.documents is None:
            self._followed_at = self._clock()

    async def doubt(self) -> None:
        """Ask those that were there last, and believe that nobody is when none serves."""
        emptied = self._emptied.documents
        if emptied is None or not self._emptied.due(self._clock()):
            return
        serving = await any_serves([worker.endpoint for worker in self._context.table.workers.values()])
        if self._emptied.documents is emptied and not serving:
            self._emptied.over()
            self._take(emptied)

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
            knowledge.put_away()

    def know(self, tenants: Tenants) -> None:
        """A new tenants file; names and counts are logged, nothing else of it."""
        problems = self._desk.know(tenants)
        self._problems.pop("tenants", None)
        table = self._context.table
        self._share.follow(table.workers, self._desk.accounts, table.routing, self._clock())
        self._journal.say("tenants", tenants=len(tenants.tenants), problems=problems[:MOST_PROBLEMS])

    def failed(self, problem: str, about: str = ENDPOINTS) -> None:
        """Keep the last good set; say so once per problem. Of each kind by itself: two that are wrong at a time would make each
        other's news, every second."""
        self._context.metrics.follow_errors += 1
        if problem != self._problems.get(about):
            self._problems[about] = problem
            self._journal.say("follow-failed", problem=problem)

    async def _follow(self) -> None:
        scheme, _, rest = self._settings.follow.partition(":")
        if scheme == "dir":
            await follow_directory(Path(rest), self.apply, self.failed, self.same)
        namespace, _, name = rest.partition("/")
        await follow_kube(namespace, name, self.apply, self.failed, self.same, api_server(os.environ))

    # -- plain routes -----------------------------------------------------------------------------------------------
    def plain(self, path: bytes) -> tuple[int, bytes, bytes]:
        """(status, content type, body) of the routes that need no worker."""
        context = self._context
        if path == b"/metrics":
            rows = [(w.endpoint.name, w.endpoint.role, w.endpoint.tier, w.own) for w in context.table.workers.values()]
            age_s = -1.0 if self._followed_at is None else self._clock() - self._followed_at
            text = context.metrics.exposition(rows, age_s, len(context.table.routing.index))
            counted = context.holding, context.receiving, context.unread, self._prewarm
            parts: list[Iterable[str]] = [*(one.lines() for one in counted), context.table.lines(self._clock())]
            if self._certificates is not None:
                parts += [self._certificates.lines(), self._ports[0].handshakes.lines()]
            if self._link is not None:
                parts.append(self._link.lines())
            if context.knowledge is not None:
                parts.append(context.knowledge.lines())
            ready, waiting, keys = len(context.table.by_role["decode"]), self._desk.gate.waiting, len(context.table.routing.index)
            parts.append(self._recorder.lines(context.config, ready, keys, waiting))
            text += "".join(f"{line}\n" for line in chain.from_iterable(parts))
            return 200, b"text/plain; version=0.0.4", (text + exposition(self._desk, self._clock())).encode()
        if path == b"/v1/models":
            return 200, b"application/json", models_of(context.config, context.table.adapters())
        if path == b"/ready":
            why = self._not_ready()
            return (503 if why else 200), b"text/plain", (why or "ready").encode() + b"\n"
        return 200, b"text/plain", b"ok\n"

    def _not_ready(self) -> str:
        if self._context.draining:
            return "draining"
        if self._followed_at is None:
            return f"no endpoints yet: {self._problems.get(ENDPOINTS, '')}"
        if not self._desk.ready:
            return "no tenants yet"
        context = self._context
        if context.table.ready() or context.holding.at_zero:
            return ""  # at zero the request that wakes the fleet must come in
        if context.table.returns("", "", self._clock(), context.config.return_wait_s):
            return ""  # and what is held until a worker is back must, too
        return "no worker can answer a whole request"

    # -- life -------------------------------------------------------------------------------------------------------
    async def run(self) -> int:
        """Serve until SIGTERM; 0 after a drain, 1 when the address is taken."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._desk.faults.unguarded)
        if not await self._open():
            return 1
        if self._settings.ext_proc_port is not None and not await self._pick_for_gateways(self._settings.ext_proc_port):
            for port in self._ports:
                await port.close()
            return 1
        stop = asyncio.Event()
        for number in ending():
            loop.add_signal_handler(number, stop.set)
        self._journal.say("listening", host=self._settings.host, port=self._settings.port, compiled=COMPILED)
        tasks = [asyncio.create_task(task) for task in self._tasks()]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            self._context.draining = True
            for port in self._ports:
                await port.close()
            self._context.holding.stop()
            self._prewarm.stop()
            picking = [self._picker.stop(self._settings.drain_s)] if self._picker is not None else []
            await asyncio.gather(self._drain(), *picking)
        finally:
            for task in (stopping, *tasks):
                task.cancel()
            ended = await asyncio.gather(stopping, *tasks, return_exceptions=True)
            if self._context.knowledge is not None:
                await asyncio.to_thread(self._context.knowledge.stop)
            await asyncio.to_thread(self._recorder.stop)
        return self._exit_code(ended)

    async def _pick_for_gateways(self, port: int) -> bool:
        """Serve ext_proc too; False, and a reason on stderr, when that cannot be."""
        try:
            from fleet_router.epp.server import EndpointPicker  # gRPC: only who needs it pays for it
        except ImportError as error:
            print(f"NotInstalled: --ext-proc-port needs inferencefleet[epp]: {error}", file=sys.stderr, flush=True)
            return False
        self._picker = EndpointPicker(self._context, self._undecided, self._settings.failure_mode)
        host, shared = self._settings.host, self._settings.member.size > 1
        try:
            bound = await self._picker.start(host, port, self._certificates, shared=shared)
        except OSError as error:
            print(f"AddressInUse: {authority(host, port)} cannot be bound: {error}", file=sys.stderr, flush=True)
            return False
        self._journal.say("ext-proc", host=host, port=bound)
        return True

    def _undecided(self) -> str:
        """Why nothing can be decided yet; empty when it can."""
        if self._followed_at is None:
            return "no endpoints are known yet"
        return "" if self._desk.ready else "no tenants are known yet"

    async def _open(self) -> bool:
        """Listen; False, and a reason on stderr, when that cannot be."""
        wanted = self._settings
        try:
            context = None if self._certificates is None else self._certificates.begin()
            for port in self._ports:
                await port.open(context if port is self._ports[0] else None)
        except TlsError as error:
            print(f"TlsFailed: {error}", file=sys.stderr, flush=True)
            return False
        except OSError as error:
            print(f"AddressInUse: {authority(wanted.host, wanted.port)} cannot be bound: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def _tasks(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Everything that runs beside the connections."""
        wanted = self._settings
        yield from (self._follow(), self._sweep(), self._tick(), self._measure())
        yield from (self._identify(), self._doubt(), self._close_idle())
        if wanted.tenants is not None:
            yield follow_tenants(wanted.tenants, self.know, partial(self.failed, about="tenants"))
        if self._link is not None:
            yield self._gossip(self._link)
        if wanted.member.size > 1:
            yield serve(wanted.member, self.answer)
        if self._certificates is not None:
            yield self._certificates.follow(self.secure, partial(self.failed, about="tls"))

    async def secure(self, context: Certified) -> None:
        """New certificates: for connections from now on. OSError: there is nothing to listen with now."""
        await self._ports[0].serve(context)
        self._problems.pop("tls", None)
        self._journal.say("tls")

    # -- other processes of the same port ---------------------------------------------------------------------------
    async def answer(self, url: bytes) -> Answer:
        """Of this process alone, to a sibling. Behind a URL of decisions stands who may see which."""
        path = url.partition(b" ")[0].partition(b"?")[0]
        if path == HELD:
            return 200, b"%d\n" % await held_here(self._context.holding, wait_of(url))
        if path == DECISIONS:
            return decisions_here(self._recorder, url, self._clock())
        status, _, body = self.plain(url)
        if path == b"/metrics":
            body = self._kept.with_before(body.decode(), there_now(self._context.metrics.live, self._context.config)).encode()
        return status, body

    async def gather(self, url: bytes) -> Answer:
        """Of all of them, to a client."""
        if url.partition(b"?")[0] == HELD:
            return await held_by_all(self._settings.member, self._context.holding, url)
        return await gathered(self._settings.member, url, self.answer)

    # -- connections ------------------------------------------------------------------------------------------------
    def connection(self) -> asyncio.Protocol:
        """A protocol for one more client."""
        return cast("asyncio.Protocol", ClientConnection(self._context, self._connections, self.plain))

    def _handshakes_most(self) -> int:
        """TLS handshakes that may be under way: together with the connections as many as may be. Some always may: whoever comes
        when there are too many connections is to be told so."""
        return max(HANDSHAKES_LEAST, self._context.config.bounds.connections - len(self._connections))

    def admin_connection(self) -> asyncio.Protocol:
        """A protocol for one more probe or scrape."""
        return cast("asyncio.Protocol", ClientConnection(self._context, self._connections, self.plain, admin=True))

    @staticmethod
    def _exit_code(ended: Sequence[object]) -> int:
        broken = [e for e in ended if isinstance(e, Exception)]
        for error in broken:
            print(f"RouterFailed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1 if broken else 0

    async def _gossip(self, link: Link) -> None:
        """A router that cannot gossip serves all the same, also where that is a bug of ours."""
        while True:
            running = asyncio.create_task(link.run())  # apart: a group that fails while it is cancelled passes over the latter
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                raise
            error = running.exception()
            if isinstance(error, GossipError):
                self._journal.say("gossip-failed", problem=str(error))
            elif error is not None:
                first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                self._journal.say("gossip-failed", problem=type(first).__name__, at=places(first.__traceback__))
            await asyncio.sleep(GOSSIP_AGAIN_S)

    async def _measure(self) -> None:
        table = self._context.table

        def know(worker: str, tokens: int) -> None:
            table.routing.index.resize(worker, int(tokens * table.routing.bytes_per_token.value))

        index = table.routing.index
        await follow_capacity(lambda: {uid: w.endpoint for uid, w in table.workers.items() if not index.measured(uid)}, know)

    async def _doubt(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.doubt()

    async def _identify(self) -> None:
        await follow_identity(self._context.table.suspects, self.stranger)

    def stranger(self, endpoint: Endpoint) -> None:
        """Somebody else answers where this worker should be."""
        self._journal.say("stranger", worker=endpoint.uid)
        self._context.table.strangers[endpoint.uid] = place_of(endpoint)
        if self._documents is not None:
            self._take(self._documents)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._clock()
            fold_all()
            if self._context.knowledge is not None:
                self._context.knowledge.tick(now)
            self._context.releases.sweep(now)
            self._context.table.routing.tick(now, self._context.config.slow_start_s)
            self._probes.ask(watch(self._context, self._asking(), now))
            self._prewarm.step(now)
            self.sweep(now)

    def sweep(self, now: float) -> None:
        """Deadlines. A bug in what is done for one connection ends that one's request."""
        for connection in list(self._connections):
            try:
                connection.sweep(now)
            except Exception as error:
                self._desk.faults.end(error, connection.fail, connection.request_id)
        if self._picker is not None:
            self._picker.sweep(now)

    def _fault(self, request_id: str, kind: str, where: list[str]) -> None:
        self._journal.bug("request-failed", request_id=request_id, error=kind, at=where)

    def _unguarded(self, kind: str, where: list[str]) -> None:
        self._journal.bug("callback-failed", error=kind, at=where)

    def _asking(self) -> list[Connection]:
        """Whoever may wait for a worker."""
        return [*self._connections, *(self._picker.exchanges if self._picker is not None else ())]

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_STEP_S)
            self._context.table.expire_idle(self._clock(), self._context.config.upstream_idle_s)

    async def _tick(self) -> None:
        """Requests that wait for a slot must not wait for the sweep to be told that they waited too long."""
        while True:
            await asyncio.sleep(TICK_S)
            self._desk.tick()
            self._returns.look(self._clock())

    async def _drain(self) -> None:
        """Answer what came, then go; what is left when the time is over gets an error."""
        since = self._clock()
        while self._connections and self._clock() - since < self._settings.drain_s:
            self.drain_step(since)
            await asyncio.sleep(DRAIN_STEP_S)
        self._journal.say("drained", left=len(self._connections))
        self._desk.closed = bool(self._connections)  # else each that is cut lets one begin, only to be cut as well
        for connection in list(self._connections):
            try:
                connection.cut()
            except Exception as error:
                self._desk.faults.end(error, connection.fail, connection.request_id)
        self._context.overtaken.stop(self._clock())  # streams that were waited for may have left some
        await asyncio.sleep(DRAIN_STEP_S)  # what was just written goes out

    def drain_step(self, since: float) -> None:
        """Close every connection that has nothing to answer."""
        now = self._clock()
        for connection in list(self._connections):
            try:
                connection.drain(now, since)
            except Exception as error:
                self._desk.faults.end(error, connection.fail, connection.request_id)
