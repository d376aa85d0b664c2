"""Decision records: which are told where many are kept and none is named."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import Rig, ask, http, run, until
from tests.fleet_router.test_explain import said

RUNNING = 12


def test_of_a_busy_router_those_that_failed_and_were_refused_are_told_beside_those_that_run():
    """`fleet explain` without a name, which the alerts on failures name, told of ten that ran and of none that failed."""

    async def go(rig: Rig) -> None:
        async def hang(_: Any, writer: asyncio.StreamWriter) -> bool:
            await over.wait()
            answer(writer, 200, {})
            return True

        over = asyncio.Event()
        await rig.post(ask(prompt="short"))
        await rig.post({"model": "m"})
        rig.apply(rig.prefill, [])
        await rig.post(ask())
        rig.apply(rig.prefill, rig.decode)
        rig.decode[0].behave = hang
        for _, writer, _ in [await rig.connect() for _ in range(RUNNING)]:
            writer.write(http(ask(prompt="short")))
        await until(lambda: len(rig.context.recorder.running) == RUNNING)
        for limit in (10, 5):
            found = (await said(rig, f"?limit={limit}"))[1]["decisions"]
            assert (len(found), {one["state"] for one in found}) == (limit, {"running", "answered", "failed", "refused"})
        over.set()

    run(go)
