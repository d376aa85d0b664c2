"""The NIXL connector: blocks move by one-sided READ over UCX, in a thread of its own.

Owner side (`owner.py`): leases, answered over a ZMQ ROUTER. Reader side (`reader.py`): pulls, proven by `proving.py`.
Threads: the engine thread calls the public methods, which only touch queues and locks; everything else runs in `_run`. Should
that thread ever end by an exception, every pull fails and `finished` raises: the engine stops, and the agent says why.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import zmq

from fleet_wire.kv import KvReference
from fleet_wire.sidechannel import AskHot, BadFrameError, decode, encode
from fleet_worker.transfer.address import KEPT_ALIVE, tcp_address
from fleet_worker.transfer.base import FetchResult, KvPool, KvReferenceError, KvTransferError, ReleaseReason
from fleet_worker.transfer.digest import HEX_PER_BLOCK
from fleet_worker.transfer.faults import Faults
from fleet_worker.transfer.handoff import HANDOFF_REASONS, Handoff
from fleet_worker.transfer.hot import HotLine
from fleet_worker.transfer.owner import Owner, TransferSettings
from fleet_worker.transfer.peers import Peers
from fleet_worker.transfer.proving import Prover
from fleet_worker.transfer.reader import Pull, Reader
from fleet_worker.transfer.transport import cannot_begin, check_asked, in_use

IDLE_POLL_MS = 50
SERVING_POLL_MS = 1
MAX_MESSAGE_BYTES = 1024 * 1024
MAX_SOCKETS = 4_096
FRAMES_PER_TURN = 256
"""Questions that are answered before the reads are looked at again."""
LOG = logging.getLogger("fleet.worker.transfer")


def _begun(name: str) -> Any:
    """NIXL's agent; KvTransferError."""
    from nixl._api import nixl_agent, nixl_agent_config

    try:
        return nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    except Exception as error:  # NIXL raises many binding types
        raise cannot_begin(error, os.environ) from error


