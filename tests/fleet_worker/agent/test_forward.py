"""What an engine publishes on its local socket arrives at the pod's address, and the address is free again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from fleet_worker.agent.forward import EventForwarder

HOST, PORT = "127.76.0.1", 5557


def test_events_pass_through_and_the_address_comes_back(tmp_path: Path):
    source = f"ipc://{tmp_path}/kv-events"
    with zmq.Context() as context, context.socket(zmq.XPUB) as engine, context.socket(zmq.SUB) as subscriber:
        for socket in (engine, subscriber):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 10_000)
        forwarder = EventForwarder(source, HOST, PORT)  # before the engine is there, as in a pod
        engine.bind(source)
        subscriber.connect(f"tcp://{HOST}:{PORT}")
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        assert engine.recv() == b"\x01kv"  # the subscription has come all the way
        engine.send_multipart([b"kv-events", b"7", b"payload"])
        assert subscriber.recv_multipart() == [b"kv-events", b"7", b"payload"]
        with pytest.raises(OSError, match=f"port {PORT} on {HOST} cannot be bound: Address already in use"):
            EventForwarder(source, HOST, PORT)
        forwarder.close()
        EventForwarder(source, HOST, PORT).close()
