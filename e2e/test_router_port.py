"""The router's port on real processes: TLS and client certificates that change while streams run, several processes behind it,
new configuration and SIGTERM without a dropped stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from e2e.bench.proxies import Proxy, ours, workers
from e2e.certs import Authority
from fleet_router.config import RouterConfig, encode
from fleet_wire.endpoints import ROUTER_CONFIG_KEY

pytestmark = pytest.mark.timeout(200)
HOST = "127.87.1.1"
URL = f"https://{HOST}:8080"
ADMIN = f"http://{HOST}:8081"
WORKERS = ["127.87.0.1:8000", "127.87.0.2:8000"]
CONFIG = RouterConfig(fleet="bench", served_name="tiny")
STREAMS = 20
CHUNKS = 600
"""Of a stream, 5 ms each."""


@contextmanager
def router(tmp_path: Path, *extra: str) -> Iterator[Proxy]:
    with workers(WORKERS, tmp_path), ours("ours", f"{HOST}:8080", [], WORKERS, tmp_path, CONFIG, extra=extra) as proxy:
        yield proxy


@contextmanager
def tls_router(tmp_path: Path, *extra: str, ca: Path | None = None) -> Iterator[tuple[Proxy, Authority]]:
    """Ready by its port for probes; certificate and key are tls.crt and tls.key."""
    authority = Authority(tmp_path, "server-ca")
    cert, key = authority.leaf("one", HOST, to="tls")
    files = ["--tls-cert", str(cert), "--tls-key", str(key), *(["--tls-client-ca", str(ca)] if ca is not None else [])]
    with (
        workers(WORKERS, tmp_path),
        ours("ours", f"{HOST}:8080", [], WORKERS, tmp_path, CONFIG, extra=[*files, *extra], ready=f"{ADMIN}/ready") as proxy,
    ):
        yield proxy, authority


def trusting(authority: Authority, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.file))
    if client is not None:
        context.load_cert_chain(*client)
    return context


def served_by(authority: Authority, client: tuple[Path, Path] | None = None) -> str:
    """Subject of the router's certificate; OSError when there is no handshake. TLS 1.3 tells a client afterwards."""
    with (
        socket.create_connection((HOST, 8080), timeout=5) as plain,
        trusting(authority, client).wrap_socket(plain, server_hostname=HOST) as secure,
    ):
        secure.sendall(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        if not (answer := secure.recv(4096)):
            raise ConnectionResetError("closed without an answer")
        assert b" 200 " in answer
        found: Any = secure.getpeercert()
        return str(found["subject"][0][0][1])


def until(check: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.1)


async def stream(begun: asyncio.Semaphore, context: ssl.SSLContext | None = None, chunks: int = CHUNKS) -> bool:
    """Whether one stream came whole; says when its first bytes are there."""
    reader, writer = await asyncio.open_connection(HOST, 8080, ssl=context)
    body = json.dumps({"model": "tiny", "prompt": "p", "max_tokens": chunks, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    got = await reader.read(1)
    begun.release()
    while b"data: [DONE]" not in got[-100:] and (piece := await reader.read(65536)):
        got += piece
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return got.count(b"data: {") == chunks and b"data: [DONE]" in got


async def streams_during(act: Callable[[], None], context: ssl.SSLContext | None = None) -> int:
    """How many of STREAMS streams came whole while `act` ran beside them, begun after all of them."""
    begun = asyncio.Semaphore(0)
    running = [asyncio.create_task(stream(begun, context)) for _ in range(STREAMS)]
    for _ in running:
        await begun.acquire()
    await asyncio.to_thread(act)
    assert not all(task.done() for task in running), "nothing ran while it happened"
    return sum(await asyncio.gather(*running))


def test_certificates_are_changed_under_running_streams(tmp_path: Path):
    with tls_router(tmp_path) as (_, authority):
        assert served_by(authority) == "one"

        def change() -> None:
            authority.leaf("two", HOST, to="tls")
            until(lambda: served_by(authority) == "two", 5)

        assert asyncio.run(streams_during(change, trusting(authority))) == STREAMS
        (tmp_path / "tls.crt").write_text("no certificate")  # the last good one stays in force
        until(lambda: "fleet_router_follow_errors_total 0" not in httpx.get(f"{ADMIN}/metrics", trust_env=False).text)
        assert served_by(authority) == "two"
        authority.leaf("three", HOST, to="tls")
        until(lambda: served_by(authority) == "three")


def test_only_clients_of_the_present_ca_are_let_in(tmp_path: Path):
    first, second = Authority(tmp_path, "clients-1"), Authority(tmp_path, "clients-2")
    ca = tmp_path / "clients.pem"
    ca.write_bytes(first.pem)
    mine, others = first.leaf("mine"), second.leaf("others")
    with tls_router(tmp_path, ca=ca) as (_, authority):

        def let_in(client: tuple[Path, Path] | None) -> bool:
            try:
                return served_by(authority, client) == "one"
            except OSError:
                return False

        assert [let_in(mine), let_in(others), let_in(None)] == [True, False, False]
        ca.write_bytes(second.pem)
        until(lambda: let_in(others))
        assert [let_in(mine), let_in(None)] == [False, False]


def test_probes_have_a_port_of_their_own_and_nothing_else_is_there(tmp_path: Path):
    with tls_router(tmp_path) as (_, authority), httpx.Client(base_url=ADMIN, trust_env=False) as client:
        found = {path: client.get(path).status_code for path in ("/health", "/ready", "/metrics", "/held", "/v1/models")}
        assert found == {"/health": 200, "/ready": 200, "/metrics": 200, "/held": 200, "/v1/models": 404}
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 404
        with socket.create_connection((HOST, 8080), timeout=5) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
            assert b"HTTP/1.1" not in plain.recv(100)  # a TLS alert, or nothing
        assert served_by(authority) == "one"


def test_a_router_without_its_certificate_does_not_begin_to_speak_plain(tmp_path: Path):
    with pytest.raises(RuntimeError, match="TlsFailed"), ours(
        "ours", f"{HOST}:8080", [], WORKERS, tmp_path, CONFIG,
        extra=["--tls-cert", str(tmp_path / "none.crt"), "--tls-key", str(tmp_path / "none.key")],
    ):  # fmt: skip
        pass


def test_new_configuration_drops_no_stream(tmp_path: Path):
    with router(tmp_path):
        folder = tmp_path / f"{HOST}-8080"

        def change() -> None:
            for turn in range(10):
                config = msgspec.structs.replace(CONFIG, load_bound=1.25 + turn / 10, max_output_tokens=4096 - turn)
                fresh = folder / ".new"
                fresh.write_text(encode(config))
                fresh.rename(folder / ROUTER_CONFIG_KEY)
                time.sleep(0.15)
            (folder / ROUTER_CONFIG_KEY).write_text("{")

        assert asyncio.run(streams_during(change)) == STREAMS
        log = (tmp_path / f"{HOST}-8080").with_suffix(".log").read_text()
        assert log.count('"event":"endpoints"') >= 3
        assert '"event":"follow-failed"' in log


@pytest.mark.parametrize("processes", [1, 3])
def test_sigterm_drains_and_nobody_notices(tmp_path: Path, processes: int):
    """Streams run to their end; who asks after that finds no port. The exit code is 0."""
    with router(tmp_path, *(["--processes", str(processes)] if processes > 1 else [])) as proxy:
        assert proxy.pid is not None
        pid = proxy.pid
        assert asyncio.run(streams_during(lambda: os.kill(pid, signal.SIGTERM))) == STREAMS
        until(refused)
        log = (tmp_path / f"{HOST}-8080").with_suffix(".log")
        until(lambda: log.read_text().count('"event":"drained","left":0') == processes)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def refused() -> bool:
    try:
        socket.create_connection((HOST, 8080), timeout=2).close()
    except ConnectionRefusedError:
        return True
    return False


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def total(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE))


def ask_many(count: int) -> Sequence[int]:
    """Status of each, a connection each."""
    body = {"model": "tiny", "prompt": "p", "max_tokens": 4}
    return [httpx.post(f"http://{HOST}:8080/v1/completions", json=body, trust_env=False).status_code for _ in range(count)]


def test_processes_share_the_port_and_answer_for_each_other(tmp_path: Path):
    """Each of three takes some of the connections; a scrape sees all of it; one that is killed comes back."""
    with router(tmp_path, "--processes", "3") as proxy:
        assert proxy.pid is not None
        assert ask_many(60) == [200] * 60
        url = f"http://{HOST}:8080"
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        assert (total(metrics, "fleet_router_requests_total"), total(metrics, "fleet_router_endpoints")) == (60, 2)
        until(lambda: total(httpx.get(f"{url}/metrics", trust_env=False).text, "fleet_router_gossip_peers") == 2)
        shown = httpx.get(f"{url}/debug/decisions?limit=200", trust_env=False).json()["decisions"]
        assert len({row["request_id"] for row in shown}) >= 60
        one = httpx.get(f"{url}/debug/decisions?id={shown[-1]['request_id']}", trust_env=False).json()["decisions"]
        assert [row["request_id"] for row in one] == [shown[-1]["request_id"]]
        assert httpx.get(f"{url}/debug/decisions?id=none", trust_env=False).status_code == 404
        assert httpx.get(f"{url}/held?wait_s=0.2", trust_env=False).text == "0\n"
        before = children(proxy.pid)
        cpu = [int(Path(f"/proc/{pid}/stat").read_text().split()[13]) for pid in before]
        assert len(before) == 3
        assert min(cpu) > 0
        os.kill(before[0], signal.SIGKILL)
        until(lambda: len(set(children(proxy.pid or 0)) - set(before)) == 1)
        until(lambda: httpx.get(f"{url}/ready", trust_env=False).status_code == 200)
        assert ask_many(10) == [200] * 10
        os.kill(proxy.pid, signal.SIGKILL)  # nobody keeps the port
        until(refused)


def test_a_port_that_somebody_else_has_is_not_shared_with_him(tmp_path: Path):
    (tmp_path / "other").mkdir()
    with (
        router(tmp_path, "--processes", "2"),
        pytest.raises(RuntimeError, match="AddressInUse"),
        ours(
            "other",
            f"{HOST}:8080",
            [],
            WORKERS,
            tmp_path / "other",
            CONFIG,
            extra=["--processes", "2"],
            ready="http://127.0.0.1:1",
        ),
    ):
        pass
