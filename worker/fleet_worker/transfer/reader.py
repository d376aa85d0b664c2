"""The reader's half of a hand-off. Per pull: greet the owner once per pair → post READs chunk by chunk → have each chunk's
digests compared while the next one moves → ask the owner to confirm that the lease was valid until now → only when both say
yes, report success. Whatever fails on the way is a typed error and no token. Used by the transfer thread only.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleet_wire.kv import KvReference
from fleet_wire.sidechannel import Challenge, Confirm, Granted, Hottest, Refused, Welcome
from fleet_worker.transfer.base import FetchResult, KvError, KvPool, KvReferenceError, KvTransferError
from fleet_worker.transfer.descriptors import merge_runs, split_chunks
from fleet_worker.transfer.digest import HEX_PER_BLOCK
from fleet_worker.transfer.faults import Faults
from fleet_worker.transfer.greeting import MOST_REASON, Greeter, refusal_error
from fleet_worker.transfer.handoff import Handoff
from fleet_worker.transfer.holding import Holder, renewal
from fleet_worker.transfer.owner import SERVING_WINDOW_S, TransferSettings
from fleet_worker.transfer.peers import Answer, Peer, Peers
from fleet_worker.transfer.proving import Proof, Prover

CHUNK_BYTES = 8 * 1024 * 1024
SPARE_AGENTS = 256
"""Owners that NIXL knows though no peer has them. UCX never closes the sockets of a live one that is forgotten (two at each end,
as often as it is greeted again), so that it is not forgotten before there are too many."""
STUCK_AFTER = 2.0
"""A read that does not end may write into blocks at any time: after this many read timeouts the worker gives up when such blocks
are more than LOST_MOST of its cache."""
LOST_MOST = 0.5
STUCK_S = 1200.0
"""After this long it gives up for one block, too. Before that it serves on without them: of a node that lost its power a kernel
says so after some 15 minutes (tcp_retries2), and every worker that read from it would end its streams."""
DISCONNECTED = "nixlRemoteDisconnectError"
"""NIXL's word for a connection that failed: UCX closed it by force, and writes nothing more for what went over it."""
FENCE_EVERY_S = 0.05


class StuckReadError(RuntimeError):
    """A read does not end: its blocks can never be used again, so the engine must be restarted."""


@dataclass(slots=True)
class Pull:
    """One request's KV on its way here."""

    request_id: str
    reference: KvReference
    remote: list[int]
    local: list[int]
    digest: str
    begun: float
    pull_id: int = 0
    renew_at: float = 0.0
    greeted_by: float = float("inf")
    """Its owner is greeted by then, however often it is greeted anew; inf: that was not needed."""
    cancelled: bool = False
    peer: Peer | None = None
    chunks: deque[range] = field(default_factory=deque)
    reading: range | None = None
    handle: Any = None
    descriptors: int = 0
    unproven: int = 0
    confirmed: bool = False
    agent_name: str = ""
    """Whom NIXL reads from."""
    given_up: KvTransferError | None = None
    """Why its read is not waited for any longer."""
    fence_at: float = float("inf")
    """Its read was refused half posted, and a READ behind it is posted then."""
    lingers: bool = False
    """That was told, and the read is still in flight."""
    error: KvError | None = None


