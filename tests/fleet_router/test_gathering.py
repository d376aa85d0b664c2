"""What several processes say together while one of them does not answer."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from fleet_router.gathering import gathered
from fleet_router.members import Answer, Member, serve

FAMILY = secrets.token_hex(8)


async def metrics(_path: bytes) -> Answer:
    return 200, b"# TYPE x_total counter\nx_total 3\n# TYPE inference_pool_ready_pods gauge\ninference_pool_ready_pods 2\n"


@pytest.mark.parametrize(
    ("there", "status", "words"),
    [
        pytest.param(True, 200, b"x_total 6\n# TYPE inference_pool_ready_pods gauge\ninference_pool_ready_pods 2\n", id="both"),
        pytest.param(False, 503, b"does not answer", id="one has died"),
    ],
)
def test_counters_of_half_the_processes_are_no_counters(there: bool, status: int, words: bytes):
    """A process that died or was busy for a second: counters fell, for rates a restart, and its requests had ended."""

    async def go() -> None:
        mine, other = (Member.parse(f"{index}/2/{FAMILY}") for index in (0, 1))
        serving = asyncio.create_task(serve(other, metrics)) if there else None
        await asyncio.sleep(0)
        found = await gathered(mine, b"/metrics", metrics)
        assert (found[0], words in found[1]) == (status, True)
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(go())
