"""The owner's half of a hand-off: leases granted to readers, and the answers on the side channel.

Called from the engine thread (grant, release, released) and from the transfer thread (reply, expire): one lock holds all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from fleet_wire.blocks import sealed
from fleet_wire.kv import KvReference
from fleet_wire.lease import LeaseTable
from fleet_wire.sidechannel import (
    PROTOCOL_VERSION,
    PROVEN_VERSION,
    Challenge,
    Confirm,
    Granted,
    Hello,
    Message,
    Prove,
    Refused,
    Renew,
    Welcome,
)
from fleet_worker.transfer.base import KvPool, ReleaseReason
from fleet_worker.transfer.digest import memory_of, pool_digest
from fleet_worker.transfer.handoff import Handoff, words
from fleet_worker.transfer.peers import Answer

SERVING_WINDOW_S = 1.0
"""After a word from a reader the owner drives UCX at full speed for this long: connections are made, and TCP reads are answered,
only while it does. A reader is who was welcomed, or knows this life of ours: a stranger's word a second kept a core busy.
While leases are open it goes on at a slower pace, for a reader may have paused in mid-read. NIXL's own progress thread is off:
it spins on a whole core, busy or not."""


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """One worker's side of the hand-off."""

    host: str
    port: int
    compat: str
    transport: str = "auto"
    required: bool = False
    lease_s: float = 30.0
    call_timeout_s: float = 5.0
    read_timeout_s: float = 60.0
    """A read that takes longer is cancelled, and its request fails."""
    peer_key: Path | None = None
    """File with the key that the fleet's pods share (fleet_wire.peerkey); None: no hot prefixes, neither way, and hand-offs that
    nobody proves."""
    scope: str = ""
    """NAMESPACE/FLEET."""
    proof_required: bool = False
    """With a key, KV goes to and comes from those alone that prove it, too (fleet_wire.peerkey.HANDOFF_PROOF_ENV)."""


class Owner:
    """Leases of one engine's blocks. `metadata` is NIXL's description of this agent, `handoff` knows who is told it."""

    def __init__(self, settings: TransferSettings, pool: KvPool, engine_id: str, metadata: bytes, handoff: Handoff) -> None:
        self.epoch = uuid4().hex
        self.serve_until = 0.0
        self._engine_id = engine_id
        self._settings = settings
        self._pool = pool
        self._memory = memory_of(pool.base_address, pool.total_bytes)
        self._metadata = metadata
        self._handoff = handoff
        self._lock = threading.Lock()
        self._leases = LeaseTable(self.epoch, settings.lease_s)
        self._released: deque[tuple[str, ReleaseReason]] = deque()

    # -- engine thread ----------------------------------------------------------------------------------------------
    def grant(self, request_id: str, block_ids: Sequence[int], num_tokens: int, prompt: str = "") -> KvReference:
        """Lease finished blocks; the digest is taken now, while nobody writes them."""
        digest = pool_digest(self._memory, self._pool.block_bytes, block_ids)
        with self._lock:
            lease = self._leases.grant(request_id, block_ids, time.monotonic(), sealed(prompt, digest))
        return KvReference(
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_block_ids=tuple(block_ids),
            remote_engine_id=self._engine_id,
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
        """Leases that ended since the last call; expiry is checked here as well as in the transfer thread."""
        with self._lock:
            self._expire()
            ended, self._released = list(self._released), deque()
        return ended

    def open_leases(self, besides: str = "") -> int:
        """Leases granted and not ended, without the one of that id."""
        with self._lock:
            return len(self._leases) - (besides in self._leases)

    # -- transfer thread --------------------------------------------------------------------------------------------
    def expire(self) -> None:
        """End the leases whose time is up."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        for lease in self._leases.expire(time.monotonic()):
            self._released.append((lease.owner, "expired"))

    def drives_until(self, now: float) -> float:
        """How long UCX must be driven as far as is known `now`: somebody reads, or may begin to."""
        return max(self.serve_until, now + SERVING_WINDOW_S) if len(self._leases) else self.serve_until

    def reply(self, asked: Message, now: float) -> Answer:
        """The answer to one question of a reader."""
        answer = self._answer(asked, now)
        if isinstance(answer, Welcome) or (isinstance(asked, Renew) and asked.epoch == self.epoch):
            self.serve_until = now + SERVING_WINDOW_S
        return answer

    def _answer(self, asked: Message, now: float) -> Answer:
        if isinstance(asked, Hello):
            return self._greeted(asked)
        if isinstance(asked, Prove):
            return self._proven(asked)
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
            self.serve_until = 0.0
        return Granted(call=asked.call)

    def _greeted(self, asked: Hello) -> Answer:
        """Nothing of this worker is said before the proof, if there is to be one. Who knows no proof is told something that is no
        welcome: for readers that are older than proofs a refusal is a 400, which their router gives to its client, and any other
        word a 503, for which it has the prompt computed anew."""
        if asked.version == PROVEN_VERSION and self._handoff.has_key():
            return Challenge(call=asked.call, challenge=self._handoff.challenge())
        if self._handoff.is_strict():
            self._handoff.count_missing()
            return Granted(call=asked.call)
        return self._welcome(asked)

    def _proven(self, asked: Prove) -> Answer:
        if why := self._handoff.refusal(asked, self._settings.host, self._settings.port):
            return self._refused(asked.call, why)
        answer = self._welcome(asked)
        host, port = self._settings.host, self._settings.port
        return self._handoff.welcoming(answer, asked, host, port) if isinstance(answer, Welcome) else answer

    def _refused(self, call: int, why: str) -> Refused:
        """Of a challenge that is too old, or of an earlier life, a reader asks for another one."""
        return Refused(call=call, reason="stale" if why == "stale" else "proof", message=words(why))

    def _welcome(self, asked: Hello | Prove) -> Welcome | Refused:
        pool = self._pool
        version = asked.version if asked.version == PROVEN_VERSION else PROTOCOL_VERSION
        mine = (version, self._settings.compat, pool.block_bytes, pool.block_tokens)
        theirs = (asked.version, asked.compat, asked.block_bytes, asked.block_tokens)
        if mine != theirs:
            names = ("protocol version", "compatibility hash", "block bytes", "block tokens")
            wrong = ", ".join(
                f"{n}: prefill has {b}, decode has {a}" for n, a, b in zip(names, theirs, mine, strict=True) if a != b
            )
            return Refused(call=asked.call, reason="incompatible", message=wrong)
        return Welcome(
            call=asked.call, engine_id=self._engine_id, epoch=self.epoch, agent=self._metadata,
            base_address=pool.base_address, block_bytes=pool.block_bytes, num_blocks=pool.num_blocks,
        )  # fmt: skip
