"""A router with as many connections as it may have: probes are answered all the same, and nobody else."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import msgspec
import pytest
import uvloop

from e2e.certs import Authority
from fleet_router import spare
from fleet_router.server import ClientConnection
from fleet_router.tls import TlsFiles, context_of
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until

FULL = msgspec.structs.replace(CONFIG, bounds=msgspec.structs.replace(CONFIG.bounds, connections=3, linger_s=0.1))


async def fill(rig: Rig) -> None:
    for _ in range(FULL.bounds.connections):
        await rig.connect()


def probe(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (probe("/health"), 200), (probe("/ready"), 200), (probe("/health", "HEAD"), 200), (probe("/metrics"), 503),
        (probe("/v1/models"), 503), (http(ask()), 503), (b"nonsense", 503), (probe("/health?" + "x" * 5_000), 503),
        (b"GET /health HTTP/1.1\r\nx: " + b"x" * 5_000, 503), (b"P" * 100_000, 503),
    ],
)  # fmt: skip
def test_a_router_with_many_clients_is_not_taken_for_a_dead_one(said: bytes, status: int):
    """2,048 streams, or as many idle connections of one client: probes got 503, the router was not ready, then it was killed."""

    async def go(rig: Rig) -> None:
        await fill(rig)
        for step in (len(said), max(7, len(said) // 100)):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            rig.writers.append(writer)
            for at in range(0, len(said), step):
                writer.write(said[at : at + step])
                await asyncio.sleep(0)
            got = await asyncio.wait_for(reader.read(), 5)
            assert got.startswith(b"HTTP/1.1 %d " % status)
            assert b"\r\nconnection: close\r\n" in got
            if status == 503:
                assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "connections"
        assert len(rig.connections) == 3
        assert rig.context.metrics.requests[status] == 2
        await until(lambda: len(rig.context.spares) == 0)

    run(go, config=FULL)


def test_who_comes_and_says_nothing_gives_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spare, "SPARES_MOST", 2)

    async def go(rig: Rig) -> None:
        await fill(rig)
        silent = []
        for _ in range(5):
            silent.append(await asyncio.open_connection("127.0.0.1", rig.port))
            await until(lambda: len(rig.context.spares) == min(2, len(silent)))
        for reader, writer in silent[:3]:
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(probe("/health"))
        assert (await answer_of(reader))[0] == 200
        for _, other in (*silent, (reader, writer)):
            other.close()
        await until(lambda: len(rig.context.spares) == 0)

    run(go, config=FULL)


def test_a_silent_one_has_as_long_as_a_head_may_take():
    config = msgspec.structs.replace(FULL, bounds=msgspec.structs.replace(FULL.bounds, header_deadline_s=0.05))

    async def go(rig: Rig) -> None:
        await fill(rig)
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        rig.writers.append(writer)
        assert await asyncio.wait_for(reader.read(), 5) == b""

    run(go, config=config)


def test_the_port_for_probes_and_scrapes_has_room_of_its_own():
    async def go(rig: Rig) -> None:
        await fill(rig)
        loop = asyncio.get_running_loop()
        made = lambda: ClientConnection(rig.context, rig.connections, rig.router.plain, admin=True)  # noqa: E731
        port = await loop.create_server(made, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*port.sockets[0].getsockname())
        rig.writers.append(writer)
        writer.write(probe("/metrics"))
        assert (await answer_of(reader))[0] == 200
        port.close()

    run(go, config=FULL)


@pytest.mark.parametrize("runs", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_over_tls_as_well(tmp_path: Path, runs: object):
    files = TlsFiles(*Authority(tmp_path, "ca").leaf("router", "localhost"))

    async def go() -> None:
        rig = Rig([], [], FULL)
        for _ in range(3):
            rig.connections.add(ClientConnection(rig.context, rig.connections, rig.router.plain))
        port = await asyncio.get_running_loop().create_server(rig.router.connection, "127.0.0.1", 0, ssl=context_of(files))
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(*port.sockets[0].getsockname(), ssl=client)
        writer.write(probe("/health"))
        assert (await answer_of(reader))[0] == 200
        writer.close()
        port.close()

    runs(go())  # type: ignore[operator]
