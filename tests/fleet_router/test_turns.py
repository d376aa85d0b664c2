"""Connections that have more requests in a packet than one turn of the loop answers: what happens between two of their turns."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from pathlib import Path
from typing import Any

import pytest
import uvloop

from e2e.certs import Authority
from fleet_router.closing import ASKED_EACH_S, is_paused
from fleet_router.dialect.routes import error_body
from fleet_router.receiving import TURN_MOST
from fleet_router.tls import TlsFiles, context_of
from tests.fleet_router.rig import Rig, answer_of, http, run, until
from tests.fleet_router.test_connections import SHORT, Gate
from tests.fleet_router.test_lingering import serving
from tests.fleet_router.test_unread import NARROW, NOWHERE

MANY = 10 * TURN_MOST


def says_goodbye_at_once(port: int, tls: ssl.SSLContext) -> bytes:
    """A TLS client whose requests and close_notify come together, and that reads on."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = tls.wrap_bio(incoming, outgoing, server_hostname="h")
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        while True:
            try:
                talk.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(65_536))
        talk.write(NOWHERE * MANY)
        with pytest.raises(ssl.SSLWantReadError):
            talk.unwrap()
        plain.sendall(outgoing.read())
        while piece := plain.recv(65_536):
            incoming.write(piece)
    try:
        while piece := talk.read(65_536):
            got += piece
    except ssl.SSLError:
        pass
    return got


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_a_client_over_tls_that_sends_no_more_gets_every_answer(loop: Any, tmp_path: Path):
    """Loops close TLS behind its end: there is no later turn."""
    authority = Authority(tmp_path, "ca")
    ours = context_of(TlsFiles(*authority.leaf("h", "h")))
    theirs = ssl.create_default_context(cafile=str(authority.file))

    async def go() -> None:
        async with serving(ours) as (_, port):
            got = await asyncio.to_thread(says_goodbye_at_once, port, theirs)
        assert got.count(b"HTTP/1.1 404") == MANY

    loop(go())


def test_after_a_bug_of_ours_between_two_turns_the_connection_ends(monkeypatch: pytest.MonkeyPatch):
    """It stayed open, and the rest of its requests without an answer, until its client sent more."""
    seen = 0

    def body(*asked: Any) -> bytes:
        nonlocal seen
        seen += 1
        if seen == 2 * TURN_MOST:
            raise ValueError("a bug")
        return error_body(*asked)

    monkeypatch.setattr("fleet_router.server.error_body", body)

    async def go(rig: Rig) -> None:
        _, writer, _ = await rig.connect()
        writer.write(NOWHERE * MANY)
        await until(lambda: not rig.connections)
        assert seen == 2 * TURN_MOST
        assert rig.context.desk.faults.count == 1
        assert rig.context.unread.bytes == 0

    run(go)


def test_who_is_cut_between_two_turns_is_told_why():
    """With `--drain-timeout 0`: its connection ended behind an answer that did not say that it was the last one."""

    async def go(rig: Rig) -> None:
        reader, _, connection = await rig.connect()
        connection.data_received(NOWHERE * MANY)
        assert connection._yielded
        connection.cut()
        for _ in range(TURN_MOST):
            assert (await answer_of(reader))[0] == 404
        status, headers, body = await answer_of(reader)
        assert (status, headers["connection"], json.loads(body)["error"]["code"]) == (503, "close", "shutting_down")
        assert await reader.read() == b""

    run(go)


def test_a_client_whose_bytes_were_refused_and_that_is_gone_is_found():
    """Nothing of it waits, and it is not read either."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        _, writer, connection = await rig.connect()
        writer.write(http(SHORT))
        await gate.started.wait()
        await until(lambda: connection.flow is not None)
        rig.context.unread.bytes += 10**9  # others'
        writer.write(NOWHERE * 6_000)
        await until(lambda: rig.context.unread.refused == 1)
        rig.context.unread.bytes -= 10**9
        rig.sweep()
        assert (connection in rig.connections, len(connection._waiting)) == (True, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await asyncio.sleep(0.05)
        rig.sweep()
        await until(lambda: not rig.connections)
        await until(rig.idle)

    run(go, config=NARROW)


def test_a_client_that_is_not_read_is_asked_whether_it_is_there():
    """One that was killed behind a silent stream sent its end and no reset, which nobody reads: it was never found."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = gate = Gate()
        reader, writer, connection = await rig.connect()
        writer.write(http(SHORT) + NOWHERE * 6_000)
        await gate.started.wait()
        await until(lambda: is_paused(connection._transport))
        assert connection._transport is not None
        ours = connection._transport.get_extra_info("socket")
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == ASKED_EACH_S
        gate.open.set()
        assert (await answer_of(reader))[0] == 200
        for _ in range(6_000):
            assert (await answer_of(reader))[0] == 404

    run(go)