class NixlConnector:
    """Implements `fleet_worker.transfer.base.Connector`."""

    def __init__(self, settings: TransferSettings, pool: KvPool) -> None:
        check_asked(settings.transport, settings.required)
        self.engine_id = uuid4().hex
        self.transport = in_use()
        self._agent = _begun(self.engine_id)
        self._registered = self._agent.register_memory([(pool.base_address, pool.total_bytes, 0, "kv")], "DRAM")
        self._handoff = Handoff(settings.peer_key, settings.scope, is_required=settings.proof_required)
        self._owner = Owner(settings, pool, self.engine_id, self._agent.get_agent_metadata(), self._handoff)
        self._finished: deque[FetchResult] = deque()
        self._commands: deque[Pull | str | tuple[str, KvReference]] = deque()
        self._faults = Faults()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._server = self._bind(settings)
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._prover = Prover(pool, self._wake)
        self.hot = HotLine(settings, pool, self._wake)
        self._peers = Peers(self._context, settings.call_timeout_s, self._faults)
        self._reader = Reader(
            settings, pool, self._agent, self._peers, self._prover, self._finished.append, self._faults, self._handoff
        )
        self._stopping = False
        self._failure: Exception | None = None
        self._begun_at: float | None = None
        """When the turn that lasts now began; None while the transfer thread waits."""
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def _bind(self, settings: TransferSettings) -> zmq.Socket[bytes]:
        server = self._context.socket(zmq.ROUTER)
        server.setsockopt(zmq.LINGER, 0)
        server.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        server.setsockopt(zmq.IPV6, 1)
        for option, value in KEPT_ALIVE.items():
            server.setsockopt(option, value)
        try:
            server.bind(tcp_address(settings.host, settings.port))
        except zmq.ZMQError as error:
            server.close()
            self._context.term()
            self._agent.deregister_memory(self._registered)
            raise OSError(f"port {settings.port} on {settings.host} cannot be bound: {error.strerror}") from error
        return server

    # -- engine thread ----------------------------------------------------------------------------------------------
    def grant(self, request_id: str, block_ids: Sequence[int], num_tokens: int, prompt: str = "") -> KvReference:
        """Lease finished blocks."""
        return self._owner.grant(request_id, block_ids, num_tokens, prompt)

    def release(self, lease_id: str) -> bool:
        """End a lease that nobody will read."""
        return self._owner.release(lease_id)

    def released(self) -> list[tuple[str, ReleaseReason]]:
        """Leases that ended since the last call."""
        return self._owner.released()

    def open_leases(self, besides: str = "") -> int:
        """Leases granted and not ended, without the one of that id."""
        return self._owner.open_leases(besides)

    def dropped_frames(self) -> int:
        """What came over the side channel and could not be used."""
        return self._faults.total

    def strangers(self) -> Mapping[str, int]:
        """Greetings, and answers to ours, that were not believed, by `handoff.HANDOFF_REASONS`."""
        return {why: self._handoff.refused[why] for why in HANDOFF_REASONS}

    def is_guarded(self) -> bool:
        """KV goes to those alone that prove the fleet's key."""
        return self._handoff.is_guarded

    def hold(self, request_id: str, reference: KvReference) -> None:
        """Renew the lease until `fetch` or `cancel` of the request."""
        self._send((request_id, reference))

    def fetch(self, request_id: str, reference: KvReference, skip: int, into: Sequence[int]) -> None:
        """Start a pull of the reference's blocks from index `skip` on."""
        remote = [block for block in reference.remote_block_ids if isinstance(block, int)][skip:]
        if len(reference.digest) != HEX_PER_BLOCK * len(reference.remote_block_ids) or len(remote) != len(into):
            raise KvReferenceError("shape", "kv_transfer_params: digest and block list do not fit each other")
        digest = reference.digest[skip * HEX_PER_BLOCK :]
        self._send(Pull(request_id, reference, remote, list(into), digest, time.monotonic()))

    def cancel(self, request_id: str) -> None:
        """The result is not wanted any more."""
        self._send(request_id)

    def finished(self) -> list[FetchResult]:
        """Pulls that ended since the last call; RuntimeError once the transfer thread is gone and all results were taken."""
        ended = []
        while self._finished:
            ended.append(self._finished.popleft())
        if not ended and self._failure is not None:
            raise RuntimeError(f"the KV transfer thread ended: {self._failure}") from self._failure
        return ended

    def turn_s(self) -> float:
        """Seconds that the turn has lasted which the transfer thread is in now; 0 when it waits. Any thread."""
        begun_at = self._begun_at
        return 0.0 if begun_at is None else time.monotonic() - begun_at

    def close(self) -> None:
        """Stop the threads, free NIXL's registration and every socket."""
        self._stopping = True
        self._wake()
        self._thread.join(timeout=5)
        self._prover.close()
        self._agent.deregister_memory(self._registered)
        for descriptor in (self._wake_in, self._wake_out):
            os.close(descriptor)

    def _send(self, command: Pull | str | tuple[str, KvReference]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_out, b"x")
        except BlockingIOError:
            return  # the pipe is full: the thread is awake anyway

    # -- transfer thread --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._stopping:
                self._begun_at = None
                self._wait()
                now = self._begun_at = time.monotonic()
                self._turn(now)
        except Exception as error:  # whatever it is: requests must end and the engine must know
            LOG.exception("the KV transfer thread ended")
            self._reader.fail_all(KvTransferError("stopped", f"the KV transfer of this worker stopped: {error}"))
            self._failure = error
        self._begun_at = None
        self._peers.close()
        self._server.close()
        self._context.term()

    def _turn(self, now: float) -> None:
        self._handoff.follow(now)
        self._take_commands(now)
        self._serve(now)
        self.hot.advance(self._server, self._peers, self._reader.reach)
        self._peers.receive()
        self._peers.expire(now)
        if self._owner.drives_until(now) > now:
            self._agent.get_new_notifs()  # drives UCX for whoever reads from us
        self._reader.advance(now)
        self._owner.expire()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        for socket in (self._server, *self._peers.sockets()):
            poller.register(socket, zmq.POLLIN)
        poller.poll(self._poll_ms())
        try:
            os.read(self._wake_in, 4096)
        except BlockingIOError:
            return

    def _poll_ms(self) -> int:
        if self._reader.is_reading:
            return 0
        now = time.monotonic()
        if now < self._owner.serve_until and self.transport == "tcp":
            return 0
        if self._reader.lingers or self._owner.drives_until(now) > now:
            return SERVING_POLL_MS
        return IDLE_POLL_MS

    def _take_commands(self, now: float) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Pull):
                self._reader.begin(command)
            elif isinstance(command, tuple):
                self._reader.holder.hold(*command, now)
            else:
                self._reader.cancel(command)

    def _serve(self, now: float) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                frames = self._server.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._reply(frames, now)
            except BadFrameError as error:
                self._faults.count("a question on the side channel", error)  # random bytes: nothing to answer
            except Exception as error:  # whatever anybody sends: it is not answered, and nothing else happens
                self._faults.count("a question on the side channel", error, unexpected=True)

    def _reply(self, frames: list[bytes], now: float) -> None:
        if len(frames) != 2:
            raise BadFrameError(f"{len(frames)} frames, expected 2")
        asked = decode(frames[1])
        answer = self.hot.came(frames[0], asked) if isinstance(asked, AskHot) else self._owner.reply(asked, now)
        if answer is not None:
            self._server.send_multipart([frames[0], encode(answer)], zmq.DONTWAIT)
