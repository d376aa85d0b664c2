"""S1, S3 and R6 of the reliability list on real router processes: keys, crowds without one, noise at every port, a router that
dies in mid-stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import time
from pathlib import Path

import grpc
import pytest

from e2e.bench.proxies import Proxy, ours
from e2e.certs import Authority
from e2e.emulated.fleet import Emulated, get, until
from e2e.test_router_admission import key_of, tenants_file
from e2e.test_router_faults_http import ASK, CONFIG, GOOD, HOST, PORT, URL, WORKER, connect, router, status
from fleet_router.config import RouterConfig
from tests.listening import ALWAYS, documented, listening

pytestmark = pytest.mark.timeout(900)
README = Path(__file__).resolve().parents[1] / "router/README.md"
TRIES = int(os.environ.get("FLEET_S1_TRIES", "4000"))
"""Of each kind; the list's 10^5 are `FLEET_S1_TRIES=50000`."""


def test_s1_a_wrong_key_is_refused_as_fast_however_near_it_is(tmp_path: Path):
    """Tries in turn on one connection: a key that shares all but the last character with a real one, and one that shares nothing.
    The medians may differ by noise alone; without a key, and with a right one at a path that needs it, the answers are right."""
    real = key_of("acme")
    near, far = real[:-1] + ("0" if real[-1] != "0" else "1"), "sk-" + "z" * (len(real) - 3)
    with router(tmp_path, tenants=tenants_file(tmp_path / "tenants.json", acme={})) as target, connect() as opened:

        def tried(key: str) -> float:
            begun = time.perf_counter()
            opened.sendall(f"GET /v1/models HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\n\r\n".encode())
            got = opened.recv(65_536)
            took = time.perf_counter() - begun
            assert status(got) == (200 if key == real else 401)
            return took

        took: dict[str, list[float]] = {near: [], far: []}
        for turn in range(TRIES):
            for key in (near, far) if turn % 2 else (far, near):
                took[key].append(tried(key))
        tried(real)
        ratio = statistics.median(took[near]) / statistics.median(took[far])
        print(f"near / far {ratio:.4f}")
        assert 0.95 < ratio < 1.05
        for header in (b"", b"authorization: Basic abc\r\n", b"authorization: Bearer \r\n", b"x-api-key: \r\n"):
            opened.sendall(GOOD.replace(b"host", header + b"host", 1))
            assert status(opened.recv(65_536)) == 401, header
        assert target.recorder.seen == []


PATIENT = RouterConfig(fleet="bench", served_name="tiny")
CROWD = 300
REQUEST = b"GET /nope HTTP/1.1\r\nhost: h\r\n\r\n"
NOWHERE = REQUEST * 8_000


def crowd(opened: contextlib.ExitStack) -> list[socket.socket]:
    """Clients that have room for 4 KB of answers."""
    made = [opened.enter_context(socket.socket()) for _ in range(CROWD)]
    for one in made:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        one.settimeout(10)
        one.connect((HOST, PORT))
        one.setblocking(False)
    return made


def push(clients: list[socket.socket]) -> int:
    """Bytes that were taken of them: as many as the router takes, until it has taken none for some seconds."""
    taken, quiet_until = dict.fromkeys(clients, 0), time.monotonic() + 3
    while time.monotonic() < quiet_until:
        for one, so_far in taken.items():
            with contextlib.suppress(BlockingIOError):
                taken[one] += one.send(NOWHERE[so_far % len(REQUEST) :])
                quiet_until = time.monotonic() + 3
    return sum(taken.values())


def test_a_crowd_without_keys_that_does_not_read_holds_little_and_keeps_nobody_out(tmp_path: Path):
    """Each held 1.3 MB until it had been idle for 75 s, and nobody counted it; and 64 that sent large bodies slowly were all that
    there was room for."""
    key = f"authorization: Bearer {key_of('acme')}\r\nhost".encode()
    body = ASK + b" " * 200_000
    with (
        router(tmp_path, PATIENT, tenants_file(tmp_path / "tenants.json", acme={})) as target,
        contextlib.ExitStack() as opened,
    ):
        before_mb = target.rss_mb()
        clients = crowd(opened)
        taken = push(clients)
        held_mb = target.rss_mb() - before_mb
        print(f"{taken / CROWD / 1e6:.2f} MB sent by each of {CROWD}, {held_mb:.0f} MB held")
        assert taken > CROWD * 200_000
        assert held_mb < CROWD * 0.4
        with connect() as one:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
            one.sendall(head.replace(b"host", key, 1) + body[:150_000])
            time.sleep(0.5)
            one.sendall(body[150_000:])
            assert status(one.recv(65_536)) == 200
            one.sendall(head + body[:150_000])
            assert status(one.recv(65_536)) == 401  # before the rest was sent


def bomb_of(path: Path) -> bytes:
    """A pickle (protocol 0) that leaves a file when somebody loads it; written out, because nothing here may import pickle."""
    return b"cposix\nsystem\n(Vtouch %s\ntR." % str(path).encode()


