"""The engine works for nobody: a client that leaves, and an answer that is complete, end its work while tokens flow."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
import uvicorn

from fleet_worker.agent.admin import AdminServer
from fleet_worker.engine.assemble import build_core
from fleet_worker.engine.core import EngineCore
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.metrics import EngineMetrics
from fleet_worker.engine.server import EngineServer
from tests.fleet_worker.engine.test_server import ARCHITECTURE, CONFIG, LLAMA, TEXT, body, serve, until
from tests.fleet_worker.test_connections import HOST, serving

MOST = 490


def ending(core: EngineCore) -> threading.Event:
    """Set when no request is left in the engine."""
    ended, end = threading.Event(), core._end

    def noticed(*given: Any) -> Any:
        try:
            return end(*given)
        finally:
            ended.set()

    core._end = noticed  # type: ignore[method-assign]
    return ended


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_while_tokens_flow_ends_its_request(stream: bool):
    """Without a stream nobody asked for it before a token had been missing for 100 ms: the engine went on to the last one."""

    async def main() -> None:
        core, _ = build_core(CONFIG, LLAMA, ARCHITECTURE.eos_ids)
        ended = ending(core)
        loop = EngineLoop(core, lambda _: None, lambda _: None)
        loop.start()
        app = EngineServer(CONFIG, loop, TEXT, EngineMetrics("tiny")).app()
        try:
            config = uvicorn.Config(app, host=HOST, port=0, http="h11", lifespan="off", log_level="critical")
            async with serving(AdminServer(config)) as port:
                asked = json.dumps(body(max_tokens=MOST, ignore_eos=True, stream=stream)).encode()
                _, writer = await port.connect(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(asked), asked)
                )
                await until(lambda: core.counters.generated_tokens >= 5)
                writer.transport.abort()
                assert await asyncio.to_thread(ended.wait, 20)
        finally:
            await asyncio.to_thread(loop.stop)
        assert dict(core.counters.finished) == {"abort": 1}
        assert core.counters.generated_tokens < MOST

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_ends_the_engines_work(stream: bool):
    async def scenario(client: httpx.AsyncClient, loop: EngineLoop) -> None:
        whole = (await client.post("/v1/completions", json=body(max_tokens=40))).json()["choices"][0]["text"]
        before, ended = loop.core.counters.generated_tokens, ending(loop.core)
        asked = body(max_tokens=MOST, ignore_eos=True, stop=whole[10:14], stream=stream)
        assert (await client.post("/v1/completions", json=asked)).status_code == 200
        assert await asyncio.to_thread(ended.wait, 20)
        assert loop.core.counters.finished["stop"] == 1
        assert loop.core.counters.generated_tokens - before < MOST

    serve(scenario)