class Reader:
    """All pulls of one engine. `agent` is NIXL's, `done` takes each result."""

    def __init__(
        self,
        settings: TransferSettings,
        pool: KvPool,
        agent: Any,
        peers: Peers,
        prover: Prover,
        done: Callable[[FetchResult], None],
        faults: Faults,
        handoff: Handoff,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._agent = agent
        self._peers = peers
        self._prover = prover
        self._done = done
        self._faults = faults
        self._handoff = handoff
        self._greeter = Greeter(settings, pool, peers, handoff)
        self.holder = Holder(settings.lease_s, peers, self.reach)
        self._pulls: dict[str, Pull] = {}
        self._by_id: dict[int, Pull] = {}
        self._spare: dict[str, bool] = {}
        """Agents that no peer has, the longest so first, and whether each is to be forgotten once nothing is read from it."""
        self._told: dict[str, bytes] = {}
        """What NIXL was told of each agent that it knows."""
        self._ids = itertools.count(1)

    @property
    def is_reading(self) -> bool:
        """A READ is in flight and must be driven."""
        return any(pull.reading is not None and not pull.lingers for pull in self._pulls.values())

    @property
    def lingers(self) -> bool:
        """A READ is in flight that nobody waits for, but its blocks."""
        return any(pull.lingers for pull in self._pulls.values())

    def begin(self, pull: Pull) -> None:
        """Greet the owner if that has not been done, then read."""
        pull.pull_id = next(self._ids)
        pull.renew_at = pull.begun + self._settings.lease_s / 3
        self.holder.let_go(pull.request_id)
        self._pulls[pull.request_id] = self._by_id[pull.pull_id] = pull
        self._guarded(pull, self._greet)

    def cancel(self, request_id: str) -> None:
        """No further chunk is read; a pull that has begun still ends through `done`."""
        self.holder.let_go(request_id)
        if request_id in self._pulls:
            self._pulls[request_id].cancelled = True

    def advance(self, now: float) -> None:
        """Take proofs, renew leases, look at each read."""
        for proof in self._prover.proofs():
            self._proven(proof)
        self.holder.advance(now)
        for pull in list(self._pulls.values()):
            self._guarded(pull, lambda one: self._advance(one, now))
        self._remove_unread()

    def _advance(self, pull: Pull, now: float) -> None:
        if now >= pull.renew_at and pull.peer is not None and not pull.confirmed and not pull.lingers:
            self._renew(pull, pull.peer, now)
        if pull.reading is not None:
            self._look(pull, now)

    def _guarded(self, pull: Pull, step: Callable[[Pull], None]) -> None:
        """Whatever one owner is or says fails its own pulls only; but nobody may have blocks that NIXL may still write."""
        try:
            step(pull)
        except KvError as error:
            self._end(pull, error)
        except Exception as error:
            if pull.handle is not None:
                raise
            self._faults.count(f"a pull from {pull.reference.remote_host}", error, unexpected=True)
            self._end(pull, KvTransferError("peer", f"the prefill worker cannot be read from: {error}"))

    def fail_all(self, error: KvTransferError) -> None:
        """Every request ends with this error: the thread that drives the pulls is about to end. Of a read in flight nobody will
        know when it is over: its blocks never come back."""
        for pull in list(self._pulls.values()):
            if pull.handle is None:
                self._end(pull, error)
            elif not pull.lingers:
                pull.lingers = True
                self._done(FetchResult(pull.request_id, error, lingers=True))

    # -- greeting ---------------------------------------------------------------------------------------------------
    def reach(self, host: str, port: int, now: float) -> Peer:
        """The peer at an address; others make room."""
        busy = {id(pull.peer) for pull in self._pulls.values()}
        for superfluous in self._peers.superfluous(host, port, now, busy):
            self._forget(superfluous)
        return self._peers.get(host, port, now)

    def _greet(self, pull: Pull) -> None:
        """Of an owner whose life is not the reference's one of both is over: it says which. One that proved nothing, when nobody
        had to, proves it now. The pulls from it go on meanwhile."""
        now = time.monotonic()
        peer = pull.peer = self.reach(pull.reference.remote_host, pull.reference.remote_port, now)
        if peer.welcome is not None and peer.welcome.epoch == pull.reference.remote_epoch and self._counts(peer.welcome):
            self._start(pull, peer.welcome)
            return
        peer.waiting_for_welcome.append(lambda answer: self._guarded(pull, lambda one: self._greeted(one, peer, answer)))
        pull.greeted_by = min(pull.greeted_by, now + self._settings.call_timeout_s)
        if not peer.greeting:
            peer.greeting = True
            self._greeter.greet(peer, lambda answer: self._welcomed(peer, answer), pull.greeted_by)

    def _counts(self, welcome: Welcome) -> bool:
        """Without a proof only while none is asked for: what was heard before a worker became strict is what anybody may have
        said. Of a Greeter's welcomes those alone have a proof whose proof was believed."""
        return bool(welcome.proof) or not self._handoff.is_strict()

    def _welcomed(self, peer: Peer, answer: Answer | KvTransferError) -> None:
        peer.greeting = False
        if isinstance(answer, Welcome) and peer.welcome is None:
            answer = self._met(peer, answer)
        elif isinstance(answer, Welcome) and peer.welcome is not None:
            self._met_again(peer, peer.welcome, answer)
        waiting, peer.waiting_for_welcome = peer.waiting_for_welcome, []
        for tell in waiting:
            tell(answer)
        if isinstance(answer, KvTransferError):
            self._forget(peer, gone=answer.reason != "timeout")

    def _met_again(self, peer: Peer, before: Welcome, welcome: Welcome) -> None:
        """Who restarted on the same address, and who proves to be another one than who was there without a proof, is forgotten:
        who waits greets it anew."""
        if welcome.epoch != before.epoch or (welcome.proof and not before.proof and _bare(welcome) != _bare(before)):
            self._forget(peer, gone=True)
        elif welcome.proof:
            peer.welcome = welcome

    def _met(self, peer: Peer, welcome: Welcome) -> Welcome | KvTransferError:
        """Let NIXL know the owner; an error when it cannot be read from. NIXL raises many binding types."""
        if welcome.block_bytes != self._pool.block_bytes:
            words = f"has blocks of {welcome.block_bytes} bytes, here they are {self._pool.block_bytes}"
            return KvTransferError("layout", f"the prefill worker at {peer.host} {words}")
        if not self._makes_room(welcome):
            return KvTransferError(
                "peer", f"the prefill worker at {peer.host} is another one than those of its name that are read"
            )
        if self._spare.pop(welcome.engine_id, None) is not None:  # to make it known again would lose the reads in flight
            peer.agent_name, peer.welcome = welcome.engine_id, welcome
            return welcome
        try:
            found = self._agent.add_remote_agent(welcome.agent)
            peer.agent_name = found.decode() if isinstance(found, bytes) else found
            self._told[peer.agent_name] = welcome.agent
        except Exception as error:
            return KvTransferError("peer", f"NIXL does not take what the prefill worker at {peer.host} says of itself: {error}")
        if peer.agent_name != welcome.engine_id:
            return KvTransferError(
                "peer", f"the prefill worker at {peer.host} calls itself {welcome.engine_id} and another to NIXL"
            )
        peer.welcome = welcome
        return welcome

    def _makes_room(self, welcome: Welcome) -> bool:
        """What NIXL knows by this name is what the welcome says, or is forgotten: who was there without a proof may have called
        himself as the owner does. False: somebody is still read from by it."""
        name = welcome.engine_id
        if name in self._spare and self._told.get(name) != welcome.agent:
            self._spare[name] = True
            self._remove_unread()
            return name not in self._spare
        return True

    def _greeted(self, pull: Pull, peer: Peer, answer: Answer | KvTransferError) -> None:
        if isinstance(answer, KvTransferError):
            self._end(pull, answer)
        elif isinstance(answer, Refused):
            self._end(pull, refusal_error(peer, answer))
        elif isinstance(answer, Challenge | Granted | Hottest):
            self._end(pull, KvTransferError("peer", f"the prefill worker at {peer.host} answered a greeting with something else"))
        elif peer.welcome is None:
            self._greet(pull)
        else:
            self._start(pull, peer.welcome)

    # -- reading ----------------------------------------------------------------------------------------------------
    def _start(self, pull: Pull, welcome: Welcome) -> None:
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

    def _post_next(self, pull: Pull) -> None:
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
        try:
            pull.handle = self._prepared(pull, peer.agent_name, peer.welcome.base_address, chunk)
            self._post(pull.handle)
        except Exception as error:  # NIXL raises many binding types, all of them mean that this read failed
            self._refused(pull, peer.welcome.base_address, chunk, error)
        else:
            pull.reading = chunk

    def _post(self, handle: Any) -> None:
        if self._agent.transfer(handle) == "ERR":
            raise RuntimeError("it reported an error when the read was posted")

    def _refused(self, pull: Pull, theirs: int, chunk: range, error: Exception) -> None:
        """NIXL posts descriptors one by one, and forgets those before the one that UCX refused: they write on, and no handle says
        until when. So the blocks wait for one more READ, of one block: NIXL flushes the connection behind each, so that all
        before it is over when it is."""
        why = KvTransferError("read", f"NIXL refused the read: {error}")
        if pull.handle is None or type(error).__name__ == DISCONNECTED:
            self._end(pull, why)
            return
        pull.given_up, pull.reading, pull.fence_at = why, chunk, 0.0
        with contextlib.suppress(Exception):  # else the read itself is posted once more
            fence = self._prepared(pull, pull.agent_name, theirs, chunk[:1])
            refused, pull.handle = pull.handle, fence
            self._agent.release_xfer_handle(refused)
        self._check_time(pull, time.monotonic())

    def _fence(self, pull: Pull, now: float) -> None:
        """Post it, again and again until it is taken."""
        if now >= pull.fence_at:
            pull.fence_at = float("inf")
            try:
                self._post(pull.handle)
            except Exception as error:  # as above
                if type(error).__name__ == DISCONNECTED:
                    self._end(pull, pull.given_up)
                    return
                pull.fence_at = now + FENCE_EVERY_S
        self._check_time(pull, now)

    def _prepared(self, pull: Pull, agent: str, theirs: int, chunk: range) -> Any:
        """NIXL's handle for one chunk; neighbouring blocks become one descriptor."""
        size, mine = self._pool.block_bytes, self._pool.base_address
        runs = merge_runs(pull.remote[chunk.start : chunk.stop], pull.local[chunk.start : chunk.stop])
        local = self._agent.get_xfer_descs([(mine + r.local * size, r.count * size, 0) for r in runs], "DRAM")
        remote = self._agent.get_xfer_descs([(theirs + r.remote * size, r.count * size, 0) for r in runs], "DRAM")
        pull.descriptors += len(runs)
        pull.agent_name = agent
        return self._agent.initialize_xfer("READ", local, remote, agent)

    def _look(self, pull: Pull, now: float) -> None:
        """One look at the chunk that is being read."""
        if pull.fence_at < float("inf"):
            self._fence(pull, now)
            return
        try:
            state = self._agent.check_xfer_state(pull.handle)
        except Exception as error:  # as above
            self._let_go(pull, KvTransferError("read", f"NIXL lost the read: {error}"), now)
            return
        chunk = pull.reading
        if state == "PROC" or chunk is None:
            self._check_time(pull, now)
            return
        if state != "DONE" or pull.lingers:
            self._let_go(pull, None if state == "DONE" else KvTransferError("read", f"NIXL ended the read with {state}"), now)
            return
        self._agent.release_xfer_handle(pull.handle)
        pull.handle = None
        pull.unproven += 1
        if pull.peer is not None:
            pull.peer.read_at = now
        expected = pull.digest[chunk.start * HEX_PER_BLOCK : chunk.stop * HEX_PER_BLOCK]
        self._prover.ask(pull.pull_id, chunk.start, pull.local[chunk.start : chunk.stop], expected)
        self._post_next(pull)  # moves while the one before is compared

    def _let_go(self, pull: Pull, error: KvTransferError | None, now: float) -> None:
        """The read is over: nobody writes into its blocks any more. None: it succeeded, too late."""
        pull.given_up = pull.given_up or error
        if error is not None and pull.agent_name in self._spare:
            self._spare[pull.agent_name] = True
        try:
            self._agent.release_xfer_handle(pull.handle)
        except Exception:  # NIXL's way to say that it is not
            self._check_time(pull, now)
            return
        pull.handle = None
        self._end(pull, pull.given_up)

    def _check_time(self, pull: Pull, now: float) -> None:
        """Of a read whose time is up, or that was given up, the request ends; its blocks stay the pull's until the read is over.
        It cannot be cancelled: NIXL 1.5 lets go of a handle, and forgets an owner, while UCX still reads (over TCP all of it
        arrived, seconds later, when a frozen owner went on: in blocks that others had by then)."""
        late_s = now - pull.begun - self._settings.read_timeout_s
        host, limit_s = pull.reference.remote_host, self._settings.read_timeout_s
        if late_s > STUCK_AFTER * limit_s and (late_s > STUCK_S or self._lost() > LOST_MOST * self._pool.num_blocks):
            raise StuckReadError(f"a read from {host} does not end")
        if pull.lingers or (late_s < 0 and pull.given_up is None):
            return
        error = pull.given_up = pull.given_up or KvTransferError("timeout", f"the read from {host} took longer than {limit_s} s")
        pull.lingers = True
        self._doubt(pull, error)
        self._done(FetchResult(pull.request_id, error, lingers=True))

    def _lost(self) -> int:
        """Blocks that nobody may use until reads end that nobody waits for."""
        return sum(len(pull.local) for pull in self._pulls.values() if pull.lingers)

    # -- proving ----------------------------------------------------------------------------------------------------
    def _proven(self, proof: Proof) -> None:
        pull = self._by_id.get(proof.pull_id)
        if pull is None:
            return
        pull.unproven -= 1
        if proof.wrong is not None and pull.error is None:
            block = proof.start + proof.wrong
            pull.error = KvTransferError("digest", f"block {block} arrived with other bytes than were leased")
        self._end_if_complete(pull)

    def _renew(self, pull: Pull, peer: Peer, now: float) -> None:
        """Also while it reads the owner is told: over TCP it takes part in a read only for a while after each word from us."""
        every_s = self._settings.lease_s / 3
        pull.renew_at = now + (min(every_s, SERVING_WINDOW_S / 2) if pull.reading is not None or pull.chunks else every_s)
        self._peers.call(peer, lambda call: renewal(pull.reference, call), now, lambda answer: self._renewed(pull, answer))

    def _renewed(self, pull: Pull, answer: Answer | KvTransferError) -> None:
        """What counts is the confirmation after the read; but a frozen owner takes part in none, and would have the blocks and
        the place for all of the read's time."""
        if isinstance(answer, KvTransferError) and answer.reason == "timeout":
            pull.given_up = answer

    def _confirm(self, pull: Pull, peer: Peer) -> None:
        lease = pull.reference
        self._peers.call(
            peer,
            lambda call: Confirm(call=call, lease_id=lease.lease_id, epoch=lease.remote_epoch, generation=lease.lease_generation),
            time.monotonic(),
            lambda answer: self._guarded(pull, lambda one: self._confirmed(one, answer)),
        )

    def _confirmed(self, pull: Pull, answer: Answer | KvTransferError) -> None:
        if isinstance(answer, KvTransferError):
            self._end(pull, answer)
        elif isinstance(answer, Refused):
            why = answer.reason[:MOST_REASON]
            self._end(pull, KvTransferError(f"lease-{why}", f"the lease was not valid after the read: {why}"))
        elif not isinstance(answer, Granted):
            words = "was asked whether the lease held, and answered something else"
            self._end(pull, KvTransferError("peer", f"the prefill worker at {pull.reference.remote_host} {words}"))
        else:
            pull.confirmed = True
            self._end_if_complete(pull)

    def _end_if_complete(self, pull: Pull) -> None:
        """Success needs both: the owner's word that the lease held, and every digest."""
        if pull.confirmed and pull.unproven == 0:
            self._end(pull, pull.error)

    def _end(self, pull: Pull, error: KvError | None) -> None:
        if self._pulls.pop(pull.request_id, None) is None:
            return
        del self._by_id[pull.pull_id]
        if pull.handle is not None:
            with contextlib.suppress(Exception):  # never in flight: NIXL refused it
                self._agent.release_xfer_handle(pull.handle)
        moved = 0 if error is not None else len(pull.local) * self._pool.block_bytes
        if error is not None and not pull.lingers:
            self._doubt(pull, error)
        self._done(FetchResult(pull.request_id, error, moved, time.monotonic() - pull.begun, pull.descriptors))

    def _doubt(self, pull: Pull, error: KvError) -> None:
        """Greet again: the owner may have come back with new memory."""
        if pull.peer is not None and self._is_doubtful(pull.peer, error):
            self._forget(pull.peer, gone=error.reason == "read")

    def _is_doubtful(self, peer: Peer, error: KvError) -> bool:
        """The connection may be what failed. Forgetting it fails all that is read over it: not while others' chunks arrive."""
        if error.reason == "timeout":
            return time.monotonic() - peer.read_at > self._settings.call_timeout_s
        return error.reason == "read"

    def _forget(self, peer: Peer, *, gone: bool = False) -> None:
        """Greet it when it is needed again. `gone`: what NIXL knows of it is good for nothing."""
        shared = self._peers.shares_agent(peer)
        name, peer.agent_name = peer.agent_name, ""
        if name and not shared:
            self._spare[name] = gone
        peer.welcome = None
        self._peers.drop(peer)
        self._remove_unread()

    def _remove_unread(self) -> None:
        """NIXL forgets whom nothing is read from: of a read from one that it forgot it cannot say when it is over."""
        read = {pull.agent_name for pull in self._pulls.values() if pull.handle is not None}
        over = len(self._spare) - SPARE_AGENTS
        for name in [name for at, (name, gone) in enumerate(self._spare.items()) if (gone or at < over) and name not in read]:
            del self._spare[name]
            self._told.pop(name, None)
            with contextlib.suppress(Exception):  # NIXL may have dropped it already when the peer died; forgetting is the goal
                self._agent.remove_remote_agent(name)


def _bare(welcome: Welcome) -> Welcome:
    """What it says of the owner, whichever question it answers."""
    return msgspec.structs.replace(welcome, call=0, proof=b"")
