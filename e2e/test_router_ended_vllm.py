"""A worker of vLLM that is told to end and whose answers outlast its drain. vLLM 0.32 then ends each with finish_reason "abort"
(a stream with [DONE] behind it), as if it were whole; or, where its engine is killed sooner, it says nothing more of them, while
their connections stay open, until the agent kills all of it within 10 s. Both were seen here. No client gets half of an answer
as a whole one: what another worker can know again it goes on with or says anew, everything else ends with an error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.bench.proxies import ours
from e2e.emulated.fleet import until
from e2e.vllm.told import tell
from fleet_cli.up.bundled import tiny_model
from fleet_router.config import RouterConfig
from tests.conformance.workers import Worker, running, worker_config

ROOT = Path(__file__).resolve().parents[1]
HOSTS = ("127.89.2.1", "127.89.2.2")
ROUTER = "127.89.2.9:8080"
CONFIG = RouterConfig(
    fleet="f", served_name="tiny", resume="replay", slow_start_s=0.0, return_wait_s=0.0, first_token_deadline_s=300.0,
    inter_token_deadline_s=120.0,
)  # fmt: skip
"""Two vLLMs on two cores answer so slowly that deadlines would decide this."""
TEXT = "the router sends this to a worker, and the worker is told to end in the middle of it " * 4
TALK = [{"role": "user", "content": TEXT}]
LONG: dict[str, Any] = {"max_tokens": 800, "ignore_eos": True}
GREEDY: dict[str, Any] = {"temperature": 0}
FREE: dict[str, Any] = {"temperature": 1.0}
DRAIN_S = 0.5
BEGUN = 20
"""Events of each stream that are there when its engine is told to end."""
COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": TEXT, **LONG, **GREEDY}),
    "chat": (CHAT, {"messages": TALK, **LONG, **GREEDY}),
    "free text": (COMPLETIONS, {"prompt": TEXT, **LONG, **FREE}),
    "free chat": (CHAT, {"messages": TALK, **LONG, **FREE}),
    "messages": (MESSAGES, {"messages": TALK, "max_tokens": 800, **GREEDY}),
    "responses": (RESPONSES, {"input": TEXT, "max_output_tokens": 800, **GREEDY}),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    name: STREAMS[name] for name in ("text", "chat", "free text", "messages", "responses")
}
GO_ON = ("text", "chat", "messages", "responses")
"""Which streams another worker goes on with."""
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_200)]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    folder = tmp_path_factory.mktemp("workers")
    installed = subprocess.run([str(ROOT / "e2e/vllm/get-vllm")], check=True, capture_output=True, text=True)
    env = {"FLEET_VLLM_BIN": str(Path(installed.stdout.strip()) / "vllm"), "OMP_NUM_THREADS": "1"}
    config = worker_config("decode", tiny_model(), engine="vllm", drain_timeout_s=DRAIN_S, engine_args=("--dtype", "float32"))
    with running(config, HOSTS[0], folder, **env) as first, running(config, HOSTS[1], folder, **env) as second:
        yield [first, second]


class Told:
    """What clients are told by one address."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client, self._url = client, url

    async def stream(self, asked: tuple[str, dict[str, Any]], found: list[str], begun: asyncio.Event) -> None:
        """The data lines, as far as they come, to `found`."""
        path, body = asked
        async with self._client.stream("POST", self._url + path, json={"model": "tiny", **body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                found += [line[6:]] if line.startswith("data: ") else []
                if len(found) >= BEGUN:
                    begun.set()

    async def whole(self, asked: tuple[str, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        path, body = asked
        answer = await self._client.post(self._url + path, json={"model": "tiny", **body})
        return answer.status_code, answer.json()


def text_of(events: list[str]) -> str:
    """Of a stream in any dialect."""
    return "".join(text_in(json.loads(event)) for event in events if event != "[DONE]")


def text_in(event: dict[str, Any]) -> str:
    if "choices" in event:
        return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in event["choices"])
    delta = event.get("delta") or ""
    return str(delta) if isinstance(delta, str) else str(delta.get("text", ""))


def said_of(answer: dict[str, Any]) -> str:
    """The text of an answer in one piece, in any dialect."""
    if "choices" in answer:
        return str(answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"])
    blocks = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return "".join(block["text"] for block in blocks)


def ends_with_an_error(path: str, events: list[str]) -> bool:
    last = json.loads(events[-1]) if events[-1] != "[DONE]" else {}
    return last.get("type") == ("response.failed" if path == RESPONSES else "error") or (
        path in (COMPLETIONS, CHAT) and "error" in last
    )


async def told_to_end(workers: list[Worker], documents: Path) -> dict[str, Any]:
    """Everything is asked of the first engine, which is then told to end; the second is there since just before."""
    first, second = workers
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        router, direct, other = (Told(client, f"http://{at}") for at in (ROUTER, f"{first.ip}:8000", f"{second.ip}:8000"))
        begun = {name: asyncio.Event() for name in (*STREAMS, "witness")}
        found: dict[str, list[str]] = {name: [] for name in begun}
        streams = [asyncio.ensure_future(router.stream(asked, found[name], begun[name])) for name, asked in STREAMS.items()]
        witness = asyncio.ensure_future(direct.stream(STREAMS["text"], found["witness"], begun["witness"]))
        wholes = {name: asyncio.ensure_future(router.whole(asked)) for name, asked in WHOLE.items()}
        await asyncio.gather(*(one.wait() for one in begun.values()))
        tell(documents, [("decode", one.ip) for one in workers])
        first.process.terminate()
        late = list[tuple[int, dict[str, Any]]]()
        while first.process.poll() is None:
            late.append(await router.whole((COMPLETIONS, {"prompt": f"{len(late)} late", "max_tokens": 4, **GREEDY})))
        with contextlib.suppress(httpx.TransportError):
            await witness
        await asyncio.gather(*streams)
        return {
            "witness": found.pop("witness"),
            "streams": found,
            "wholes": {name: await one for name, one in wholes.items()},
            "late": late,
            "alone": {name: said_of((await other.whole(STREAMS[name]))[1]) for name in ("text", "chat", "messages", "responses")},
        }


@contextmanager
def routed(folder: Path, worker: Worker) -> Iterator[Path]:
    """A router that knows this one, and where it is told of others."""
    with ours("ours", ROUTER, [], [f"{worker.ip}:8000"], folder, CONFIG, ready=f"http://{ROUTER}/health"):
        documents = folder / ROUTER.replace(":", "-")
        tell(documents, [("decode", worker.ip)])
        until("it is known", lambda: httpx.get(f"http://{ROUTER}/ready", trust_env=False, timeout=20).status_code == 200, 60)
        yield documents


def test_nobody_is_told_half_an_answer_as_a_whole_one(tmp_path: Path, workers: list[Worker]):
    with routed(tmp_path, workers[0]) as documents:
        found = asyncio.run(told_to_end(workers, documents))
    streams, wholes, alone = found["streams"], found["wholes"], found["alone"]
    assert text_of(found["witness"]) != alone["text"], "too quick to show anything"
    for name, events in streams.items():
        if name in GO_ON:
            assert (text_of(events), ends_with_an_error(STREAMS[name][0], events)) == (alone[name], False), name
        else:
            assert ends_with_an_error(STREAMS[name][0], events), (name, events[-3:])
    for name, (status, answer) in wholes.items():
        assert (status, '"abort"' in json.dumps(answer)) == (200, False), (name, answer)
        assert said_of(answer) == alone.get(name, said_of(answer)), name
    assert {(status, answer["choices"][0]["finish_reason"]) for status, answer in found["late"]} == {(200, "length")}
