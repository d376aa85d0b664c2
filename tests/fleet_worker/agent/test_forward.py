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


def test_what_no_subscriber_says_goes_no_further(tmp_path: Path):
    """Incident: one subscription of some megabytes ended the agent, and with it the engine: libzmq keeps subscriptions as a tree
    of a level per byte, and takes it down by recursion. What is sent here is none, or it would end this process."""
    source = f"ipc://{tmp_path}/kv-events"
    with zmq.Context() as context, context.socket(zmq.XPUB) as engine, context.socket(zmq.XSUB) as other:
        for socket in (engine, other):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 10_000)
        engine.bind(source)
        forwarder = EventForwarder(source, HOST, PORT)
        other.connect(f"tcp://{HOST}:{PORT}")
        other.send(b"\x02" + bytes(4 * 1024 * 1024))
        with context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.LINGER, 0)
            subscriber.connect(f"tcp://{HOST}:{PORT}")
            subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
            assert engine.recv() == b"\x01kv"
            engine.setsockopt(zmq.RCVTIMEO, 300)
            with pytest.raises(zmq.Again):
                engine.recv()
        forwarder.close()
