"""Publishes prefix-cache changes over ZMQ, with a bounded replay buffer for subscribers that missed some."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from itertools import islice

import zmq

from fleet_wire.events import END_OF_REPLAY, TOPIC, BlockRemoved, BlockStored, KVEventBatch, encode
from fleet_worker.engine.blocks import CacheEvent
from fleet_worker.transfer.address import KEPT_ALIVE, tcp_address

REPLAY_BATCHES = 10_000
SEND_QUEUE = 100_000
REPLAYED_PER_TURN = 128
"""Batches per call, shared by all subscribers: about a millisecond, for it is the engine's thread that sends them."""
MAX_REPLAYS = 64
"""Subscribers that are being replayed to; who asks beyond that is not answered and asks again."""
MAX_QUESTION_BYTES = 1_024


class KvEventPublisher:
    """PUB and replay sockets; called by the engine thread only. A slow subscriber loses batches, never stalls the engine."""

    def __init__(self, host: str, port: int, replay_port: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = self._socket(zmq.PUB, host, port)
        self._replay = self._socket(zmq.ROUTER, host, replay_port)
        self._next = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._replays: dict[bytes, int] = {}
        """Who is being replayed to → the next number; one replay each."""

    def _socket(self, kind: int, host: str, port: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)  # of what comes in
        made.setsockopt(zmq.IPV6, 1)
        for option, value in KEPT_ALIVE.items():
            made.setsockopt(option, value)
        try:
            made.bind(tcp_address(host, port))
        except zmq.ZMQError as error:
            made.close()
            raise OSError(f"port {port} on {host} cannot be bound: {error.strerror}") from error
        return made

    def publish(self, changes: list[CacheEvent]) -> None:
        """Send one batch when there is something to say; go on with replays."""
        if changes:
            payload = encode(KVEventBatch(ts=time.time(), events=[self._event(change) for change in changes]))
            self._kept.append((self._next, payload))
            with contextlib.suppress(zmq.Again):
                self._publisher.send_multipart([TOPIC, self._next.to_bytes(8, "big"), payload], zmq.DONTWAIT)
            self._next += 1
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_REPLAYS):
                self._asked(self._replay.recv_multipart(zmq.DONTWAIT))
        for client in list(self._replays):
            self._send_replay(client, max(1, REPLAYED_PER_TURN // len(self._replays)))

    def _event(self, change: CacheEvent) -> BlockStored | BlockRemoved:
        if not change.stored:
            return BlockRemoved(block_hashes=[change.name], medium="CPU")
        return BlockStored(
            block_hashes=[change.name], parent_block_hash=change.parent, token_ids=list(change.tokens),
            block_size=self._block_tokens, lora_id=None, medium="CPU", lora_name=change.adapter,
        )  # fmt: skip

    def _asked(self, frames: list[bytes]) -> None:
        """A subscriber's question; a second one while it is being answered takes the first one's place."""
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        if client in self._replays or len(self._replays) < MAX_REPLAYS:
            self._replays[client] = start

    def _send_replay(self, client: bytes, most: int) -> None:
        """Up to `most` of the batches that this subscriber misses. New ones may come meanwhile: the end is told after them."""
        start = self._replays.pop(client)
        first = self._next - len(self._kept)
        skip = min(max(0, start - first), len(self._kept))
        batches = list(islice(self._kept, skip, skip + most))
        with contextlib.suppress(zmq.ZMQError):  # whoever is gone gets nothing
            for number, payload in batches:
                self._replay.send_multipart([client, b"", TOPIC, number.to_bytes(8, "big"), payload], zmq.DONTWAIT)
            if len(batches) < most:
                self._replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""], zmq.DONTWAIT)
        if len(batches) == most:
            self._replays[client] = batches[-1][0] + 1

    def close(self) -> None:
        """Release the sockets."""
        self._publisher.close()
        self._replay.close()
        self._context.term()
