"""What a worker's cache holds decides what the approximate index remembers of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleet_router.follow.capacity import follow_capacity, kv_tokens, tokens_in
from fleet_wire.endpoints import Endpoint
from fleet_worker.engine.metrics import EngineMetrics
from tests.fleet_router.test_knowledge import engine, folder  # noqa: F401 - a fixture

VLLM = (
    b"# HELP vllm:cache_config_info Information\n# TYPE vllm:cache_config_info gauge\n"
    b'vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="512"} 1.0\n'
)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (VLLM, 65_536),
        (b"", 0),
        (b'vllm:cache_config_info{block_size="16"} 1.0', 0),
        (b'other{block_size="1",num_gpu_blocks="1"}', 0),
    ],
)
def test_both_engines_say_it_alike(text: bytes, tokens: int):
    assert tokens_in(text) == tokens


def test_the_torch_engine_says_what_its_pool_holds(folder: Path):  # noqa: F811
    metrics = EngineMetrics("m")
    core = engine(folder)
    metrics.collect(core)
    metrics.collect(core)
    assert tokens_in(metrics.exposition()) == 40 * 16


def test_a_worker_is_asked_until_it_answers_and_then_no_more():
    async def go() -> None:
        asked, answers = [], [b"HTTP/1.1 503 no\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + VLLM]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answers[min(len(asked), 2) - 1])
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await kv_tokens("127.0.0.1", port) == 0
        assert await kv_tokens("127.0.0.1", port) == 65_536
        found = Endpoint(
            name="w",
            uid="w",
            address="127.0.0.1",
            http_port=port,
            agent_port=1,
            role="decode",
            tier="t",
            revision="r",
            compat="c",
        )
        known: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(follow_capacity(lambda: {"w": found}, lambda *what: known.set_result(what)))
        assert await asyncio.wait_for(known, 10) == ("w", 65_536)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()
        assert len(asked) == 3
        assert await kv_tokens("127.0.0.1", port) == 0  # nobody there

    asyncio.run(go())
