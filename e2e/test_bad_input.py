"""Bad input at a fleet that is running: each gets an answer that names the cause, nobody else notices, and nothing leaks."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.fleet_up import free_port, gone, marked, running

PROMPT = "The decode worker reads two blocks and counts the longest prefix again. " * 20
GREEDY = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
MIB = 1024 * 1024

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Victim:
    """A running fleet."""

    port: int
    state: Path
    expected: list[int]
    """Tokens of PROMPT before anything bad happened."""

    def post(self, **change: Any) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=GREEDY | {"prompt": PROMPT} | change, timeout=60)

    def raw(self, *pieces: bytes, timeout_s: float = 30.0) -> bytes:
        """Send, then everything that comes back until the other side closes; what a reset leaves unread does not matter."""
        got = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout_s) as connection:
            try:
                for piece in pieces:
                    connection.sendall(piece)
            except OSError:
                pass
            try:
                while data := connection.recv(65_536):
                    got += data
            except OSError:
                pass
        return got

    def engines(self) -> dict[str, str]:
        """Role and address of each engine process."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
                environment = (process / "environ").read_bytes()
            except OSError:
                continue
            if b"fleet_worker.engine" in command and str(self.state).encode() in environment:
                pairs = dict(line.split("=", 1) for line in environment.decode(errors="replace").split("\0") if "=" in line)
                found[pairs["FLEET_POD_IP"]] = json.loads(pairs["FLEET_WORKER_CONFIG"])["role"]
        return found

    def held(self) -> dict[str, float]:
        """Blocks that are not free, per engine."""
        return {ip: metric(ip, "fleet:kv_blocks_total") - metric(ip, "fleet:kv_blocks_free") for ip in self.engines()}


