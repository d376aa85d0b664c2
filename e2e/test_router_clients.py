"""Clients that people use, against a real router process: OpenAI's SDKs for Python and JavaScript, LangChain, LiteLLM, curl,
aiperf.

Each runs as a process of its own (`clients/`) and does what it is told by a line of JSON. Workers are emulated, so that every
text can be computed and faults come on demand; the last test is `fleet up` with real engines. `make e2e-clients` installs it all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.emulated.chat import flat
from e2e.emulated.fleet import Emulated, get, until
from e2e.emulated.tokens import said, word
from e2e.fleet_up import free_port, gone, running
from e2e.test_router_admission import key_of, tenants_file
from fleet_cli.up.bundled import tiny_model

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = ROOT / "e2e/clients"
NET = 131
TALK = [{"role": "user", "content": "What is the weather in Bonn"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It", "parameters": SCHEMA}}]
PROGRAMS = {
    "openai": "openai_python.py", "openai-js": "openai_js.mjs", "langchain": "langchain_chat.py", "litellm": "litellm_chat.py",
    "curl": "curl_chat.py",
}  # fmt: skip
NAMES = list(PROGRAMS)
pytestmark = pytest.mark.timeout(400)


class Client:
    """A client program; `ask` has one request made."""

    def __init__(self, argv: list[str]) -> None:
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def ask(self, **asked: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        told = {"model": "tiny", "messages": TALK, "max_tokens": 16, "key": key_of("acme"), **asked}
        if "input" in told:
            del told["messages"]
        self.process.stdin.write(json.dumps(told) + "\n")
        line = self.process.stdout.readline()
        assert line, "the client ended"
        return json.loads(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture(scope="module")
def installed() -> Path:
    """Where the clients are."""
    done = subprocess.run([str(CLIENTS / "get-clients")], check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip())


def argv_of(name: str, url: str, installed: Path) -> list[str]:
    """Of the program that speaks for this client; a test of one that is not here fails and says what is missing."""
    python = str(installed / "python/bin/python")
    if name == "openai-js":
        assert shutil.which("node"), "no node on this machine: OpenAI's SDK for JavaScript cannot run"
        return ["node", str(CLIENTS / "openai_js.mjs"), url, str(installed)]
    return [sys.executable if name == "openai" else python, str(CLIENTS / PROGRAMS[name]), url]


def long(mark: str) -> list[dict[str, Any]]:
    """Worth a prefill worker: nobody has its KV."""
    return [{"role": "user", "content": f"{mark}: a prompt that is long enough for a prefill worker. " * 40 + "The end is Bonn"}]


SDK = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError", 0: "APIError"}
CURL = {400: "exit 22", 401: "exit 22", 404: "exit 22", 429: "exit 22", 0: "exit 0"}
ERRORS = dict.fromkeys(NAMES, SDK) | {"curl": CURL, "litellm": {**SDK, 0: "MidStreamFallbackError"}}
"""What a program catches; 0: an error after the first byte."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """One prefill and two decode workers; tenants."""
    folder = tmp_path_factory.mktemp("clients")
    rare = {f"rare-{name}": {"requestsPerSecond": 0.001, "requestsBurst": 1} for name in NAMES}
    slow = {f"slow-{name}": {"requestsPerSecond": 0.5, "requestsBurst": 1} for name in NAMES}
    file = tenants_file(folder / "tenants.json", acme={}, **rare, **slow)
    with Emulated(folder, NET, 1, 2, extra=["--tenants", str(file)]) as made:
        yield made


@pytest.fixture(params=NAMES)
def client(request: pytest.FixtureRequest, fleet: Emulated, installed: Path) -> Iterator[Client]:
    made = Client(argv_of(request.param, f"http://{fleet.address}", installed))
    yield made
    made.stop()
    for worker in fleet.workers:
        worker.fault()
    fleet.quiet()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["client"])


def text_of(messages: list[dict[str, Any]], count: int = 16, seed: int = 0) -> str:
    """What the engine says to it."""
    return "".join(map(word, said(list(flat(messages).encode()), count, seed=seed)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_chat_is_answered_and_counted(client: Client, name: str, fleet: Emulated, stream: bool):
    for messages in (TALK, long(f"{name} {stream}")):
        legs = fleet.prefill[0].stats()["asked"]
        found = client.ask(messages=messages, stream=stream)
        assert found["text"] == text_of(messages), found
        assert found["usage"] == [len(flat(messages)), 16]
        assert found["finish"] == "length"
        assert found["pieces"] >= (16 if stream else 1)
        assert fleet.prefill[0].stats()["asked"] - legs == (messages is not TALK)
    assert client.ask(stream=stream, seed=11)["text"] == text_of(TALK, seed=11) != text_of(TALK)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_function_is_called_and_its_answer_taken(client: Client, stream: bool):
    found = client.ask(tools=TOOLS, stream=stream)
    assert "calls" in found, found
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"]] == [("weather", {"city": "Bonn"})]
    assert (found["text"], found["finish"], found["usage"]) == ("", "tool_calls", [len(flat(TALK)), 4])
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    talk = [*TALK, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]  # fmt: skip
    assert client.ask(messages=talk, tools=TOOLS, stream=stream)["text"] == text_of(talk)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_refusals_are_the_clients_own_errors(client: Client, name: str, fleet: Emulated, stream: bool):
    before = sum(worker.stats()["asked"] for worker in fleet.workers)
    wrong = [
        (400, {"max_tokens": 0}, "max_tokens"),
        (401, {"key": key_of("nobody")}, None),
        (404, {"model": "another"}, "model"),
    ]
    for status, asked, param in wrong:
        error = client.ask(stream=stream, **asked)["error"]
        assert error["status"] == status, error
        assert ERRORS[name][status] in error["types"], error
        if name != "litellm":  # it keeps the message and drops the rest of the body
            assert error["request_id"], error
            assert error["param"] in (param, param and param.replace("max_tokens", "max_completion_tokens"))  # LangChain's name
    assert sum(worker.stats()["asked"] for worker in fleet.workers) == before


def test_a_quota_is_an_error_that_says_when_to_come_again(client: Client, name: str):
    key = key_of(f"rare-{name}")
    assert client.ask(key=key)["text"] == text_of(TALK)
    error = client.ask(key=key)["error"]
    assert error["status"] == 429, error
    assert ERRORS[name][429] in error["types"]
    if name != "litellm":
        assert 900 <= int(error["retry_after"]) <= 1_001
        assert error["code"] == "rate_limit_exceeded"


def test_a_clients_own_retry_waits_as_it_is_told(client: Client, name: str, fleet: Emulated):
    """One request every two seconds: the second and third are refused first, and come again after Retry-After."""
    key, refused = key_of(f"slow-{name}"), refusals(fleet)
    assert [client.ask(key=key, retries=2)["text"] for _ in range(3)] == [text_of(TALK)] * 3
    assert 2 <= refusals(fleet) - refused <= 4


def refusals(fleet: Emulated) -> float:
    return fleet.metric("requests_total", '"429"')


def test_a_client_that_leaves_in_mid_stream_frees_the_worker(client: Client, name: str, fleet: Emulated):
    """The program lives on: what ends the stream is the client's own way to close it."""
    for messages in (TALK, long(f"{name} leaves")):
        assert client.ask(messages=messages, max_tokens=4_000, stream=True, stop_after=5) == {"stopped": 5}
        took = until("the worker is free", lambda: not any(worker.stats()["running"] for worker in fleet.workers), 2.0)
        print(f"free after {took:.2f} s")
        assert client.process.poll() is None
    assert client.ask()["text"] == text_of(TALK)


