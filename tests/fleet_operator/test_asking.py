"""Questions to workers: what one look costs the operator beside them."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from fleet_operator.flip.asking import open_ask


def test_a_look_reads_no_certificates(monkeypatch: pytest.MonkeyPatch):
    """Every look at a fleet with adapters, or with a worker that changes its role, read all CAs there are: 16 ms each in which
    the operator did nothing else."""
    read: list[object] = []

    def reads(context: ssl.SSLContext, *_: object, **__: object) -> None:
        read.append(context)

    for loads in ("load_verify_locations", "load_default_certs"):
        monkeypatch.setattr(ssl.SSLContext, loads, reads)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def look() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, open_ask() as ask:
            found = await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/state")
            assert found is not None
            assert (found.status, found.body) == (200, b"{}")

    asyncio.run(look())
    assert read == []
