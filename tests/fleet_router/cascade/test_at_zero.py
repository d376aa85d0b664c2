"""A cascade whose tiers rest: the last one alone can be waited for, and only where it is to come back."""

from __future__ import annotations

import asyncio
import json

import pytest

from fleet_router.follow.documents import Documents
from fleet_wire.endpoints import AtZero, Endpoints
from tests.fleet_router.cascade.ladder import CHAT, TALK, Ladder, climbing, config
from tests.fleet_router.rig import Rig, answer_of, http, until


def rests(rig: Rig, *tiers: str) -> None:
    zero = tuple(AtZero(tier=tier) for tier in tiers)
    rig.router.apply(Documents(rig.context.config, Endpoints(fleet="f", namespace="n", at_zero=zero)))


@pytest.mark.parametrize(("before", "then"), [(("small",), ()), (("small", "large"), ("small",))], ids=["gone", "goes"])
def test_a_last_tier_that_is_gone_is_not_waited_for_because_another_one_rests(before: tuple[str, ...], then: tuple[str, ...]):
    async def go(ladder: Ladder) -> None:
        rests(ladder.rig, *before)
        reader, writer, _ = await ladder.rig.connect()
        writer.write(http(TALK, path=CHAT))
        if then:
            await until(lambda: len(ladder.rig.context.holding) == 1)
            rests(ladder.rig, *then)
        status, _, body = await asyncio.wait_for(answer_of(reader), 3)
        error = json.loads(body)["error"]
        assert (status, error["code"], "tier large" in error["message"]) == (503, "no_worker", True)
        assert len(ladder.rig.context.holding) == 0

    climbing(go, config())


def test_a_last_tier_that_rests_is_waited_for_also_where_a_small_one_comes_first():
    async def go(ladder: Ladder) -> None:
        rests(ladder.rig, "small", "large")
        reader, writer, _ = await ladder.rig.connect()
        writer.write(http(TALK, path=CHAT))
        await until(lambda: len(ladder.rig.context.holding) == 1)
        ladder.rig.apply([], ladder.tiers["large"], ladder.rig.context.config)
        status, headers, _ = await answer_of(reader)
        assert (status, headers["x-fleet-tier"]) == (200, "large")

    climbing(go, config())
