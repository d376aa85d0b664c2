"""Loading and unloading over HTTP while requests run, in vLLM's dialect, for the agent only."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from fleet_cli.up.bundled import tiny_model
from fleet_wire.blocks import prompt_name, sealed
from fleet_wire.kv import KvReference
from fleet_worker.config import ENGINE_TOKEN_HEADER as TOKEN_HEADER
from fleet_worker.config import AdapterSettings, KvSettings, WorkerConfig
from fleet_worker.engine import adapters as module
from fleet_worker.engine.adapters import Adapters
from fleet_worker.engine.assemble import build_core
from fleet_worker.engine.llama import Llama
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.lora import Adapter
from fleet_worker.engine.metrics import EngineMetrics
from fleet_worker.engine.modelconfig import read_config
from fleet_worker.engine.references import check_reference
from fleet_worker.engine.sequence import Sampling, Sequence
from fleet_worker.engine.server import EngineServer
from fleet_worker.engine.text import Text
from fleet_worker.engine.weights import load_weights
from fleet_worker.transfer.base import KvTransferError
from tests.adapters import make_adapter

FOLDER = tiny_model()
RUNNING = re.compile(r"^vllm:num_requests_running\S* [1-9]", re.M)
ARCHITECTURE = read_config(FOLDER)
LLAMA = Llama(ARCHITECTURE, load_weights(FOLDER, ARCHITECTURE), 16)
TEXT = Text(FOLDER)
CONFIG = WorkerConfig(
    fleet="f", namespace="n", tier="t", role="decode", revision="r", compat="c", model="m", served_name="tiny",
    max_model_len=512, kv=KvSettings(cache_bytes=16 * 1024 * 1024), adapters=AdapterSettings(most=2),
)  # fmt: skip
AGENT = {TOKEN_HEADER: "secret"}
Scenario = Callable[[httpx.AsyncClient], Awaitable[None]]


def serve(scenario: Scenario) -> None:
    async def main() -> None:
        core, _ = build_core(CONFIG, LLAMA, ARCHITECTURE.eos_ids)
        loop = EngineLoop(core, lambda error: None, lambda _: None)
        loop.start()
        transport = httpx.ASGITransport(EngineServer(CONFIG, loop, TEXT, EngineMetrics("tiny"), "secret").app())
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
                await asyncio.wait_for(scenario(client), 100)
        finally:
            await asyncio.to_thread(loop.stop)
        assert loop.failure is None

    asyncio.run(main())


async def load(client: httpx.AsyncClient, name: str, folder: Path, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder), **more}
    return await client.post("/v1/load_lora_adapter", json=body, headers=AGENT)


async def tokens(client: httpx.AsyncClient, model: str, count: int = 8) -> httpx.Response:
    body = {"model": model, "prompt": "the router", "max_tokens": count, "temperature": 0, "return_token_ids": True}
    return await client.post("/v1/completions", json=body)


def ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_load_list_serve_and_unload(tmp_path: Path):
    folder = make_adapter(tmp_path / "a", 1)

    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await tokens(client, "a")).status_code == 404
        answer = await load(client, "a", folder)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        base, card = (await client.get("/v1/models")).json()["data"]
        assert (base["id"], card["id"], card["parent"], card["root"]) == ("tiny", "a", "tiny", str(folder))
        assert card["digest"] == answer.headers["x-adapter-digest"]
        under = await tokens(client, "a")
        assert under.json()["model"] == "a"
        assert ids(under) != ids(await tokens(client, "tiny"))
        counted = [await client.post("/tokenize", json={"model": name, "prompt": "one two"}) for name in ("a", "tiny", "b")]
        assert [answer.status_code for answer in counted] == [200, 200, 404], "as vLLM answers"
        assert counted[0].json() == counted[1].json()
        assert (await client.post("/detokenize", json={"model": "a", "tokens": [5]})).status_code == 200
        gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=AGENT)
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        assert (await tokens(client, "a")).status_code == 404
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=AGENT)).status_code == 404

    serve(scenario)


def test_nobody_but_the_agent(tmp_path: Path):
    folder = make_adapter(tmp_path / "a", 1)

    async def scenario(client: httpx.AsyncClient) -> None:
        for headers in ({}, {TOKEN_HEADER: "guess"}, {TOKEN_HEADER: ""}):
            for path in ("load", "unload"):
                body = {"lora_name": "a", "lora_path": str(folder)}
                answer = await client.post(f"/v1/{path}_lora_adapter", json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        assert len((await client.get("/v1/models")).json()["data"]) == 1

    serve(scenario)


def test_what_is_refused_says_why_and_leaves_the_rest_alone(tmp_path: Path):
    folder = make_adapter(tmp_path / "a", 1)
    corrupt = make_adapter(tmp_path / "corrupt", 2)
    (corrupt / "adapter_model.safetensors").write_bytes(b"nothing of use")

    async def scenario(client: httpx.AsyncClient) -> None:
        expected = ids(await tokens(client, "tiny"))
        await load(client, "a", folder)
        under = ids(await tokens(client, "a"))
        rows = [
            (await load(client, "tiny", folder), 400, "conflicts with a served base model"),
            (await load(client, "a", folder), 400, "has already been loaded"),
            (await load(client, "b", tmp_path / "nowhere"), 404, "cannot be found"),
            (await load(client, "b", corrupt), 400, "is not a readable safetensors file"),
            (await load(client, "a", corrupt, load_inplace=True), 400, "is not a readable safetensors file"),
        ]
        for answer, status, words in rows:
            assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text
        await load(client, "b", folder)
        assert "2 adapters are loaded" in (await load(client, "c", folder)).json()["error"]["message"]
        assert (ids(await tokens(client, "tiny")), ids(await tokens(client, "a"))) == (expected, under)

    serve(scenario)


async def begun(client: httpx.AsyncClient, adapter: str) -> asyncio.Task[httpx.Response]:
    """A long request that the engine runs, and no other."""
    async with asyncio.timeout(10):
        while RUNNING.search((await client.get("/metrics")).text):  # noqa: ASYNC110 - another process would be asked so, too
            await asyncio.sleep(0.001)
        request = asyncio.create_task(tokens(client, adapter, 200))
        while not RUNNING.search((await client.get("/metrics")).text):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return request


def test_running_requests_keep_what_they_began_with(tmp_path: Path, monkeypatch: Any):
    """Replaced and unloaded under a running request: its tokens are those of the adapter that it began with."""
    first, second = make_adapter(tmp_path / "1", 1), make_adapter(tmp_path / "2", 2)

    async def scenario(client: httpx.AsyncClient) -> None:
        await load(client, "a", first)
        expected = ids(await tokens(client, "a", 200))
        before = await begun(client, "a")
        assert (await load(client, "a", second, load_inplace=True)).status_code == 200
        after = ids(await tokens(client, "a", 200))
        assert (await before, after != expected)[1]
        assert ids(await before) == expected
        running = await begun(client, "a")
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=AGENT)
        over = not RUNNING.search((await client.get("/metrics")).text)  # its answer may still be on its way to us
        assert (answer.status_code, over or "running" in answer.text) == (200, True), "unloading waits"
        assert ids(await running) == after
        monkeypatch.setattr(module, "UNLOAD_WAIT_S", 0.1)  # longer than a step on a busy machine
        await load(client, "a", first)
        running = await begun(client, "a")
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=AGENT)
        assert "1 running requests end under it" in answer.text, "for a bounded time"
        assert ids(await running) == expected

    serve(scenario)


def test_kv_of_another_adapter_or_of_another_version_is_refused():
    def reference(adapter: str) -> KvReference:
        return KvReference(
            do_remote_prefill=True, remote_block_ids=(0,), remote_engine_id="e", remote_request_id="r",
            remote_host="127.0.0.1", remote_port=5600, remote_num_tokens=9, remote_epoch="e", digest="d",
            adapter=adapter, weights="w", lease_id="l." + sealed(prompt_name(range(9), adapter, "", "w"), "d"),
        )  # fmt: skip

    def asks(adapter: str) -> Sequence:
        name, _, digest = adapter.partition("@")
        under = Adapter(name, digest, "", 1, {}) if adapter else None
        return Sequence("s", tuple(range(9)), Sampling(), 0, 0.0, adapter=under)

    for made, asked in (("", "a@1"), ("a@1", ""), ("a@1", "a@2"), ("a@1", "b@1")):
        with pytest.raises(KvTransferError) as refused:
            check_reference(reference(made), asks(asked), 16, "w")
        assert refused.value.reason == "adapter"
    check_reference(reference("a@1"), asks("a@1"), 16, "w")
    check_reference(reference(""), asks(""), 16, "w")


def test_an_adapter_that_is_being_loaded_is_unloaded_after_that(monkeypatch: Any):
    """Whoever waited for the load in vain asks for its end: it was told that there is none, and then there was."""
    go_on = threading.Event()

    def load(name: str, *_: Any) -> Adapter:
        go_on.wait(10)
        return Adapter(name, "digest", "/a", 1, {})

    class Idle:
        failure = None

        def call(self, count: Any) -> None:
            count(SimpleNamespace(running_under=lambda _: 0))

    async def main() -> None:
        adapters = Adapters("tiny", 1, 8, "token")
        loading = asyncio.create_task(adapters.load(b'{"lora_name":"a","lora_path":"/a"}', None, None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        unloading = asyncio.create_task(adapters.unload(b'{"lora_name":"a"}', Idle()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(loading, unloading)] == [200, 200]
        assert adapters.cards() == []

    monkeypatch.setattr("fleet_worker.engine.adapters.load_adapter", load)
    asyncio.run(main())