def noises_of(mark: Path) -> list[bytes]:
    """Random bytes, a pickle that would leave `mark`, frames that are too long, a TLS hello, HTTP/2 that goes wrong."""
    bomb, http2 = bomb_of(mark), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings, too_long = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"
    return [
        os.urandom(100), os.urandom(200_000), bomb, bomb * 10_000, b"\xff" * 70_000,
        b"\x16\x03\x01\x40\x00\x01" + os.urandom(500),
        http2 + os.urandom(10_000), http2 + settings + too_long + b"\xff" * 200_000, http2 + settings + bomb * 100,
    ]  # fmt: skip


def picker_serves(channel: grpc.Channel) -> bool:
    """gRPC's own health check, liveness."""
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    return check(b"\x0a\x08liveness", timeout=10, wait_for_ready=True) == b"\x08\x01"


@pytest.mark.smoke
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_s3_noise_at_every_port_and_no_port_that_is_not_documented(tmp_path: Path, tls: bool):
    """All ports are open, and they are the README's. Each of them serves afterwards."""
    authority, mark, secret = Authority(tmp_path, "ca"), tmp_path / "executed", tmp_path / "gossip.key"
    cert, key = authority.leaf("router", HOST)
    secret.write_text("g" * 40)
    extra = ["--gossip-key", str(secret), "--gossip-port", "8082", "--ext-proc-port", "9002", "--admin-port", "8081"]
    extra += ["--tls-cert", str(cert), "--tls-key", str(key)] if tls else []
    ready, noises = f"http://{HOST}:8081/health", noises_of(mark)
    with ours("ours", f"{HOST}:{PORT}", [], [WORKER], tmp_path, CONFIG, extra=extra, ready=ready) as proxy:
        assert proxy.pid is not None
        until("all ports are open", lambda: len(listening(proxy.pid)) >= 4, 10)
        assert listening(proxy.pid) == documented(README)
        for port in (8080, 8081, 9002):
            for noise in noises:
                with socket.create_connection((HOST, port), timeout=15) as opened:
                    with contextlib.suppress(OSError):
                        opened.sendall(noise)
                        opened.shutdown(socket.SHUT_WR)
                    got = b""
                    with contextlib.suppress(ConnectionResetError):
                        while piece := opened.recv(65_536):
                            got += piece
                    assert status(got) in (0, 400, 408, 414, 431), (port, noise[:20], got[:100])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
            for count, noise in enumerate(noises, start=1):  # one by one: the system drops what its buffer has no room for
                opened.sendto(noise[:60_000], (HOST, 8082))
                until("it is refused", lambda so_far=count: refused(proxy) == so_far, 5)
        assert not mark.exists()
        assert get(f"http://{HOST}:8081/health") == b"ok\n"
        roots = grpc.ssl_channel_credentials(authority.file.read_bytes())
        with grpc.secure_channel(f"{HOST}:9002", roots) if tls else grpc.insecure_channel(f"{HOST}:9002") as channel:
            assert picker_serves(channel)


def refused(proxy: Proxy) -> int:
    text = get(f"http://{HOST}:8081/metrics").decode()
    return sum(int(n) for n in re.findall(r"^fleet_router_gossip_refused_total\{.*\} (\d+)$", text, re.M))


@pytest.mark.smoke
def test_s3_a_plain_router_has_one_port(tmp_path: Path):
    with router(tmp_path) as target:
        assert listening(target.pid) == documented(README, [ALWAYS])
        assert get(f"{URL}/health") == b"ok\n"


async def stream(address: str, seed: int, begun: asyncio.Semaphore) -> bytes:
    """Everything of one stream."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(
        {"model": "tiny", "prompt": [seed, 1, 2, 3], "max_tokens": 1_500, "stream": True, "temperature": 0}
    ).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    got = await reader.readuntil(b"data: ")
    begun.release()
    with contextlib.suppress(ConnectionResetError):
        while b"data: [DONE]" not in got[-200:] and (piece := await reader.read(65_536)):
            got += piece
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return got


def test_r6_a_router_that_is_killed_in_mid_stream(tmp_path: Path):
    """Two routers, ten streams each. Clients of the one that dies see a cut stream, never [DONE]; its work ends within 2 s; the
    other's streams come whole."""
    with Emulated(tmp_path, 102, 0, 2) as fleet:
        other = f"127.102.0.2:{PORT}"
        rows = [f"{worker.host}:8000" for worker in fleet.decode]
        with ours("other", other, [], rows, tmp_path, fleet.config):

            def running() -> int:
                return sum(int(worker.stats()["running"]) for worker in fleet.decode)

            async def go() -> tuple[list[bytes], list[bytes], float]:
                begun = asyncio.Semaphore(0)
                cut = [asyncio.create_task(stream(fleet.address, i, begun)) for i in range(10)]
                whole = [asyncio.create_task(stream(other, 100 + i, begun)) for i in range(10)]
                for _ in range(20):
                    await begun.acquire()
                assert await asyncio.to_thread(running) == 20
                assert await asyncio.to_thread(fleet.kill_router) == -signal.SIGKILL
                freed = await asyncio.to_thread(until, "its work ends", lambda: running() <= 10, 2.0)
                return await asyncio.gather(*cut), await asyncio.gather(*whole), freed

            cut, whole, freed = asyncio.run(go())
            print(f"freed after {freed:.2f} s")
            assert not any(b"[DONE]" in got for got in cut)
            assert all(b"data: [DONE]" in got for got in whole)
            until("nothing runs", lambda: running() == 0, 5)