def metric(ip: str, name: str) -> float:
    lines = httpx.get(f"http://{ip}:8000/metrics", timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def eventually(check: Any, what: str, within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    state, port = tmp_path_factory.mktemp("bad") / "state", free_port()
    with running("--port", str(port), "--state", str(state)) as fleet:
        fleet.until("curl -s")
        found = Victim(port, state, [])
        yield Victim(port, state, found.post().json()["choices"][0]["token_ids"])
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.end() == 0, "".join(fleet.lines)
    assert gone(state)


@pytest.fixture(autouse=True)
def nobody_notices_and_nothing_leaks(victim: Victim) -> Iterator[None]:
    """Beside every bad request: a good one whose tokens are right; after it: every block free, every process alive."""
    alive = len(marked(victim.state))
    answers: list[list[int]] = []
    beside = threading.Thread(target=lambda: answers.append(victim.post().json()["choices"][0]["token_ids"]))
    beside.start()
    yield
    beside.join(60)
    assert answers == [victim.expected]
    eventually(lambda: not any(victim.held().values()), f"blocks are still held: {victim.held()}")
    assert len(marked(victim.state)) == alive
    assert victim.post().json()["choices"][0]["token_ids"] == victim.expected


def head(length: int | None = None, *fields: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"host: x", *fields]
    lines += [b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length]
    return b"\r\n".join([*lines, b"", b""])


def test_a_body_of_200_mb_is_refused_by_its_length(victim: Victim):
    got = victim.raw(head(200 * MIB), b" " * MIB)
    assert got.startswith(b"HTTP/1.1 413 ")
    assert b"larger than 4194304 bytes" in got


def test_200_mb_in_chunks_are_refused_when_they_are_too_many(victim: Victim):
    chunk = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"
    got = victim.raw(head(), *([chunk] * 200))
    assert got == b"" or b" 413 " in got  # the answer may be lost when the reset overtakes it, the bytes are not read
    eventually(lambda: router_rss_mb(victim) < 100, "the router kept the body")


def router_rss_mb(victim: Victim) -> float:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if b"fleet-router" in command and str(victim.state).encode() in (process / "environ").read_bytes():
                return int((process / "status").read_text().split("VmRSS:")[1].split()[0]) / 1024
        except OSError:
            continue
    raise AssertionError("no router process")


@pytest.mark.parametrize(
    ("request_bytes", "status", "words"),
    [
        (head(2, *(b"x-%d: 1" % i for i in range(10_000))) + b"{}", b"431", b"more than 100 header fields"),
        (head(2, b"x: " + b"y" * MIB) + b"{}", b"431", b""),
        (head(16) + b'{"model": "tiny"', b"400", b"the body is not a JSON object"),
        (head(200_000) + b"[" * 200_000, b"400", b"the body is not a JSON object"),
        (head(2) + b"[]", b"400", b"the body is not a JSON object"),
        (head(4) + b"\xff\xfe\x00{", b"400", b"the body is not a JSON object"),
        (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", b"405", b"POST is needed here"),
        (b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", b"404", b"no such path: /v1/nothing"),
        (b"hello\r\n\r\n", b"400", b"malformed"),
    ],
    ids=["10000-headers", "long-header", "cut-json", "deep-json", "array", "not-utf8", "wrong-method", "wrong-path", "no-http"],
)
def test_what_cannot_be_read_is_told_why(victim: Victim, request_bytes: bytes, status: bytes, words: bytes):
    with_end = request_bytes.replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n", 1)
    got = victim.raw(with_end)
    assert got.split(b" ")[1:2] == [status], got[:300]
    assert words in got
    assert b'"error"' in got


def test_tls_on_a_plain_port_ends(victim: Victim):
    with pytest.raises((ssl.SSLError, OSError)), socket.create_connection(("127.0.0.1", victim.port), 10) as connection:
        ssl.create_default_context().wrap_socket(connection, server_hostname="localhost")


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"prompt": PROMPT * 20}, 400, "longer than"),
        ({"prompt": [5] * 5_000}, 400, "5000 tokens"),
        ({"prompt": [99_999] * 10}, 400, "token ids outside"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"max_tokens": 10**9}, 400, "max_tokens is 1000000000"),
        ({"max_tokens": 0}, 400, "max_tokens is 0"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"model": "gpt-4"}, 404, "The model `gpt-4` does not exist"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"stream": "yes"}, 400, "stream"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_cannot_be_served_names_the_field(victim: Victim, change: dict[str, Any], status: int, words: str):
    answer = victim.post(**change)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("after_events", [0, 1, 5], ids=["before-a-byte", "after-the-first-event", "in-the-middle"])
def test_a_client_that_leaves(victim: Victim, after_events: int):
    body = json.dumps(GREEDY | {"prompt": f"{after_events} {PROMPT}", "max_tokens": 600, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", victim.port), 30) as connection:
        connection.sendall(head(len(body)) + body)
        got = b""
        while got.count(b"data: ") < after_events:
            got += connection.recv(4_096)
    eventually(lambda: not any(running_now(ip) for ip in victim.engines()), "an engine still runs what nobody reads", 5.0)


def running_now(ip: str) -> float:
    return metric(ip, "vllm:num_requests_running") + metric(ip, "vllm:num_requests_waiting")


def test_killed_engines_cost_no_wrong_token(victim: Victim):
    """A prefill engine, then a decode engine: answers are right or an error, and both come back."""
    for role in ("prefill", "decode"):
        ip = next(ip for ip, found in victim.engines().items() if found == role)
        os.kill(httpx.get(f"http://{ip}:9000/state").json()["engine_pid"], signal.SIGKILL)
        for i in range(6):
            answer = victim.post()
            assert answer.status_code in (200, 502, 503), (i, answer.text)
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["token_ids"] == victim.expected
        eventually(lambda: len(victim.engines()) == 3 and all_ready(victim), f"the {role} worker did not come back", 60.0)


def all_ready(victim: Victim) -> bool:
    try:
        return all(httpx.get(f"http://{ip}:9000/ready", timeout=2).status_code == 200 for ip in victim.engines())
    except httpx.HTTPError:
        return False
