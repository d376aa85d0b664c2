"""Panic is of those who could answer: a tier that alone may, or the workers with an adapter, however many others are well."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.follow.documents import Documents
from fleet_router.health.breaker import FAILURES_MOST
from fleet_wire.endpoints import AtZero, Endpoints
from tests.fleet_router.cascade.ladder import LARGE, Ladder, climbing, config
from tests.fleet_router.chat_worker import says
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import CONFIG, Rig, answer_of, ask, http, run, until
from tests.fleet_router.test_returning import dies


def out(rig: Rig, uid: str) -> None:
    worker = rig.context.table.workers[uid]
    for _ in range(FAILURES_MOST):
        worker.failed(rig.context.clock())
    assert not worker.breaker.allows(rig.context.clock(), 0)


def test_the_last_tiers_only_worker_is_asked_although_it_failed():
    """Five errors of the large model's only worker: for five seconds and more every request that needed it was told that no
    decode worker is serving in its tier."""

    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says([{"content": "sma"}], finish="length"))
        ladder.behave("large", says(LARGE))
        out(ladder.rig, f"u{ladder['large'].port}")
        assert (await ladder.talk())[:2] == (200, "large")

    climbing(go, config())


def test_a_draft_is_not_asked_of_workers_that_failed():
    async def go(ladder: Ladder) -> None:
        out(ladder.rig, f"u{ladder['small'].port}")
        assert (await ladder.talk())[:2] == (200, "large")
        assert ladder.asked == {"small": 0, "large": 1}

    climbing(go, config())


@pytest.mark.parametrize("policy", ["kvAware", "leastLoad"])
def test_the_only_worker_with_an_adapter_is_asked_although_it_failed(policy: Any):
    used = msgspec.structs.replace(CONFIG, adapters=("lora",), policy=policy)

    async def go(rig: Rig) -> None:
        workers = [worker.endpoint for worker in rig.context.table.workers.values()]
        mine = msgspec.structs.replace(workers[-1], adapters={"lora": "1"})
        rig.router.apply(Documents(used, Endpoints(fleet="f", namespace="n", workers=(*workers[:-1], mine))))
        out(rig, mine.uid)
        assert (await rig.post(ask()))[0] == 200
        assert rig.decode[-1].seen == []  # others have the model's own
        status, body = await rig.post(ask(model="lora"))
        assert (status, json.loads(body).get("error")) == (200, None)
        assert len(rig.decode[-1].seen) == 1

    run(go, prefill=0, decode=3, config=used)


def test_a_draft_waits_for_no_worker():
    """The small model's only worker restarts: the next tier is asked at once, and no retry is used up."""

    async def go(ladder: Ladder) -> None:
        rig = ladder.rig
        ladder.tiers["small"][0].behave = dies
        assert (await ladder.talk())[:2] == (200, "large")
        assert (rig.context.metrics.retries, len(rig.context.holding)) == (0, 0)

    climbing(go, msgspec.structs.replace(config(), return_wait_s=10.0))


@pytest.mark.parametrize("breaks", [False, True], ids=["500", "breaks"])
def test_who_fails_a_request_while_its_tier_wakes_is_asked_again_when_nobody_else_comes(breaks: bool):
    """Incident: the first worker of a tier that woke failed a request, and served from then on: the request waited its whole five
    minutes for another one."""

    async def go(rig: Rig) -> None:
        async def fails(_: Any, writer: asyncio.StreamWriter) -> bool:
            rig.decode[0].behave = None
            if breaks:
                writer.transport.abort()
            else:
                answer(writer, 500, {})
            return True

        workers = tuple(worker.endpoint for worker in rig.context.table.workers.values())
        waking = Endpoints(fleet="f", namespace="n", workers=workers, at_zero=(AtZero(tier="t"),))
        rig.router.apply(Documents(CONFIG, waking))
        rig.decode[0].behave = fails
        reader, writer, _ = await rig.connect()
        writer.write(http(ask(prompt="p")))
        await until(lambda: len(rig.context.holding) == 1)
        rig.router.apply(Documents(CONFIG, msgspec.structs.replace(waking, at_zero=())))
        assert (await asyncio.wait_for(answer_of(reader), 3))[0] == 200

    run(go, prefill=0)
