"""The NIXL connector: blocks move by one-sided READ over UCX, in a thread of its own.

Owner side: leases in a LeaseTable, answered over a ZMQ ROUTER. Reader side, per pull: greet the owner once per pair → post
READs chunk by chunk → check each chunk's digests while the next one moves → ask the owner to confirm that the lease was valid
until now → only then report success. Whatever fails on the way is a typed error and no token.

Threads: the engine thread calls the public methods, which only touch queues and the lock; everything else runs in `_run`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec
import zmq

from fleet_wire.kv import KvReference
from fleet_wire.lease import LeaseTable
from fleet_wire.sidechannel import (
    PROTOCOL_VERSION,
    Confirm,
    Granted,
    Hello,
    Message,
    Refused,
    Renew,
    Welcome,
    decode,
    encode,
)
from fleet_worker.transfer.base import FetchResult, KvError, KvPool, KvReferenceError, KvTransferError, ReleaseReason
from fleet_worker.transfer.descriptors import merge_runs, split_chunks
from fleet_worker.transfer.digest import HEX_PER_BLOCK, first_mismatch, pool_digest
from fleet_worker.transfer.peers import Answer, Peer, Peers
from fleet_worker.transfer.transport import check_asked, in_use

CHUNK_BYTES = 4 * 1024 * 1024
IDLE_POLL_MS = 50
SERVING_POLL_MS = 1
SERVING_WINDOW_S = 1.0
"""After a reader announced itself the owner drives UCX for this long: connections are made, and TCP reads are answered, only
while it does. NIXL's own progress thread is off: it spins on a whole core, busy or not."""


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """One worker's side of the hand-off."""

    host: str
    port: int
    compat: str
    transport: str = "auto"
    lease_s: float = 30.0
    call_timeout_s: float = 5.0
    read_timeout_s: float = 60.0


@dataclass(slots=True)
class _Pull:
    request_id: str
    reference: KvReference
    remote: list[int]
    local: list[int]
    digest: str
    begun: float
    deadline: float
    renew_at: float
    cancelled: bool = False
    peer: Peer | None = None
    chunks: deque[range] = field(default_factory=deque)
    reading: range | None = None
    handle: Any = None
    descriptors: int = 0
    error: KvError | None = None


