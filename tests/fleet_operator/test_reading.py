"""What is read beside the passes: a source that fails, however it does, costs its own fleet only."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_operator import reading
from fleet_operator.health.logs import JsonFormatter
from fleet_operator.observe import workers_told
from fleet_wire.endpoints import ENDPOINTS_KEY
from tests.fleet_operator.world import NAMESPACE, World, manifest, play


def test_a_source_that_breaks_costs_its_own_fleet_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """One defect in reading one fleet's workers ended the reading of all, and with it the operator."""

    async def scenario(world: World) -> None:
        other = manifest()
        other["metadata"]["name"] = "other"
        await world.user.apply(other)
        await world.settle()
        asked: list[str] = []

        async def collect(fleet: Any, *_: Any) -> dict[str, Any]:
            asked.append(fleet.metadata.name)
            world.now += 60
            if fleet.metadata.name == "f":
                raise RuntimeError("nobody foresaw this")
            return {}

        monkeypatch.setattr(world, "collect", collect)
        monkeypatch.setattr(reading, "LOOK_S", 0)
        world.now += 60
        running = asyncio.create_task(world.operator.reader.run())
        for _ in range(50):  # turns of the loop
            await asyncio.sleep(0)
        assert not running.done()
        running.cancel()
        assert min(asked.count("f"), asked.count("other")) > 1
        assert f"fleet={NAMESPACE}/f" in caplog.text
        line = json.loads(JsonFormatter().format(next(record for record in caplog.records if record.exc_info)))
        assert (line["namespace"], line["fleet"]) == (NAMESPACE, "f")

    play(scenario)


@pytest.mark.parametrize("text", ['{"a":' + "[" * 100_000, "\ud800", "x"], ids=["deep", "half-a-surrogate", "no-json"])
def test_an_edited_document_that_nobody_can_read_is_about_to_be_undone(text: str):
    """A pass over the fleet ended there, so that nothing undid it."""
    assert workers_told({"data": {ENDPOINTS_KEY: text}}) is None
