"""Leases of decode legs that wait for a place: renewed from the moment that the engine takes the request, or the prefill's work
would be gone before anybody could read it. A pull renews its own. Used by the transfer thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleet_wire.kv import KvReference
from fleet_wire.sidechannel import Renew
from fleet_worker.transfer.base import KvTransferError
from fleet_worker.transfer.peers import Peer, Peers

NEVER = float("inf")


def renewal(reference: KvReference, call: int) -> Renew:
    """The message that moves a lease's deadline."""
    return Renew(
        call=call, lease_id=reference.lease_id, epoch=reference.remote_epoch, generation=reference.lease_generation
    )  # fmt: skip


@dataclass(slots=True)
class _Held:
    reference: KvReference
    renew_at: float


class Holder:
    """`reach` gives the owner at an address; KvTransferError when it cannot be had."""

    def __init__(self, lease_s: float, peers: Peers, reach: Callable[[str, int, float], Peer]) -> None:
        self._every_s = lease_s / 3
        self._peers = peers
        self._reach = reach
        self._held: dict[str, _Held] = {}
        self._next = NEVER

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, reference: KvReference, now: float) -> None:
        """Renew at the next `advance`, for nobody knows how old the lease is, and then at every third of it."""
        self._held[request_id] = _Held(reference, now)
        self._next = min(self._next, now)

    def let_go(self, request_id: str) -> None:
        """The request is pulled now, or it ended."""
        self._held.pop(request_id, None)

    def advance(self, now: float) -> None:
        """Renew what is due. A refusal is not the end here: the pull will say why."""
        if now < self._next:
            return
        for held in list(self._held.values()):
            if held.renew_at <= now:
                held.renew_at = now + self._every_s
                self._renew(held.reference, now)
        self._next = min((held.renew_at for held in self._held.values()), default=NEVER)

    def _renew(self, reference: KvReference, now: float) -> None:
        try:
            peer = self._reach(reference.remote_host, reference.remote_port, now)
        except KvTransferError:
            return
        self._peers.call(peer, lambda call: renewal(reference, call), now, lambda _: None)
