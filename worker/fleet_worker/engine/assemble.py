"""Puts one engine process together: model, pool, connector, KV events, loop, server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
import uvicorn

from fleet_wire.blocks import root_hash
from fleet_wire.peerkey import HANDOFF_PROOF_ENV, HANDOFF_REQUIRED, PEER_KEY_ENV
from fleet_worker.config import ENGINE_TOKEN_ENV, WorkerConfig, step_timeout_s
from fleet_worker.connections import Bounds, bounded, files_for_connections
from fleet_worker.engine.blocks import BlockAllocator
from fleet_worker.engine.core import EngineCore, Limits
from fleet_worker.engine.errors import ModelFilesError
from fleet_worker.engine.heat import Heat
from fleet_worker.engine.kvevents import KvEventPublisher
from fleet_worker.engine.lending import Lender, part_blocks
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.metrics import EngineMetrics
from fleet_worker.engine.modelconfig import ModelConfig, read_config, read_defaults
from fleet_worker.engine.seeding import Hot, Seeder
from fleet_worker.engine.sequence import Defaults
from fleet_worker.engine.server import EngineServer
from fleet_worker.engine.text import Text, text_digest
from fleet_worker.engine.weights import load_weights
from fleet_worker.transfer.base import KvPool
from fleet_worker.transfer.nixl import NixlConnector
from fleet_worker.transfer.owner import TransferSettings

STEP_TOKENS = 256
MAX_WAITING = 1_024
KEEP_ALIVE_S = 75  # longer than the router's pool keeps a connection, so that the worker never closes first
SHUTDOWN_S = 5
DRAIN_POLL_S = 0.05
RECEIVE_S = 60.0
"""For the whole of a body, of 4 MB at most, also by a client that asks without a router and has a slow line."""
MAX_CONNECTIONS = 2_048
"""More than the engine takes requests; routers keep some idle."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class EngineProcess:
    """One running engine."""

    def __init__(
        self, config: WorkerConfig, host: str, core: EngineCore, text: Text, events: KvEventPublisher, defaults: Defaults
    ) -> None:  # fmt: skip
        self._config, self._host = config, host
        self._metrics = EngineMetrics(config.served_name)
        self._events = events
        self._loop = EngineLoop(core, self._stopped, lambda c: events.publish(c.take_cache_events()))
        self._server: _Server | None = None
        self._text, self._defaults = text, defaults
        self._draining: asyncio.Task[None] | None = None
        """Since the first SIGTERM."""

    def _stopped(self, error: BaseException) -> None:
        """The engine thread died: open requests were told; the process ends so that it is restarted clean."""
        traceback.print_exception(error)
        self._end()

    def _end(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    def _told_to_go(self, front: EngineServer) -> None:
        """SIGTERM, which the agent never sends: somebody means all of the pod's processes, or this one. A second one ends now."""
        if self._draining is not None:
            self._end()
            return
        print("EngineLeaving: SIGTERM; nothing new is taken, what runs goes on to its end", file=sys.stderr, flush=True)
        self._draining = asyncio.create_task(self._drain(front))

    async def _drain(self, front: EngineServer) -> None:
        """As the agent's: until no request and no unread lease is left, at most the drain's time."""
        front.leave()
        end = time.monotonic() + self._config.drain_timeout_s
        while True:
            if not front.holds() or time.monotonic() >= end:
                self._end()
                return
            await asyncio.sleep(DRAIN_POLL_S)

    async def run(self) -> int:
        """Serve until told to end (0) or until the engine thread fails (1). SIGINT is the agent's, which has drained by then."""
        bound = bind(self._host, self._config.ports.http)
        token, step_s = os.environ.get(ENGINE_TOKEN_ENV, ""), step_timeout_s(os.environ)
        front = EngineServer(self._config, self._loop, self._text, self._metrics, token, step_s, self._defaults)
        server = self._server = _Server(
            uvicorn.Config(
                front.app(), http=bounded(bounds_for(self._host)), ws="none", loop="asyncio", lifespan="off", log_level="warning",
                access_log=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=SHUTDOWN_S,
                h11_max_incomplete_event_size=65_536,
            )
        )  # fmt: skip
        signals = asyncio.get_running_loop()
        signals.add_signal_handler(signal.SIGTERM, lambda: self._told_to_go(front))
        signals.add_signal_handler(signal.SIGINT, self._end)
        self._loop.start()
        try:
            await server.serve(sockets=[bound])
        finally:
            front.close()
            self._loop.stop()
            if self._loop.core.connector is not None:
                self._loop.core.connector.close()
            self._events.close()
        failure = self._loop.failure
        if failure is not None:
            print(f"EngineFailed: {type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
        return 0 if failure is None else 1


def bounds_for(host: str) -> Bounds:
    """A stream is never cut for another one: who comes last is refused. `host`: the agent asks for its health from there."""
    most = min(MAX_CONNECTIONS, files_for_connections())
    return Bounds(RECEIVE_S, most=most, most_of_peer=most, may_cut=False, spared=frozenset({host}))


def bind(host: str, port: int) -> socket.socket:
    """Listening socket; OSError names address and port."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise OSError(f"port {port} on {host} cannot be bound: {error.strerror}") from error
    return made


def assemble(config: WorkerConfig, folder: Path, host: str) -> EngineProcess:
    """Load everything; ModelFilesError when the model cannot be served, OSError when an address is taken."""
    torch.set_grad_enabled(False)
    bind(host, config.ports.http).close()  # fail before the model is loaded
    architecture = read_config(folder)
    if config.max_model_len > architecture.max_positions:
        raise ModelFilesError(
            f"maxModelLen is {config.max_model_len}, the model was made for {architecture.max_positions} positions"
        )
    text, defaults = Text(folder), read_defaults(folder)
    llama = load_llama(folder, architecture, config.kv.block_tokens)
    core, pool = build_core(config, llama, end_ids(architecture, text))
    settings = TransferSettings(
        host=host,
        port=config.ports.side_channel,
        compat=config.compat,
        transport=config.kv.transport,
        required=config.kv.required,
        lease_s=config.kv.lease_s,
        peer_key=Path(key) if (key := os.environ.get(PEER_KEY_ENV)) else None,
        scope=f"{config.namespace}/{config.fleet}",
        proof_required=os.environ.get(HANDOFF_PROOF_ENV) == HANDOFF_REQUIRED,
    )
    core.connector = connector = NixlConnector(settings, pool)
    if config.kv.seed is not msgspec.UNSET:
        core.hot = build_hot(config, core, pool, connector)
    events = KvEventPublisher(host, config.ports.kv_events, config.ports.kv_replay, config.kv.block_tokens)
    return EngineProcess(config, host, core, text, events, defaults)


def build_hot(config: WorkerConfig, core: EngineCore, pool: KvPool, connector: NixlConnector) -> Hot:
    """Both halves of seeding, over the hand-off's side channel."""
    weights, root = core.model.weights_digest, root_hash(config.compat, config.kv.block_tokens)
    lender = Lender(core, weights, part_blocks(pool.block_bytes, pool.block_tokens))
    seeder = Seeder(core, connector.hot, connector, weights, root, pool.block_tokens, pool.block_bytes)
    connector.hot.is_answered = True
    return Hot(connector.hot, lender, seeder, time.monotonic)


def end_ids(architecture: ModelConfig, text: Text) -> tuple[int, ...]:
    """What ends an answer: the configuration's tokens and, as with vLLM, the tokenizer's own. Of many models that were tuned for
    chats the tokenizer alone was changed."""
    own = text.eos_id
    if own is None or own in architecture.eos_ids or own >= architecture.vocab_size:
        return architecture.eos_ids
    return (*architecture.eos_ids, own)


def load_llama(folder: Path, architecture: ModelConfig, block_tokens: int) -> Llama:
    """The model of a folder, which knows what its KV depends on; ModelFilesError."""
    return Llama(architecture, load_weights(folder, architecture), block_tokens, text_digest(folder))


def build_core(config: WorkerConfig, llama: Llama, eos_ids: tuple[int, ...]) -> tuple[EngineCore, KvPool]:
    """Pool of the configured size and the core over it."""
    block_bytes = llama.new_pool(1).nbytes
    num_blocks = config.kv.cache_bytes // block_bytes
    if num_blocks * config.kv.block_tokens < config.max_model_len:
        raise ModelFilesError(
            f"cacheSize of {config.kv.cache_bytes} bytes holds {num_blocks * config.kv.block_tokens} tokens, "
            f"maxModelLen is {config.max_model_len}"
        )
    tensor = llama.new_pool(num_blocks)
    limits = Limits(config.max_model_len, config.max_batch, STEP_TOKENS, MAX_WAITING)
    root = root_hash(config.compat, config.kv.block_tokens)
    allocator = BlockAllocator(num_blocks, Heat() if config.kv.seed is not msgspec.UNSET else None)
    core = EngineCore(llama, allocator, tensor, root, limits, eos_ids)
    return core, KvPool(tensor.data_ptr(), block_bytes, num_blocks, config.kv.block_tokens)
