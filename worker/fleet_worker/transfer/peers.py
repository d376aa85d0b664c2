"""The side channel's client half: one DEALER socket per owner, calls matched to answers, each with a deadline.

Owners come and go for as long as a reader lives: one that was not used for a while is forgotten, and the least recently used one
makes room when there are too many. What one owner sends or is fails its own calls only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import zmq

from fleet_wire.address import authority
from fleet_wire.sidechannel import (
    MAX_MESSAGE_BYTES,
    AskHot,
    BadFrameError,
    Challenge,
    Confirm,
    Granted,
    Hello,
    Hottest,
    Message,
    Prove,
    Refused,
    Renew,
    Welcome,
    decode,
    encode,
)  # fmt: skip
from fleet_worker.transfer.address import tcp_address
from fleet_worker.transfer.base import KvTransferError
from fleet_worker.transfer.faults import Faults

MAX_PEERS = 256
"""Owners at a time: each takes a socket and about two file descriptors."""
IDLE_S = 900.0
"""An owner that was not used for so long is forgotten."""
ANSWERS_PER_TURN = 256
"""Of one owner: one that never stops talking keeps nobody else from being heard."""
Answer = Challenge | Welcome | Granted | Refused | Hottest
OnAnswer = Callable[[Answer | KvTransferError], None]


@dataclass(slots=True)
class _Call:
    deadline: float
    on_answer: OnAnswer


@dataclass(slots=True)
class Peer:
    """One owner of KV, as this reader knows it."""

    host: str
    port: int
    socket: zmq.Socket[bytes]
    welcome: Welcome | None = None
    agent_name: str = ""
    greeting: bool = False
    used_at: float = 0.0
    read_at: float = float("-inf")
    """When a chunk last came from it whole."""
    waiting_for_welcome: list[OnAnswer] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)


class Peers:
    """All owners that this reader talks to; used by the transfer thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], timeout_s: float, faults: Faults, most: int = MAX_PEERS) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._faults = faults
        self._most = most
        self._peers: dict[tuple[str, int], Peer] = {}
        self._next_call = 0

    def get(self, host: str, port: int, now: float) -> Peer:
        """The peer at this address, connected on first use; KvTransferError when there is no room or no such address."""
        peer = self._peers.get((host, port))
        if peer is None:
            if len(self._peers) >= self._most:
                raise KvTransferError("peers", f"{self._most} prefill workers are in use: no room for one more")
            peer = self._peers[host, port] = Peer(host, port, self._connected(host, port))
        peer.used_at = now
        return peer

    def _connected(self, host: str, port: int) -> zmq.Socket[bytes]:
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise KvTransferError(
                "peers", f"no socket for the prefill worker at {authority(host, port)}: {error.strerror}"
            ) from error
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 1_000)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(tcp_address(host, port))
        except zmq.ZMQError as error:
            socket.close()
            raise KvTransferError(
                "peer", f"the prefill worker at {authority(host, port)} cannot be reached: {error.strerror}"
            ) from error
        return socket

    def superfluous(self, host: str, port: int, now: float, busy: Collection[int]) -> list[Peer]:
        """Whom to forget before this address is used for the first time: who was idle for long, and who was used least recently
        when there is no room. Never one whose id() is in `busy` or that has not answered yet."""
        if (host, port) in self._peers:
            return []
        free = [peer for peer in self._peers.values() if id(peer) not in busy and not peer.calls]
        idle = [peer for peer in free if now - peer.used_at >= IDLE_S]
        if idle or len(self._peers) < self._most:
            return idle
        return sorted(free, key=lambda peer: peer.used_at)[:1]

    def shares_agent(self, peer: Peer) -> bool:
        """Another address leads to the same NIXL agent."""
        return any(other is not peer and other.agent_name == peer.agent_name for other in self._peers.values())

    def drop(self, peer: Peer) -> None:
        """Forget a peer; open calls fail. The next use connects and greets again: what has its place by then stays."""
        if self._peers.get((peer.host, peer.port)) is peer:
            del self._peers[peer.host, peer.port]
        gone = KvTransferError("peer", f"the prefill worker at {authority(peer.host, peer.port)} is gone or restarted")
        calls, peer.calls = list(peer.calls.values()), {}
        for call in calls:
            self._tell(call, gone)
        peer.socket.close()

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To poll for answers."""
        return [peer.socket for peer in self._peers.values()]

    def call(
        self,
        peer: Peer,
        make: Callable[[int], Hello | Prove | Renew | Confirm | AskHot],
        now: float,
        on_answer: OnAnswer,
        until: float = float("inf"),
    ) -> None:
        """Send one request; `on_answer` is called exactly once, within `timeout_s`, and by `until`."""
        self._next_call += 1
        number, peer.used_at = self._next_call, now
        peer.calls[number] = _Call(min(now + self._timeout_s, until), on_answer)
        try:
            peer.socket.send(encode(make(number)), zmq.DONTWAIT)
        except zmq.Again:
            self._tell(peer.calls.pop(number), KvTransferError("peer", f"the side channel to {peer.host} is full"))
        except zmq.ZMQError as error:
            self._tell(peer.calls.pop(number), KvTransferError("peer", f"the side channel to {peer.host}: {error.strerror}"))

    def receive(self) -> None:
        """Hand the answers that have arrived to their calls; the rest of very many in the next turn."""
        for peer in list(self._peers.values()):
            for _ in range(ANSWERS_PER_TURN):
                if peer.socket.closed:  # an answer may drop its own peer
                    break
                try:
                    frame = peer.socket.recv(zmq.DONTWAIT)
                except zmq.ZMQError:  # Again: nothing there
                    break
                self._answer(peer, frame)

    def _answer(self, peer: Peer, frame: bytes) -> None:
        try:
            message: Message = decode(frame)
        except BadFrameError as error:
            self._faults.count(f"an answer of {authority(peer.host, peer.port)}", error)  # its call runs into its deadline
            return
        if not isinstance(message, Answer):
            return
        call = peer.calls.pop(message.call, None)
        if call is not None:
            self._tell(call, message)

    def _tell(self, call: _Call, answer: Answer | KvTransferError) -> None:
        """Nothing that one owner answers ends the thread."""
        try:
            call.on_answer(answer)
        except Exception as error:
            self._faults.count("an answer was not expected", error, unexpected=True)

    def expire(self, now: float) -> None:
        """Fail the calls whose deadline has come; a peer that does not answer is greeted again next time."""
        for peer in list(self._peers.values()):
            late = [number for number, call in peer.calls.items() if call.deadline <= now]
            for number in late:
                call = peer.calls.pop(number, None)
                if call is not None:  # the one before may have dropped its peer, and with it all its calls
                    words = f"the prefill worker at {authority(peer.host, peer.port)} did not answer in time"
                    self._tell(call, KvTransferError("timeout", words))

    def close(self) -> None:
        """Close every socket."""
        for peer in list(self._peers.values()):
            self.drop(peer)
