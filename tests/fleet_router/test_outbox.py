"""Writes at the end of a turn: in order, bounded, never to a transport that is closed."""

from __future__ import annotations

import asyncio
from typing import Any

from fleet_router.outbox import MOST, Outbox
from fleet_router.process import Router, Settings


class Wire:
    def __init__(self, log: list[tuple[str, bytes]], name: str) -> None:
        self.log, self.name, self.closing = log, name, False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.log.append((self.name, data))


def wires(*names: str) -> tuple[list[tuple[str, bytes]], list[Any]]:
    log: list[tuple[str, bytes]] = []
    return log, [Wire(log, name) for name in names]


def test_writes_wait_for_the_end_of_the_turn_and_keep_their_order():
    async def go() -> None:
        box, (log, (one, other)) = Outbox(), wires("one", "other")
        for number in range(3):
            box.write(one, b"%d" % number)
            box.write(other, b"%d" % number)
        assert log == []
        await asyncio.sleep(0)
        assert log == [(name, b"%d" % number) for number in range(3) for name in ("one", "other")]
        box.write(one, b"next turn")
        await asyncio.sleep(0)
        assert log[-1] == ("one", b"next turn")

    asyncio.run(go())


def test_no_more_than_a_few_wait():
    async def go() -> None:
        box, (log, (one,)) = Outbox(), wires("one")
        for number in range(2 * MOST + 1):
            box.write(one, b"%d" % number)
            assert len(log) == (number + 1) // MOST * MOST
        await asyncio.sleep(0)
        assert [int(data) for _, data in log] == list(range(2 * MOST + 1))

    asyncio.run(go())


def test_who_flushes_before_he_closes_loses_nothing_and_what_comes_later_is_dropped():
    async def go() -> None:
        box, (log, (one, other)) = Outbox(), wires("one", "other")
        box.write(one, b"answer")
        box.flush()
        one.closing = True
        box.write(one, b"too late")
        box.write(other, b"still here")
        await asyncio.sleep(0)
        assert log == [("one", b"answer"), ("other", b"still here")]

    asyncio.run(go())


def test_what_is_written_while_it_flushes_is_not_lost():
    async def go() -> None:
        box, (log, (one, other)) = Outbox(), wires("one", "other")
        told = one.write

        def write(data: bytes) -> None:
            told(data)
            if data == b"first":
                box.write(other, b"from within")

        one.write = write
        box.write(one, b"first")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert log == [("one", b"first"), ("other", b"from within")]

    asyncio.run(go())


class ClientWire(Wire):
    """A client's transport."""

    def get_extra_info(self, _: str) -> None: ...
    def set_write_buffer_limits(self, high: int) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closing = True


def test_a_client_that_leaves_in_the_same_turn_has_its_answer():
    async def go() -> None:
        for last, head in ((False, b""), (True, b"connection: close\r\n")):
            log: list[tuple[str, bytes]] = []
            wire, connection = ClientWire(log, "client"), Router(Settings("dir:/nowhere", "127.0.0.1", 1)).connection()
            connection.connection_made(wire)  # type: ignore[arg-type] # no asyncio.Transport
            connection.data_received(b"GET /health HTTP/1.1\r\nhost: h\r\n" + head + b"\r\n")
            assert (len(log), wire.closing) == (int(last), last)
            assert connection.eof_received() is False  # whoever calls it closes
            assert len(log) == 1

    asyncio.run(go())
