"""KV events of an engine that cannot bind to one address: vLLM 0.32 binds its publisher only to `*`, `::` or a local socket, and
connects to anything else. It publishes to a local socket; this passes everything on at the pod's own address.

The copying runs in libzmq without the GIL; a slow subscriber loses messages, never stalls the engine.
"""

from __future__ import annotations

import threading

import zmq

SUBSCRIBER_QUEUE = 100_000
MAX_SUBSCRIPTION_BYTES = 1_024
"""All that a subscriber may say: whoever says more is disconnected."""


class EventForwarder:
    """From the engine's socket `source` to subscribers at `host`:`port`. OSError when the address is taken."""

    def __init__(self, source: str, host: str, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engine = self._context.socket(zmq.XSUB)
        self._subscribers = self._context.socket(zmq.XPUB)
        for socket in (self._engine, self._subscribers):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, SUBSCRIBER_QUEUE)
        self._subscribers.setsockopt(zmq.IPV6, ":" in host)
        self._subscribers.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
        at = f"[{host}]" if ":" in host else host
        try:
            self._subscribers.bind(f"tcp://{at}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise OSError(f"port {port} on {host} cannot be bound: {error.strerror}") from error
        self._engine.connect(source)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            zmq.proxy(self._engine, self._subscribers)
        except zmq.ContextTerminated:
            self._engine.close()
            self._subscribers.close()

    def close(self) -> None:
        """Stop and release the address."""
        self._context.term()
        self._thread.join(timeout=5)
