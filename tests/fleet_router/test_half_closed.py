"""Clients that sent only a half: of their connection, which they left later, or of a head."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import Rig, ask, http, run, until

SHORT = ask(prompt="short")


def test_a_client_that_closed_its_half_and_left_later_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Incident: it had 100 Continue while it was there, so that its answer was made to its end for nobody. Its kernel keeps the
    connection for a minute (here: a second), and says then that there is none."""
    monkeypatch.setattr("fleet_router.closing.ASKED_EACH_S", 1)

    async def go(rig: Rig) -> None:
        go_on = asyncio.Event()

        async def late(_: Any, writer: asyncio.StreamWriter) -> bool:
            await go_on.wait()
            answer(writer, 200, {"choices": [{"text": "late"}]})
            return True

        rig.decode[0].behave = late
        clients = [await rig.connect() for _ in range(2)]
        for reader, writer, _ in clients:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)
            writer.write(http(SHORT))
            writer.write_eof()
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        (_, writer, gone), (reader, _, there) = clients
        writer.close()

        def noticed() -> bool:
            rig.sweep()
            return gone not in rig.connections

        await until(noticed, 10)
        assert (there in rig.connections, rig.context.metrics.client_left) == (True, 1)
        go_on.set()
        assert b"late" in await asyncio.wait_for(reader.read(), 3)

    run(go, prefill=0)


@pytest.mark.parametrize(("length", "told"), [(None, [b"100", b"200"]), (10**9, [b"413"])], ids=["fits", "too-long"])
def test_nobody_is_told_to_continue_before_the_head_is_whole(length: int | None, told: list[bytes]):
    """Incident: what the rest of a head said was read behind 100 Continue: its client sent a body that was too long."""

    async def go(rig: Rig) -> None:
        head, _, body = http(SHORT, "connection: close", "expect: 100-continue").partition(b"\r\n\r\n")
        if length is not None:
            head = head.rpartition(b": ")[0] + b": %d" % length
        first, at, rest = head.partition(b"100-continue\r\n")
        reader, writer, connection = await rig.connect()
        writer.write(first + at + rest[:3])
        await until(lambda: connection.begun_at is not None)
        writer.write(rest[3:] + b"\r\n\r\n")
        got = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 3)
        if length is None:
            writer.write(body)
        got += await asyncio.wait_for(reader.read(), 3)
        statuses = [line.split(b" ")[1] for line in got.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        assert statuses == told

    run(go, prefill=0)
