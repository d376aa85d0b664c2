"""The agent itself: prepare, start, watch, drain, stop; every decision is taken in `life.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleet_wire.address import authority
from fleet_worker.agent import fabric
from fleet_worker.agent import life as rules
from fleet_worker.agent.adapters import AdapterKeeper, wished_at_start
from fleet_worker.agent.admin import AdminServer, build_app, build_server
from fleet_worker.agent.alone import alone
from fleet_worker.agent.command import Place, counts_open, events_socket, replay_socket, sees_gpu, ucx_told
from fleet_worker.agent.engine_client import EngineClient
from fleet_worker.agent.errors import ConfigError, EngineDiedError, GroupLostError
from fleet_worker.agent.exposition import Own, exposition
from fleet_worker.agent.forward import EventForwarder, ReplayForwarder
from fleet_worker.agent.group import Leader
from fleet_worker.agent.identity import Identity
from fleet_worker.agent.life import Life, Load
from fleet_worker.agent.prepare import prepare_for, version_of
from fleet_worker.agent.role import judge
from fleet_worker.agent.running import Running
from fleet_worker.agent.scratch import Scratch
from fleet_worker.agent.seed import SeedKeeper
from fleet_worker.agent.supervise import EngineProcess, find_vllm, how_ended
from fleet_worker.agent.tokenizer import tokenizer_files
from fleet_worker.config import STEP_TIMEOUT_ENV, STILL_S, AdapterWish, Role, WorkerConfig, step_timeout_s

T = TypeVar("T")
CHECK_EVERY_S = 0.25
DRAIN_POLL_S = 0.1
BIND_WAIT_S = 5.0


class Agent:
    """One worker pod's PID 1. `run` returns the exit code of a clean stop or raises a WorkerError."""

    def __init__(self, config: WorkerConfig, identity: Identity) -> None:
        self._config = config
        self._identity = identity
        self._life = Life()
        self._load = Load(None, None, None)
        self._pace = rules.Pace()
        self._busy_at = time.monotonic()
        self._ended: int | None = None
        """Requests that the engine had ended when it last said so."""
        self._open: int | None = None
        """What it had open then."""
        self._running = Running(config.role)
        self._folder: Path | None = None
        """The model's files, once they are here."""
        self._forwarder: EventForwarder | None = None
        self._replays: ReplayForwarder | None = None
        self._fabric = fabric.Fabric()
        self._scratch = Scratch()  # vLLM never removes its sockets
        self._token = secrets.token_hex(16)
        at, ranks = authority(identity.pod_ip, config.ports.http), config.parallel.data if config.engine == "vllm" else 0
        self._client = EngineClient(f"http://{at}", self._token, counts_open=counts_open(config), compiling=ranks)
        self._adapters = AdapterKeeper(config, self._client, Path(self._scratch.name) / "adapters", wished_at_start(os.environ))
        self._seed = SeedKeeper(config, self._client, os.environ, identity.pod_ip)
        self._stop = asyncio.Event()
        self._engine_answers = asyncio.Event()
        self._drained: asyncio.Task[dict[str, object]] | None = None
        self._ending: asyncio.Task[None] | None = None
        """Since the first SIGTERM."""
        self._group: Leader | None = None
        """Of a worker over several nodes."""
        self._fault = ""
        """The last one of our own that was told."""
        self._changing_to: Role | None = None
        self._change: asyncio.Task[None] | None = None

    # -- probes -----------------------------------------------------------------------------------------------------
    def live(self) -> bool:
        """Answers /live."""
        return rules.is_live(self._life, time.monotonic())

    def started(self) -> bool:
        """Answers /started."""
        return rules.is_started(self._life)

    def ready(self) -> bool:
        """Answers /ready."""
        return rules.is_ready(self._life)

    def state(self) -> dict[str, object]:
        """Answers /state; None means that the engine did not say."""
        config, life, load = self._config, self._life, self._load
        return {
            "phase": life.phase, "detail": life.detail, "role": config.role, "engine": config.engine,
            "fleet": config.fleet, "tier": config.tier, "revision": config.revision, "compat": config.compat,
            "pod": self._identity.pod_name, "uid": self._identity.pod_uid, "engine_pid": life.engine_pid,
            "running": load.running, "waiting": load.waiting, "leases": load.leases,
            "draining": life.phase == "Draining", "transport": self._transport(), "probe_gbps": self._fabric.gbps,
            "memlock_bytes": self._memlock_bytes(),
            "epoch": life.epoch, "changing_to": self._changing_to, "flip_problem": life.flip_problem,
            "adapters": self._adapters.report(), "seed": self._seed.report(),
        }  # fmt: skip

    def _transport(self) -> str | None:
        engine = self._running.process.ucx.transport if self._running.process is not None else None
        return fabric.told(self._config.kv.transport, self._fabric, engine)

    def _memlock_bytes(self) -> int | None:
        return fabric.limited_to(self._config.kv)

    async def metrics(self) -> str:
        """The engine's exposition, then the agent's own."""
        engine = await self._client.metrics()
        own = Own(
            self._life, self._config.role, engine is not None, self._running.start_s, self._running.log_dropped,
            self._transport(), self._fabric.gbps, self._memlock_bytes(),
        )  # fmt: skip
        lines = [*exposition(own), *self._seed.exposition()]
        return (engine or "").rstrip("\n") + "\n" + "\n".join(lines) + "\n"

    def tokenizer(self) -> dict[str, str] | None:
        """Answers /tokenizer."""
        return tokenizer_files(self._folder)

    async def drain(self) -> dict[str, object]:
        """Answers /drain: red at once; returns when nothing is left or the time is up. All callers wait for one drain."""
        return await asyncio.shield(self._begin_drain())

    def _begin_drain(self) -> asyncio.Task[dict[str, object]]:
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain())
        return self._drained

    def ask_to_stop(self) -> None:
        """SIGTERM: drain, then end. Without preStop (its hook failed, or nobody knows of it) this is the only notice that streams
        get; after preStop it waits for the same drain, which is over, or has what is left of its time. A second one ends now."""
        if self._ending is not None or not rules.is_started(self._life):
            self._stop.set()
            return

        async def end() -> None:
            try:
                await self._begin_drain()
            finally:
                self._stop.set()

        self._ending = asyncio.create_task(end())

    async def _drain(self) -> dict[str, object]:
        begun = time.monotonic()
        nothing_came = not rules.is_started(self._life) or not self._holds_any()
        self._life = rules.drain_asked(self._life, begun)
        emptied = nothing_came or await self._emptied(begun)
        if self._group is not None:
            self._group.release()
        if emptied:
            return {"drained": True, "waited_s": round(time.monotonic() - begun, 3)}
        load = self._load
        waited_s = round(time.monotonic() - begun, 3)
        return {"drained": False, "waited_s": waited_s, "running": load.running, "leases": load.leases}

    async def _emptied(self, begun: float) -> bool:
        """Wait until nothing is left; False when the time is up, the phase is another one by then, or the engine is stuck: what
        it holds comes to no end, and a worker that the kubelet restarts for that must not wait for it."""
        config, phase = self._config, self._life.phase
        while (waited_s := time.monotonic() - begun) < config.drain_timeout_s and self._life.phase == phase and self.live():
            await self._look()
            done = rules.drain_done(
                self._load,
                waited_s=waited_s,
                idle_for_s=time.monotonic() - self._busy_at,
                lease_s=config.kv.lease_s,
                has_lease_counter=config.engine == "torch",
                is_prefill=config.role == "prefill",
            )
            if done:
                return True
            await asyncio.sleep(DRAIN_POLL_S)
        return False

    async def _look(self) -> None:
        """What is left; what cannot be seen, whatever the reason, is not taken for nothing, and ends no drain."""
        try:
            await self._observe()
        except Exception as error:
            self._load = Load(None, None, None)
            self._told_fault("looking for what is left", error)

    def take_role(self, asked: Role) -> tuple[int, dict[str, object]]:
        """Answers POST /role with a status and what is said; the change itself goes on beside it."""
        keeps = self._config.engine == "vllm" and self._config.nodes > 1
        verdict = judge(self._life, self._config.role, self._changing_to, asked, keeps=keeps)
        if verdict.begin:
            self._changing_to = asked
            self._life = rules.flip_asked(self._life)
            self._change = asyncio.create_task(self._changed(asked))
        said: dict[str, object] = {"role": self._config.role, "changing_to": self._changing_to, "phase": self._life.phase}
        return verdict.status, said | ({"reason": verdict.reason} if verdict.reason else {})

    async def _changed(self, asked: Role) -> None:
        try:
            await self._take_role(asked)
        except Exception as error:  # whatever it is: a change that nobody works at must not be told to be on its way
            self._told_fault("taking a role", error)
            if self._life.phase == "FlippingRole":
                self._life = rules.flip_failed(self._life, f"{type(error).__name__}: {error}")

    async def _take_role(self, asked: Role) -> None:
        """Empty as for a drain, a first token again, then the new role. To keep its own nothing has to end."""
        stays = asked == self._config.role
        emptied = stays or self._running.role is None or await self._emptied(time.monotonic())
        if self._life.phase != "FlippingRole":
            return  # it drains for good
        if not emptied:
            why = f"not empty within {self._config.drain_timeout_s} s" if self.live() else "its engine does not answer"
            self._life = rules.flip_failed(self._life, why)
            return
        if self._config.engine == "vllm" and self._running.role != asked:
            problem = await self._start_anew(asked)
        else:
            problem = await self._first_token()
        if problem is None:
            await self._adapters.engine_there()
        if self._life.phase != "FlippingRole":
            return
        if problem is not None:
            self._life = rules.flip_failed(self._life, problem)
            return
        self._config = msgspec.structs.replace(self._config, role=asked)
        self._changing_to = None
        self._life = rules.returned(self._life) if stays else rules.flipped(self._life)

    async def _start_anew(self, role: Role) -> str | None:
        """Its engine once more, for this role. Why it does not serve, in words, or None."""
        self._life = rules.engine_anew(self._life, time.monotonic())
        self._note(f"engine starting anew, for {role}")
        self._adapters.engine_gone()
        pid = await self._running.begin_anew(msgspec.structs.replace(self._config, role=role))
        self._life = rules.engine_started(self._life, pid)
        answers = self._running.answers(self._client.healthy, lambda: self._life.phase == "FlippingRole", rules.ENGINE_START_S)
        return await answers or await self._first_token()

    async def _first_token(self) -> str | None:
        """None: it came. Else why not, in words."""
        problem = await self._client.first_token(self._config.served_name)
        if problem is None:
            self._running.served()
        return None if problem is None else f"no first token: {problem}"

    def take_adapters(self, wished: Sequence[AdapterWish]) -> dict[str, object]:
        """Answers POST /adapters: the whole set that should be there. What comes of it is in /state."""
        self._adapters.wish(wished)
        return {"adapters": self._adapters.report()}

    # -- life -------------------------------------------------------------------------------------------------------
    async def run(self) -> int:
        """Serve until SIGTERM, drain (0); or until the engine ends (EngineDiedError)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask_to_stop)
        server = build_server(build_app(self), self._identity.pod_ip, self._config.ports.agent)
        serving = asyncio.create_task(self._serve(server))
        working = asyncio.create_task(self._prepare_and_watch())
        try:
            first, _ = await asyncio.wait({serving, working}, return_when=asyncio.FIRST_COMPLETED)
            for task in first:
                task.result()
            return 0
        finally:
            ending = [task for task in (working, self._change, self._drained, self._ending) if task is not None]
            for one in ending:
                one.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            await self._running.stop()
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            await self._client.close()
            if self._group is not None:
                await self._group.close()
            if self._forwarder is not None:
                self._forwarder.close()
            if self._replays is not None:
                await self._replays.close()
            self._scratch.cleanup()

    async def _serve(self, server: AdminServer) -> None:
        try:
            await server.serve()
        except SystemExit as error:  # uvicorn's answer to a port that is taken
            raise ConfigError(f"agent port {self._config.ports.agent} on {self._identity.pod_ip} cannot be bound") from error

    async def _prove_fabric(self) -> None:
        """Returns when the asked transport is proven, or is not required; looks again and again otherwise, and says why."""
        settings = self._config.kv
        while settings.transport != "auto" and not self._stop.is_set():
            self._note(f"proving transport {settings.transport}")
            probed = await self._unless_stopped(fabric.probe(settings))
            if probed is None:
                return
            self._fabric = probed
            wrong = fabric.problem(settings, self._fabric)
            if wrong is None:
                return
            print(f"TransportMismatch: {wrong}", file=sys.stderr, flush=True)
            if not settings.required:
                return
            self._note(wrong)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), fabric.AGAIN_S)

    async def _prepare_and_watch(self) -> None:
        await self._prove_fabric()
        if self._stop.is_set():
            return
        folder = self._folder = await self._prepared()
        if folder is None or self._stop.is_set():
            return
        master = await self._unless_stopped(self._gathered())
        if master is None:
            return
        await self._start_engine(self._place(folder, master))
        stopping, losing = asyncio.create_task(self._stop.wait()), asyncio.create_task(self._engine_lost())
        checking = asyncio.gather(self._check_for_ever(), self._keep_adapters())
        ends: set[asyncio.Future[Any]] = {stopping, losing, *([self._group.lost] if self._group is not None else [])}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, losing, checking):
                task.cancel()
            await asyncio.gather(stopping, losing, checking, return_exceptions=True)
        engine = self._running.process
        if engine is not None and engine.exited.done() and self._holds_any() and not self._stop.is_set():
            if self._ending is not None and engine.exited.result() == 0:
                return  # the SIGTERM went to both of us, and the engine was empty first
            raise self._death(engine, engine.exited.result())
        if not self._stop.is_set() and self._group is not None:
            await self._end_without_group(self._group.lost.result())

    async def _engine_lost(self) -> None:
        """Returns when it ended by itself; whether it was to take another role is for who asked for that."""
        while not (self._running.ended and self._holds_any()):
            await self._running.over()

    def _holds_any(self) -> bool:
        """There is an engine in which requests may be."""
        return self._running.role is not None and self._life.anew_since is None

    async def _prepared(self) -> Path | None:
        """The folder with the model's files; None as soon as the worker is told to stop."""
        here = asyncio.get_running_loop()

        def note(text: str) -> None:
            """From the thread that fetches: what it read of our life may not be put back over what came meanwhile."""
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                here.call_soon_threadsafe(self._note, text)

        return await self._unless_stopped(alone(prepare_for, self._config, note))

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result, or None as soon as the worker is told to stop."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _gathered(self) -> str:
        """Where the engines of this worker's nodes meet, once all of its pods are there."""
        if self._config.nodes == 1:
            return ""
        identity, config, version = self._identity, self._config, version_of(self._config.model, self._folder or Path())
        self._group = Leader(identity.group_uid, config.nodes, identity.pod_ip, config.ports.group, self._is_left, version)
        try:
            await self._group.open()
        except OSError as error:
            raise ConfigError(f"group port {config.ports.group} on {identity.pod_ip} cannot be bound") from error
        return await self._group.whole(self._note)

    def _is_left(self, member: int) -> None:
        """A follower was told to go: it waits until nothing runs here."""
        print(f"GroupLeaving: pod {member} of this worker goes; draining", file=sys.stderr, flush=True)
        self._begin_drain()

    async def _end_without_group(self, why: str) -> None:
        """The torch engine lost no part of itself with a follower: what it runs is right, and may end."""
        if self._config.engine == "torch":
            await self._unless_stopped(self.drain())
        self._life = rules.failed(self._life, why)
        raise GroupLostError(why)

    def _place(self, folder: Path, master: str) -> Place:
        return Place(
            str(folder),
            self._identity.pod_ip,
            vllm=find_vllm() if self._config.engine == "vllm" else "",
            scratch=self._scratch.name,
            has_gpu=sees_gpu(),
            ucx=ucx_told(os.environ),
            token=self._token,
            member=self._identity.member,
            master=master,
        )

    async def _start_engine(self, place: Place) -> None:
        if self._config.engine == "vllm" and place.member == 0:
            try:
                await self._forward_events(place)
            except OSError as error:
                raise ConfigError(f"engine vllm cannot be started: {error}") from error
        self._life = rules.engine_started(self._life, self._running.begin(self._config, place))

    async def _forward_events(self, place: Place) -> None:
        """From vLLM's local sockets to the pod's address. OSError when a port of it is taken."""
        ports = self._config.ports
        self._forwarder = EventForwarder(events_socket(place), place.pod_ip, ports.kv_events)
        self._replays = ReplayForwarder(replay_socket(place), place.pod_ip, ports.kv_replay)
        await self._replays.open()

    def _death(self, engine: EngineProcess, code: int) -> EngineDiedError:
        how = how_ended(code)
        words = engine.last_words()
        self._life = rules.failed(self._life, f"engine ended: {how}")
        return EngineDiedError(f"{self._config.engine} engine ended ({how}): {words}".rstrip(": "), 2 if code == 2 else 1)

    async def _check_for_ever(self) -> None:
        while True:
            try:
                healthy = await self._checked()
            except Exception as error:  # whatever it is: readiness that nobody looks after any more must not stay green
                self._told_fault("checking the engine", error)
                healthy = False
            self._life = rules.engine_checked(self._life, healthy, time.monotonic())
            await asyncio.sleep(CHECK_EVERY_S)

    async def _checked(self) -> bool:
        _, answers = await asyncio.gather(self._observe(), self._client.healthy())
        healthy = answers and not self._is_stuck()
        return await self._warmed_up() if healthy and self._life.phase == "Warming" else healthy

    async def _warmed_up(self) -> bool:
        """Ready means that a token came out, not that a port is open."""
        self._note("engine warming up: first token")
        problem = await self._first_token()
        if problem is not None:
            self._note(f"engine answers, but gave {problem}")
            return False
        self._note("loading adapters, taking hot prefixes")
        self._engine_answers.set()
        await asyncio.gather(self._adapters.first_round(), self._seed.run())
        return True

    async def _keep_adapters(self) -> None:
        await self._engine_answers.wait()
        while True:
            try:
                await self._adapters.run()
            except Exception as error:  # it plans from what is there: beginning again loses nothing
                self._told_fault("keeping adapters", error)
            await asyncio.sleep(CHECK_EVERY_S)

    def _told_fault(self, what: str, error: Exception) -> None:
        self._told(f"AgentFault: {what}: {type(error).__name__}: {error}"[:500])

    def _told(self, said: str) -> None:
        """Once per fault, not per try."""
        if said != self._fault:
            self._fault = said
            print(said, file=sys.stderr, flush=True)

    async def _observe(self) -> None:
        load = self._load = await self._client.load()
        if load.running or load.waiting or load.ended not in (None, self._ended) or load.open not in (None, self._open):
            self._busy_at = time.monotonic()
        self._open = load.open if load.open is not None else self._open
        self._ended = load.ended if load.ended is not None else self._ended
        if load.leaving:
            self._begin_drain()
        self._pace = rules.paced(self._pace, load, time.monotonic())

    def _is_stuck(self) -> bool:
        """vLLM's /health is green as long as its processes live; the torch engine says it of itself."""
        most_s = step_timeout_s(os.environ, STILL_S)
        if self._config.engine != "vllm" or not rules.is_stuck(self._pace, time.monotonic(), most_s):
            return False
        self._told(f"EngineStuck: requests run, and nothing of them moves; {STEP_TIMEOUT_ENV} allows {most_s:g} s")
        return True

    def _note(self, text: str) -> None:
        self._life = rules.noted(self._life, text)
