"""What an engine publishes on its local socket arrives at the pod's address, and the address is free again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from fleet_worker.agent import forward
from fleet_worker.agent.forward import EventForwarder, ReplayForwarder
from fleet_worker.transfer.address import tcp_address

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


REPLAY_PORT = 5558
NO_IPV6 = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
Asking = Callable[[], Awaitable[list[bytes]]]


async def replaying(tmp_path: Path, host: str, scenario: Callable[[ReplayForwarder, Asking], Awaitable[None]]) -> None:
    """An engine that replays as vLLM does: three frames or nothing."""
    forwarder = ReplayForwarder(f"{tmp_path}/kv-replay", host, REPLAY_PORT)
    await forwarder.open()
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.ROUTER)

    async def serve() -> None:
        while True:
            client, empty, start = await engine.recv_multipart()
            await engine.send_multipart([client, empty, b"kv-events", start, bytes(200_000)])

    async def ask() -> list[bytes]:
        with context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.IPV6, ":" in host)
            asking.connect(tcp_address(host, REPLAY_PORT))
            await asking.send_multipart([b"", (7).to_bytes(8, "big")])
            return await asyncio.wait_for(asking.recv_multipart(), 10.0)

    engine.bind(f"ipc://{tmp_path}/kv-replay")
    serving = asyncio.create_task(serve())
    try:
        await scenario(forwarder, ask)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await forwarder.close()
        context.destroy(linger=0)


@pytest.mark.parametrize("host", [HOST, pytest.param("::1", marks=NO_IPV6)])
def test_what_a_subscriber_missed_is_asked_for_at_the_pods_address(tmp_path: Path, host: str):
    """Incident: vLLM died at its start in a cluster whose pods have IPv6 addresses: it binds its replay without libzmq's IPv6."""

    async def scenario(forwarder: ReplayForwarder, ask: Asking) -> None:
        assert await ask() == [b"", b"kv-events", (7).to_bytes(8, "big"), bytes(200_000)]
        with pytest.raises(OSError, match="in use"):
            await ReplayForwarder("", host, REPLAY_PORT).open()
        await asyncio.wait_for(asyncio.gather(*forwarder._open), 10.0)  # whoever asked is gone, and nothing of it is left

    asyncio.run(replaying(tmp_path, host, scenario))


@pytest.mark.parametrize("why", ["no-engine", "too-many", "too-much"])
def test_a_connection_that_cannot_be_passed_on_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str):
    async def scenario(forwarder: ReplayForwarder, _: Asking) -> None:
        if why == "no-engine":
            os.unlink(forwarder._path)
        elif why == "too-many":
            monkeypatch.setattr(forward, "MOST_REPLAYS", 0)
        else:
            monkeypatch.setattr(forward, "MAX_QUESTION_BYTES", 9)
        reader, writer = await asyncio.open_connection(HOST, REPLAY_PORT)
        writer.write(b"\xff" + bytes(8) + b"\x7f")  # how ZMTP begins: the engine waits for more
        async with asyncio.timeout(10.0):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        writer.close()

    asyncio.run(replaying(tmp_path, HOST, scenario))


def test_connections_that_say_nothing_keep_no_router_from_its_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of routers whose nodes lost their power nobody ever hears: each kept a place, and after 64 nobody got a replay."""
    monkeypatch.setattr(forward, "SILENT_S", 0.05)
    monkeypatch.setattr(forward, "MOST_REPLAYS", 3)

    async def scenario(forwarder: ReplayForwarder, ask: Asking) -> None:
        silent = [(await asyncio.open_connection(HOST, REPLAY_PORT))[1] for _ in range(3)]
        assert (await ask())[1] == b"kv-events"
        for writer in silent:
            writer.close()

    asyncio.run(replaying(tmp_path, HOST, scenario))
