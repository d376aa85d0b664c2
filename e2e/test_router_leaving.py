"""SIGTERM to a real router that has everything at once: streams that end in time and that do not, queued requests, requests that
wait for a worker to come back, silent and half-sent ones, kept connections, listeners, a gateway's calls."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest

from e2e.emulated.fleet import CONFIG, Emulated
from fleet_router.config import HttpBounds
from fleet_router.epp.messages import FULL_DUPLEX, SERVICE, ProcessingRequest, ProcessingResponse

pytestmark = pytest.mark.timeout(120)
DRAIN_S, DEADLINE_S, SLACK_S = 6.0, 2.0, 1.0
BOUNDS = HttpBounds(header_deadline_s=DEADLINE_S, body_deadline_s=DEADLINE_S)
LATE = msgspec.structs.replace(CONFIG, worker_slots=2, bounds=BOUNDS, inter_token_deadline_s=30.0)
CUT = b'"code":"shutting_down"'


def request(tokens: int, number: int, *, stream: bool = True) -> bytes:
    body = json.dumps(
        {"model": "tiny", "prompt": [number, 2, 3], "max_tokens": tokens, "temperature": 0, "stream": stream}
    ).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode()


class Clients:
    """Connections by name; how each ended, and when."""

    def __init__(self, address: str) -> None:
        self.host, port = address.split(":")
        self.port, self.since = int(port), 0.0
        self.open: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def send(self, name: str, data: bytes, wait_s: float = 0.15) -> None:
        if name not in self.open:
            self.open[name] = await asyncio.open_connection(self.host, self.port)
        self.open[name][1].write(data)
        await asyncio.sleep(wait_s)

    async def ends(self) -> dict[str, tuple[float, bytes]]:
        async def end(reader: asyncio.StreamReader) -> tuple[float, bytes]:
            got = await reader.read(-1)
            return time.monotonic() - self.since, got

        found = await asyncio.gather(*(end(reader) for reader, _ in self.open.values()))
        for _, writer in self.open.values():
            writer.close()
        return dict(zip(self.open, found, strict=True))


def head() -> Any:
    said = ProcessingRequest()
    said.protocol_config.request_body_mode = said.protocol_config.response_body_mode = FULL_DUPLEX
    for name, value in {":path": "/v1/completions", ":method": "POST"}.items():
        said.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return said


def piece(raw: bytes) -> Any:
    said = ProcessingRequest()
    said.request_body.body, said.request_body.end_of_stream = raw.partition(b"\r\n\r\n")[2], True
    return said


async def told_to_go(fleet: Emulated, clients: Clients) -> None:
    """SIGTERM; nobody gets in any more."""
    assert fleet._router is not None
    clients.since = time.monotonic()
    os.kill(fleet._router.pid, signal.SIGTERM)
    await asyncio.sleep(0.3)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(clients.host, clients.port)


async def all_sorts(clients: Clients) -> None:
    """Four slots, all taken; `short` ends after two seconds and lets `queued` in, then `next`."""
    await clients.send("short", request(300, 1))
    for number, name in enumerate(("long", "longer", "longest")):
        await clients.send(name, request(4_000, 10 + number))
    await clients.send("queued", request(4, 20, stream=False))
    await clients.send("next", request(4_000, 21))
    await clients.send("never", request(4, 22, stream=False))
    await clients.send("idle", b"")
    await clients.send("half a head", b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n")
    await clients.send("half a body", request(4, 23)[:-9])
    await clients.send("listener", get("/held?wait_s=30"))
    await clients.send("kept", get("/health"))


def judge(found: dict[str, tuple[float, bytes]]) -> None:
    """How each ended, and when."""
    assert found["short"][1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert found["queued"][1].startswith(b"HTTP/1.1 200")
    assert max(found["short"][0], found["queued"][0]) < DRAIN_S - SLACK_S
    for name in ("long", "longer", "longest", "next", "never"):
        assert CUT in found[name][1], name
        assert b"[DONE]" not in found[name][1]
        assert DRAIN_S - 0.1 <= found[name][0] <= DRAIN_S + SLACK_S
    assert found["never"][1].startswith(b"HTTP/1.1 503")
    for name in ("half a head", "half a body"):
        assert found[name][1].startswith(b"HTTP/1.1 408")
    assert found["idle"][1] == b""
    assert found["listener"][1].endswith(b"0\n")
    assert b"connection: close" in found["kept"][1].partition(b"ok\n")[2]
    most_s = {"half a head": DEADLINE_S, "half a body": DEADLINE_S, "idle": 1.0, "kept": 1.0, "listener": 0.0}
    assert {name: found[name][0] for name, most in most_s.items() if found[name][0] > most + SLACK_S} == {}


def test_each_ends_as_it_should_and_within_its_time(tmp_path: Path):
    async def go(fleet: Emulated) -> None:
        clients = Clients(fleet.address)
        await all_sorts(clients)
        async with grpc.aio.insecure_channel(f"{clients.host}:9002") as channel:
            call = channel.stream_stream(
                f"/{SERVICE}/Process", request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )()  # fmt: skip
            await call.write(head())
            await call.write(piece(request(4, 24)))
            await asyncio.sleep(0.2)
            await told_to_go(fleet, clients)
            await clients.send("kept", get("/v1/models"))
            ends = asyncio.create_task(clients.ends())
            told = (await call.read()).immediate_response
            picked_s = time.monotonic() - clients.since
        found = await ends
        assert fleet._router is not None
        assert await asyncio.to_thread(fleet._router.wait, 5) == 0
        took_s = time.monotonic() - clients.since
        print({name: (round(after, 2), got[-90:]) for name, (after, got) in found.items()}, took_s)
        judge(found)
        assert (told.status.code, CUT in told.body) == (503, True)
        assert DRAIN_S - 0.1 <= picked_s <= took_s <= DRAIN_S + SLACK_S
        assert [worker.stats()["running"] for worker in fleet.workers] == [0, 0]

    with Emulated(tmp_path, 123, 0, 2, LATE, ["--ext-proc-port", "9002", "--drain-timeout", str(DRAIN_S)]) as fleet:
        for worker in fleet.workers:
            worker.fault(tick_s=0.01)
        asyncio.run(go(fleet))


def test_who_waits_for_a_worker_to_come_back_is_answered_by_a_router_that_goes(tmp_path: Path):
    """The worker dies, the router is told to go, the worker is there again: with most of the drain left nobody is refused."""

    async def go(fleet: Emulated) -> None:
        clients, (worker,) = Clients(fleet.address), fleet.decode
        await clients.send("kept", get("/health"))
        uid = worker.uid
        assert worker.kill() == -9
        await clients.send("before", request(4, 1, stream=False), 0.5)
        await told_to_go(fleet, clients)
        await clients.send("kept", request(4, 2, stream=False), 0.5)
        worker.start(uid)
        found = await clients.ends()
        assert b"HTTP/1.1 200" in found["before"][1], found
        assert b"HTTP/1.1 200" in found["kept"][1].partition(b"ok\n")[2], found
        assert fleet._router is not None
        assert await asyncio.to_thread(fleet._router.wait, 5) == 0

    with Emulated(tmp_path, 124, 0, 1, CONFIG, ["--drain-timeout", "30"]) as fleet:
        asyncio.run(go(fleet))
