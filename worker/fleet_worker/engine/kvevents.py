"""Publishes prefix-cache changes over ZMQ, with a bounded replay buffer for subscribers that missed some."""

from __future__ import annotations

import contextlib
import time
from collections import deque

import zmq

from fleet_wire.events import END_OF_REPLAY, TOPIC, BlockRemoved, BlockStored, KVEventBatch, encode
from fleet_worker.engine.blocks import CacheEvent

REPLAY_BATCHES = 10_000
SEND_QUEUE = 100_000


class KvEventPublisher:
    """PUB and replay sockets; called by the engine thread only. A slow subscriber loses batches, never stalls the engine."""

    def __init__(self, host: str, port: int, replay_port: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = self._socket(zmq.PUB, host, port)
        self._replay = self._socket(zmq.ROUTER, host, replay_port)
        self._next = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=REPLAY_BATCHES)

    def _socket(self, kind: int, host: str, port: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        try:
            made.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            made.close()
            raise OSError(f"port {port} on {host} cannot be bound: {error.strerror}") from error
        return made

    def publish(self, changes: list[CacheEvent]) -> None:
        """Send one batch when there is something to say; answer replay requests."""
        if changes:
            payload = encode(KVEventBatch(ts=time.time(), events=[self._event(change) for change in changes]))
            self._kept.append((self._next, payload))
            with contextlib.suppress(zmq.Again):
                self._publisher.send_multipart([TOPIC, self._next.to_bytes(8, "big"), payload], zmq.DONTWAIT)
            self._next += 1
        with contextlib.suppress(zmq.Again):
            while True:
                self._answer(self._replay.recv_multipart(zmq.DONTWAIT))

    def _event(self, change: CacheEvent) -> BlockStored | BlockRemoved:
        if not change.stored:
            return BlockRemoved(block_hashes=[change.name], medium="CPU")
        return BlockStored(
            block_hashes=[change.name], parent_block_hash=change.parent, token_ids=list(change.tokens),
            block_size=self._block_tokens, lora_id=None, medium="CPU", lora_name=change.adapter,
        )  # fmt: skip

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= start:
                self._replay.send_multipart([client, b"", TOPIC, number.to_bytes(8, "big"), payload], zmq.DONTWAIT)
        self._replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""], zmq.DONTWAIT)

    def close(self) -> None:
        """Release the sockets."""
        self._publisher.close()
        self._replay.close()
        self._context.term()
