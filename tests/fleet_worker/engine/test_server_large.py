"""Large texts and lists beside the loop that streams; who may give back whose request."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.reader import Reader
from fleet_worker.engine.server import LARGE_BYTES, SMALL_BYTES
from tests.fleet_worker.engine.test_server import body, serve, until


def test_giving_back_req_ends_no_request_without_a_name():
    """Their ids all began with `req-`: one such body ended everybody's unnamed requests."""

    async def scenario(client: httpx.AsyncClient, loop: EngineLoop) -> None:
        asked = [
            asyncio.create_task(client.post("/v1/completions", json=body(max_tokens=200, ignore_eos=True))) for _ in range(2)
        ]
        await until(lambda: len(loop.core.sequences) == 2)
        shown = [name.partition("-")[0] for name in loop.core.sequences]
        for name in ("req", *shown, *loop.core.sequences):
            await client.post("/kv/release", json={"request_id": name})
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200, 200]

    serve(scenario)


def test_a_long_list_of_tokens_is_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch):
    """Incident: everybody's streams stood for 310 ms while 1.8 million ids became JSON."""
    here: list[int] = []
    render = JSONResponse.render

    def watched(self: JSONResponse, content: Any) -> bytes:
        written = render(self, content)
        if threading.current_thread() is threading.main_thread():
            here.append(len(written))
        return written

    monkeypatch.setattr(JSONResponse, "render", watched)

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        answer = await client.post("/tokenize", json={"prompt": "a b " * 20_000})
        ids = answer.json()["tokens"]
        assert answer.json() == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
        assert answer.headers["content-type"] == "application/json"
        back = await client.post("/detokenize", json={"tokens": ids[1:]})
        assert "a b a b" in back.json()["prompt"]
        assert max(here, default=0) < SMALL_BYTES

    serve(scenario)


def test_few_large_texts_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Incident: 4 MB of text are 450 MB while they are tokenised; twelve of them at once were 2.1 GB, and a worker has up to 32
    threads for them. Smaller ones pass."""
    now, most = [0], [0]
    go_on = threading.Event()
    exchange = Reader._exchange

    def slow(self: Reader, ask: bytes, raw: bytes) -> Any:
        now[0] += 1
        most[0] = max(most[0], now[0])
        go_on.wait(10)
        try:
            return exchange(self, ask, raw)
        finally:
            now[0] -= 1

    monkeypatch.setattr(Reader, "_exchange", slow)

    async def scenario(client: httpx.AsyncClient, _: EngineLoop) -> None:
        large = "a " * LARGE_BYTES
        paths = ["/v1/completions", "/tokenize"] * 3
        asked = [asyncio.create_task(client.post(path, json=body(prompt=large))) for path in paths]
        await until(lambda: now[0] == 1)
        small = await client.post("/v1/completions", json=body(prompt="a b " * 2_000))
        assert small.json()["error"]["param"] == "prompt"
        assert now[0] == 1
        go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [400, 200] * 3
        assert most[0] == 1

    serve(scenario)