def test_a_stream_that_breaks_is_an_error_and_no_answer(client: Client, name: str, fleet: Emulated):
    """Its tokens are not determined, so that nobody can carry it on."""
    for worker in fleet.decode:
        worker.fault(mode="reset", after_tokens=5)
    found = client.ask(stream=True, temperature=1.0)
    assert sum(worker.stats()["faulty"] for worker in fleet.decode) >= 1
    assert "error" in found, found
    assert ERRORS[name][0] in found["error"]["types"]
    assert "the worker closed the connection" in found["error"]["message"]
    for worker in fleet.decode:
        worker.fault()
    assert client.ask()["text"] == text_of(TALK)


def test_responses_with_the_javascript_sdk(fleet: Emulated, installed: Path):
    client = Client(argv_of("openai-js", f"http://{fleet.address}", installed))
    for stream in (False, True):
        found = client.ask(input="What is the weather in Bonn", stream=stream)
        assert found["text"] == text_of(TALK), found
        assert (found["usage"], found["finish"]) == ([len(flat(TALK)), 16], "incomplete")  # it was cut by its limit
    client.stop()


def test_real_engines_say_the_same_to_all_clients(tmp_path: Path, installed: Path):
    """`fleet up`: texts of all clients are one text, whole or streamed; who leaves frees the engine."""
    port, state = free_port(), tmp_path / "state"
    url = f"http://127.0.0.1:{port}"
    talk = [{"role": "user", "content": "the router sends this to a worker, and the worker answers it " * 8}]
    with running("--port", str(port), "--state", str(state)) as up:
        up.until("ready after")
        texts, usages = set(), set()
        for name in NAMES:
            client = Client(argv_of(name, url, installed))
            for stream in (False, True):
                found = client.ask(messages=talk, max_tokens=24, stream=stream, key="none")
                texts.add(found["text"])
                usages.add(tuple(found["usage"]))
            assert client.ask(messages=talk, max_tokens=700, stream=True, stop_after=5, key="none") == {"stopped": 5}
            until("nothing runs", lambda: "fleet_router_inflight" in metrics(url) and not inflight(url), 5.0)
            client.stop()
        assert (len(texts), len(usages)) == (1, 1), (texts, usages)
        assert len(texts.pop()) > 20
        assert usages.pop()[1] == 24
        profiled(url, installed, tmp_path)
    assert gone(state)


def metrics(url: str) -> str:
    return get(f"{url}/metrics").decode()


def inflight(url: str) -> bool:
    lines = [line for line in metrics(url).splitlines() if line.startswith("fleet_router_inflight")]
    return any(not line.endswith(" 0") for line in lines)


def profiled(url: str, installed: Path, folder: Path) -> None:
    """One run of aiperf: all of its requests come out, and the router counted as many."""
    before = answered(url)
    argv = [
        str(installed / "python/bin/aiperf"), "profile", "--model", "tiny", "--url", url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", str(tiny_model()), "--synthetic-input-tokens-mean", "60", "--output-tokens-mean", "8",
        "--concurrency", "3", "--request-count", "24", "--random-seed", "1", "--artifact-dir", str(folder / "aiperf"),
        "--ui", "none",
    ]  # fmt: skip
    # offline, as the Makefile has it, aiperf looks a tokenizer's folder up as a name in its cache
    env = {name: value for name, value in os.environ.items() if name not in {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = (folder / "aiperf").rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    assert found["request_count"]["avg"] == 24
    assert found["time_to_first_token"]["avg"] > 0
    assert not found.get("error_summary")
    assert answered(url) - before == 24


def answered(url: str) -> float:
    """Requests that were answered 200."""
    lines = [line for line in metrics(url).splitlines() if line.startswith("fleet_router_requests_total{") and '"200"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
