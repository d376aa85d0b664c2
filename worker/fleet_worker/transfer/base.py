"""The seam between the engine and KV transfer. Every call returns at once; results are collected by polling.

Ownership: a granted block belongs to its lease until `released()` names it. A destination block belongs to the pull until
`finished()` reports the request, also after `cancel()`: a transfer in flight may still write. One that failed meanwhile is
reported twice (`FetchResult.lingers`): its request need not wait for that, its blocks must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fleet_wire.kv import KvReference

ReleaseReason = Literal["read", "released", "expired"]


class KvError(Exception):
    """A hand-off failed; `reason` is machine readable. The request must fail, never guess."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class KvReferenceError(KvError):
    """The reference itself cannot be proven (400): trying again with the same reference is useless."""


class KvTransferError(KvError):
    """The pull or its proof failed (503): another prefill may work."""


@dataclass(frozen=True, slots=True)
class KvPool:
    """Registered memory: `num_blocks` contiguous blocks of `block_bytes`, each holding all layers."""

    base_address: int
    block_bytes: int
    num_blocks: int
    block_tokens: int

    @property
    def total_bytes(self) -> int:
        """Size of the whole pool in bytes."""
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True, slots=True)
class FetchResult:
    """One pull ended. `error` None: lease, epoch, generation and digests were proven after the read."""

    request_id: str
    error: KvError | None
    transferred_bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    lingers: bool = False
    """It failed, and its read may still write: its blocks are the pull's until it is reported once more."""


class Connector(Protocol):
    """What the engine needs; called from the engine thread only."""

    transport: str
    """"shm", "tcp" or "rdma": what is in use, never what was asked for."""

    def grant(self, request_id: str, block_ids: Sequence[int], num_tokens: int, prompt: str = "") -> KvReference:
        """Prefill: put finished blocks under a lease that names the prompt (fleet_wire.blocks.prompt_name)."""
        ...

    def release(self, lease_id: str) -> bool:
        """Give a lease back early; False when it is unknown (already read, released or expired)."""
        ...

    def released(self) -> list[tuple[str, ReleaseReason]]:
        """Request ids whose leases ended since the last call."""
        ...

    def hold(self, request_id: str, reference: KvReference) -> None:
        """Decode: the request waits for a place; its lease is renewed until `fetch` or `cancel`."""
        ...

    def fetch(self, request_id: str, reference: KvReference, skip: int, into: Sequence[int]) -> None:
        """Decode: pull the reference's blocks from index `skip` on into local blocks `into`; KvReferenceError at once."""
        ...

    def cancel(self, request_id: str) -> None:
        """The result is not wanted any more; `finished()` still reports it."""
        ...

    def finished(self) -> list[FetchResult]:
        """Pulls that ended since the last call."""
        ...

    def dropped_frames(self) -> int:
        """What others sent and could not be used."""
        ...

    def strangers(self) -> Mapping[str, int]:
        """Greetings, and answers to ours, without a proof of the fleet's key, by reason. Any thread."""
        ...

    def is_guarded(self) -> bool:
        """KV goes to and comes from those alone that prove the fleet's key. Any thread."""
        ...

    def open_leases(self, besides: str = "") -> int:
        """Leases granted and not ended, without the one of that id. Any thread."""
        ...

    def turn_s(self) -> float:
        """Seconds that the turn of the transfers has lasted that runs now; 0 between two. Any thread."""
        ...

    def close(self) -> None:
        """Stop; every lease ends."""
        ...
