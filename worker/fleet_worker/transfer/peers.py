"""The side channel's client half: one DEALER socket per owner, calls matched to answers, each with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from fleet_wire.sidechannel import Confirm, Granted, Hello, Message, Refused, Renew, Welcome, decode, encode
from fleet_worker.transfer.base import KvTransferError

Answer = Welcome | Granted | Refused
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
    waiting_for_welcome: list[OnAnswer] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)


class Peers:
    """All owners that this reader talks to; used by the transfer thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._peers: dict[tuple[str, int], Peer] = {}
        self._next_call = 0

    def get(self, host: str, port: int) -> Peer:
        """The peer at this address, connected on first use."""
        peer = self._peers.get((host, port))
        if peer is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 1_000)
            socket.connect(f"tcp://{host}:{port}")
            peer = self._peers[host, port] = Peer(host, port, socket)
        return peer

    def drop(self, peer: Peer) -> None:
        """Forget a peer; open calls fail. The next use connects and greets again."""
        self._peers.pop((peer.host, peer.port), None)
        gone = KvTransferError("peer", f"the prefill worker at {peer.host}:{peer.port} is gone or restarted")
        calls, peer.calls = list(peer.calls.values()), {}
        for call in calls:
            call.on_answer(gone)
        peer.socket.close()

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To poll for answers."""
        return [peer.socket for peer in self._peers.values()]

    def call(self, peer: Peer, make: Callable[[int], Hello | Renew | Confirm], now: float, on_answer: OnAnswer) -> None:
        """Send one request; `on_answer` is called exactly once."""
        self._next_call += 1
        peer.calls[self._next_call] = _Call(now + self._timeout_s, on_answer)
        try:
            peer.socket.send(encode(make(self._next_call)), zmq.DONTWAIT)
        except zmq.Again:
            peer.calls.pop(self._next_call).on_answer(KvTransferError("peer", f"the side channel to {peer.host} is full"))

    def receive(self) -> None:
        """Hand every answer that has arrived to its call."""
        for peer in list(self._peers.values()):
            while not peer.socket.closed:  # an answer may drop its own peer
                try:
                    frame = peer.socket.recv(zmq.DONTWAIT)
                except zmq.Again:
                    break
                self._answer(peer, frame)

    def _answer(self, peer: Peer, frame: bytes) -> None:
        try:
            message: Message = decode(frame)
        except (msgspec.DecodeError, ValueError):
            return  # its call runs into its deadline
        call = peer.calls.pop(message.call, None)
        if call is not None and isinstance(message, Welcome | Granted | Refused):
            call.on_answer(message)

    def expire(self, now: float) -> None:
        """Fail the calls whose deadline has come; a peer that does not answer is greeted again next time."""
        for peer in list(self._peers.values()):
            late = [number for number, call in peer.calls.items() if call.deadline <= now]
            for number in late:
                call = peer.calls.pop(number)
                call.on_answer(
                    KvTransferError("timeout", f"the prefill worker at {peer.host}:{peer.port} did not answer in time")
                )

    def close(self) -> None:
        """Close every socket."""
        for peer in list(self._peers.values()):
            self.drop(peer)