class NixlConnector:
    """Implements `fleet_worker.transfer.base.Connector`."""

    def __init__(self, settings: TransferSettings, pool: KvPool) -> None:
        check_asked(settings.transport)
        from nixl._api import nixl_agent, nixl_agent_config

        self.epoch = uuid4().hex
        self.engine_id = uuid4().hex
        self.transport = in_use()
        self._settings = settings
        self._pool = pool
        self._agent = nixl_agent(self.engine_id, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
        self._registered = self._agent.register_memory([(pool.base_address, pool.total_bytes, 0, "kv")], "DRAM")
        self._metadata: bytes = self._agent.get_agent_metadata()
        self._lock = threading.Lock()
        self._leases = LeaseTable(self.epoch, settings.lease_s)
        self._released: deque[tuple[str, ReleaseReason]] = deque()
        self._finished: deque[FetchResult] = deque()
        self._commands: deque[_Pull | str] = deque()
        self._pulls: dict[str, _Pull] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._server = self._bind(settings)
        self._wake_in, self._wake_out = self._wake_pair()
        self._peers = Peers(self._context, settings.call_timeout_s)
        self._stopping = False
        self._serve_until = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def _bind(self, settings: TransferSettings) -> zmq.Socket[bytes]:
        server = self._context.socket(zmq.ROUTER)
        server.setsockopt(zmq.LINGER, 0)
        server.setsockopt(zmq.MAXMSGSIZE, 1024 * 1024)
        try:
            server.bind(f"tcp://{settings.host}:{settings.port}")
        except zmq.ZMQError as error:
            server.close()
            self._context.term()
            self._agent.deregister_memory(self._registered)
            raise OSError(f"port {settings.port} on {settings.host} cannot be bound: {error.strerror}") from error
        return server

    def _wake_pair(self) -> tuple[int, int]:
        receive, send = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return receive, send

    # -- engine thread ----------------------------------------------------------------------------------------------
    def grant(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> KvReference:
        """Lease finished blocks; the digest is taken now, while nobody writes them."""
        digest = pool_digest(self._pool.base_address, self._pool.block_bytes, block_ids)
        with self._lock:
            lease = self._leases.grant(request_id, block_ids, time.monotonic())
        return KvReference(
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_block_ids=tuple(block_ids),
            remote_engine_id=self.engine_id,
            remote_request_id=request_id,
            remote_host=self._settings.host,
            remote_port=self._settings.port,
            remote_num_tokens=num_tokens,
            lease_id=lease.lease_id,
            lease_generation=lease.generation,
            remote_epoch=self.epoch,
            digest=digest,
        )

    def release(self, lease_id: str) -> bool:
        """End a lease that nobody will read."""
        with self._lock:
            lease = self._leases.release(lease_id)
            if lease is not None:
                self._released.append((lease.owner, "released"))
        return lease is not None

    def released(self) -> list[tuple[str, ReleaseReason]]:
        """Leases that ended since the last call; expiry is checked here as well as in the thread."""
        with self._lock:
            self._expire()
            ended, self._released = list(self._released), deque()
        return ended

    def fetch(self, request_id: str, reference: KvReference, skip: int, into: Sequence[int]) -> None:
        """Start a pull of the reference's blocks from index `skip` on."""
        remote = [block for block in reference.remote_block_ids if isinstance(block, int)][skip:]
        if len(reference.digest) != HEX_PER_BLOCK * len(reference.remote_block_ids) or len(remote) != len(into):
            raise KvReferenceError("shape", "kv_transfer_params: digest and block list do not fit each other")
        now = time.monotonic()
        digest = reference.digest[skip * HEX_PER_BLOCK :]
        deadline, renew_at = now + self._settings.read_timeout_s, now + self._settings.lease_s / 3
        self._send(_Pull(request_id, reference, remote, list(into), digest, now, deadline, renew_at))

    def cancel(self, request_id: str) -> None:
        """The result is not wanted any more."""
        self._send(request_id)

    def finished(self) -> list[FetchResult]:
        """Pulls that ended since the last call."""
        with self._lock:
            ended, self._finished = list(self._finished), deque()
        return ended

    def open_leases(self) -> int:
        """Leases granted and not ended."""
        with self._lock:
            return len(self._leases)

    def close(self) -> None:
        """Stop the thread, free NIXL's registration and every socket."""
        self._stopping = True
        os.write(self._wake_out, b"x")
        self._thread.join(timeout=5)
        self._agent.deregister_memory(self._registered)
        for descriptor in (self._wake_in, self._wake_out):
            os.close(descriptor)

    def _send(self, command: _Pull | str) -> None:
        self._commands.append(command)
        try:
            os.write(self._wake_out, b"x")
        except BlockingIOError:
            return  # the pipe is full: the thread is awake anyway

    # -- transfer thread --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stopping:
            self._wait()
            now = time.monotonic()
            self._take_commands()
            self._serve(now)
            self._peers.receive()
            self._peers.expire(now)
            if now < self._serve_until:
                self._agent.get_new_notifs()  # drives UCX for whoever reads from us
            for pull in list(self._pulls.values()):
                self._advance(pull, now)
            with self._lock:
                self._expire()
        self._peers.close()
        self._server.close()
        self._context.term()

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
        if any(pull.reading is not None for pull in self._pulls.values()):
            return 0
        if time.monotonic() < self._serve_until:
            return 0 if self.transport == "tcp" else SERVING_POLL_MS
        return IDLE_POLL_MS

    def _expire(self) -> None:
        for lease in self._leases.expire(time.monotonic()):
            self._released.append((lease.owner, "expired"))

    def _take_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Pull):
                self._pulls[command.request_id] = command
                self._greet(command)
            elif command in self._pulls:
                self._pulls[command].cancelled = True

    # owner side
    def _serve(self, now: float) -> None:
        while True:
            try:
                frames = self._server.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 2:
                continue
            try:
                asked = decode(frames[1])
            except (msgspec.DecodeError, ValueError):
                continue  # random bytes: nothing to answer
            self._server.send_multipart([frames[0], encode(self._reply(asked, now))], zmq.DONTWAIT)

    def _reply(self, asked: Message, now: float) -> Answer:
        if isinstance(asked, Hello | Renew):
            self._serve_until = now + SERVING_WINDOW_S
        if isinstance(asked, Hello):
            return self._welcome(asked)
        if isinstance(asked, Renew | Confirm):
            with self._lock:
                return self._lease_reply(asked, now)
        return Refused(call=asked.call, reason="protocol", message="not a question")

    def _lease_reply(self, asked: Renew | Confirm, now: float) -> Answer:
        if isinstance(asked, Renew):
            refused = self._leases.renew(asked.lease_id, asked.epoch, asked.generation, now)
            return Granted(call=asked.call) if refused is None else Refused(call=asked.call, reason=refused)
        found = self._leases.confirm(asked.lease_id, asked.epoch, asked.generation, now)
        if isinstance(found, str):
            return Refused(call=asked.call, reason=found)
        self._released.append((found.owner, "read"))
        if not len(self._leases):
            self._serve_until = 0.0
        return Granted(call=asked.call)

    def _welcome(self, asked: Hello) -> Answer:
        mine = (PROTOCOL_VERSION, self._settings.compat, self._pool.block_bytes, self._pool.block_tokens)
        theirs = (asked.version, asked.compat, asked.block_bytes, asked.block_tokens)
        if mine != theirs:
            names = ("protocol version", "compatibility hash", "block bytes", "block tokens")
            wrong = ", ".join(
                f"{n}: prefill has {b}, decode has {a}" for n, a, b in zip(names, theirs, mine, strict=True) if a != b
            )
            return Refused(call=asked.call, reason="incompatible", message=wrong)
        pool = self._pool
        return Welcome(
            call=asked.call, engine_id=self.engine_id, epoch=self.epoch, agent=self._metadata,
            base_address=pool.base_address, block_bytes=pool.block_bytes, num_blocks=pool.num_blocks,
        )  # fmt: skip

    # reader side
    def _greet(self, pull: _Pull) -> None:
        peer = self._peers.get(pull.reference.remote_host, pull.reference.remote_port)
        if peer.welcome is not None and peer.welcome.epoch != pull.reference.remote_epoch:
            self._forget(peer)  # the owner restarted on the same address
            peer = self._peers.get(pull.reference.remote_host, pull.reference.remote_port)
        pull.peer = peer
        if peer.welcome is not None:
            self._begin(pull, peer.welcome)
            return
        peer.waiting_for_welcome.append(lambda answer: self._greeted(pull, peer, answer))
        if not peer.greeting:
            peer.greeting = True
            pool, compat = self._pool, self._settings.compat
            self._peers.call(
                peer,
                lambda call: Hello(
                    call=call,
                    version=PROTOCOL_VERSION,
                    compat=compat,
                    block_bytes=pool.block_bytes,
                    block_tokens=pool.block_tokens,
                ),
                time.monotonic(),
                lambda answer: self._welcomed(peer, answer),
            )

    def _welcomed(self, peer: Peer, answer: Answer | KvTransferError) -> None:
        peer.greeting = False
        if isinstance(answer, Welcome):
            peer.agent_name = self._name(self._agent.add_remote_agent(answer.agent))
            peer.welcome = answer
        waiting, peer.waiting_for_welcome = peer.waiting_for_welcome, []
        for tell in waiting:
            tell(answer)
        if isinstance(answer, KvTransferError):
            self._forget(peer)

    @staticmethod
    def _name(found: str | bytes) -> str:
        return found.decode() if isinstance(found, bytes) else found

    def _greeted(self, pull: _Pull, peer: Peer, answer: Answer | KvTransferError) -> None:
        if isinstance(answer, KvTransferError):
            self._end(pull, answer)
        elif isinstance(answer, Refused):
            self._end(pull, KvReferenceError(answer.reason, f"the prefill worker refused the pairing: {answer.message}"))
        elif peer.welcome is not None:
            self._begin(pull, peer.welcome)

    def _begin(self, pull: _Pull, welcome: Welcome) -> None:
        reference = pull.reference
        if welcome.epoch != reference.remote_epoch or welcome.engine_id != reference.remote_engine_id:
            self._end(pull, KvTransferError("epoch", "the prefill worker restarted after it gave this reference"))
        elif any(not 0 <= block < welcome.num_blocks for block in pull.remote):
            self._end(pull, KvReferenceError("range", f"remote_block_ids outside 0..{welcome.num_blocks - 1}"))
        else:
            pull.chunks = deque(split_chunks(len(pull.local), self._pool.block_bytes, CHUNK_BYTES))
            if pull.peer is not None:
                self._renew(pull, pull.peer, time.monotonic())
            self._post_next(pull)

    def _post_next(self, pull: _Pull) -> None:
        """Post the next chunk's READ, or ask for the confirmation when all are here."""
        peer = pull.peer
        if peer is None or peer.welcome is None:
            self._end(pull, KvTransferError("peer", "the prefill worker was forgotten during the read"))
            return
        if not pull.chunks or pull.cancelled:
            pull.reading = None
            self._confirm(pull, peer)
            return
        chunk = pull.chunks.popleft()
        size, mine, theirs = self._pool.block_bytes, self._pool.base_address, peer.welcome.base_address
        runs = merge_runs([pull.remote[i] for i in chunk], [pull.local[i] for i in chunk])
        local = self._agent.get_xfer_descs([(mine + r.local * size, r.count * size, 0) for r in runs], "DRAM")
        remote = self._agent.get_xfer_descs([(theirs + r.remote * size, r.count * size, 0) for r in runs], "DRAM")
        pull.descriptors += len(runs)
        try:
            pull.handle = self._agent.initialize_xfer("READ", local, remote, peer.agent_name)
            state = self._agent.transfer(pull.handle)
        except Exception as error:  # NIXL raises many binding types, all of them mean that this read failed
            self._end(pull, KvTransferError("read", f"NIXL refused the read: {error}"))
            return
        pull.reading = chunk
        if state == "ERR":
            self._end(pull, KvTransferError("read", "NIXL reported an error when the read was posted"))

    def _advance(self, pull: _Pull, now: float) -> None:
        if now >= pull.renew_at and pull.peer is not None:
            self._renew(pull, pull.peer, now)
        if pull.reading is None:
            return
        try:
            state = self._agent.check_xfer_state(pull.handle)
        except Exception as error:  # as above
            self._end(pull, KvTransferError("read", f"NIXL lost the read: {error}"))
            return
        if state == "PROC":
            return
        chunk = pull.reading
        self._agent.release_xfer_handle(pull.handle)
        pull.handle = None
        if state != "DONE":
            self._end(pull, KvTransferError("read", f"NIXL ended the read with {state}"))
            return
        self._post_next(pull)  # the next chunk moves while this one is checked
        self._check(pull, chunk)

    def _check(self, pull: _Pull, chunk: range) -> None:
        if pull.error is not None:
            return
        expected = pull.digest[chunk.start * HEX_PER_BLOCK : chunk.stop * HEX_PER_BLOCK]
        wrong = first_mismatch(self._pool.base_address, self._pool.block_bytes, [pull.local[i] for i in chunk], expected)
        if wrong is not None:
            pull.error = KvTransferError("digest", f"block {chunk.start + wrong} arrived with other bytes than were leased")

    def _renew(self, pull: _Pull, peer: Peer, now: float) -> None:
        pull.renew_at = now + self._settings.lease_s / 3
        lease = pull.reference
        self._peers.call(
            peer,
            lambda call: Renew(call=call, lease_id=lease.lease_id, epoch=lease.remote_epoch, generation=lease.lease_generation),
            now,
            lambda _: None,  # what counts is the confirmation after the read
        )

    def _confirm(self, pull: _Pull, peer: Peer) -> None:
        lease = pull.reference
        self._peers.call(
            peer,
            lambda call: Confirm(call=call, lease_id=lease.lease_id, epoch=lease.remote_epoch, generation=lease.lease_generation),
            time.monotonic(),
            lambda answer: self._confirmed(pull, answer),
        )

    def _confirmed(self, pull: _Pull, answer: Answer | KvTransferError) -> None:
        if isinstance(answer, KvTransferError):
            self._end(pull, answer)
        elif isinstance(answer, Refused):
            self._end(pull, KvTransferError(f"lease-{answer.reason}", f"the lease was not valid after the read: {answer.reason}"))
        else:
            self._end(pull, pull.error)

    def _end(self, pull: _Pull, error: KvError | None) -> None:
        if self._pulls.pop(pull.request_id, None) is None:
            return
        if pull.handle is not None:
            self._agent.release_xfer_handle(pull.handle)
        moved = 0 if error is not None else len(pull.local) * self._pool.block_bytes
        result = FetchResult(pull.request_id, error, moved, time.monotonic() - pull.begun, pull.descriptors)
        if error is not None and error.reason in ("read", "epoch", "timeout") and pull.peer is not None:
            self._forget(pull.peer)  # greet again: the peer may have come back with new memory
        with self._lock:
            self._finished.append(result)

    def _forget(self, peer: Peer) -> None:
        if peer.agent_name:
            name, peer.agent_name = peer.agent_name, ""
            with contextlib.suppress(Exception):  # NIXL may have dropped it already when the peer died; forgetting is the goal
                self._agent.remove_remote_agent(name)
        peer.welcome = None
        self._peers.drop(peer)
