"""Answers that begin with their prompt: a draft's check would judge the client's own words."""

from __future__ import annotations

import pytest

from tests.fleet_router.cascade.ladder import Ladder, climbing, config


@pytest.mark.parametrize(("echo", "tier"), [(True, "large"), (1, "large"), (False, "small"), (None, "small")])
def test_an_answer_that_begins_with_its_prompt_is_the_last_tiers(echo: object, tier: str):
    """An empty one of the small model was kept for the prompt's text, and a good one thrown away for the prompt's phrases."""

    async def go(ladder: Ladder) -> None:
        status, told, _ = await ladder.talk("/v1/completions", model="m", prompt="x", echo=echo)
        assert (status, told, ladder.asked["small"]) == (200, tier, int(tier == "small"))

    climbing(go, config())
