"""How much KV each worker holds: asked once per worker, at its engine's /metrics. The approximate index forgets by it.

vLLM and the torch engine say it in `vllm:cache_config_info` (labels block_size and num_gpu_blocks). One worker at a time, a few
kilobytes each: who does not answer is asked again later, and has an equal part of the index meanwhile.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping

from fleet_router.follow.asking import answer_to
from fleet_wire.endpoints import Endpoint

EVERY_S = 1.0
AGAIN_S = 30.0
TIMEOUT_S = 3.0
MOST_BYTES = 4 * 1024 * 1024
INFO = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.M)
LABEL = re.compile(rb'(block_size|num_gpu_blocks)="(\d{1,12})"')


async def follow_capacity(workers: Callable[[], Mapping[str, Endpoint]], know: Callable[[str, int], None]) -> None:
    """Call `know` with (worker, tokens of KV) for each of `workers`, of whom that is not known (any more); for ever."""
    asked: dict[str, float] = {}
    clock = asyncio.get_running_loop().time
    while True:
        now = workers()
        asked = {uid: at for uid, at in asked.items() if uid in now}
        for uid, endpoint in now.items():
            if clock() - asked.get(uid, float("-inf")) < AGAIN_S:
                continue
            asked[uid] = clock()
            if tokens := await kv_tokens(endpoint.address, endpoint.http_port):
                know(uid, tokens)
                del asked[uid]
        await asyncio.sleep(EVERY_S)


async def kv_tokens(address: str, port: int) -> int:
    """Tokens that the engine's KV cache holds; 0 when it does not say."""
    return tokens_in(await fetched(address, port, "/metrics"))


async def fetched(address: str, port: int, path: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """A worker's answer to a GET, head included; empty when there is none."""
    try:
        async with asyncio.timeout(timeout_s):
            async with answer_to(address, port, path) as reader:
                body = b""
                while (piece := await reader.read(65_536)) and len(body) < MOST_BYTES:
                    body += piece
    except (OSError, TimeoutError, ValueError):
        return b""
    return body


def tokens_in(exposition: bytes) -> int:
    """Block size times blocks; 0 when the text has no such line."""
    found = INFO.search(exposition)
    sizes = {name: int(value) for name, value in LABEL.findall(found[1])} if found is not None else {}
    return sizes.get(b"block_size", 0) * sizes.get(b"num_gpu_blocks", 0)
