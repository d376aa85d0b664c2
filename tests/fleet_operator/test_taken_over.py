"""A namespace that changes hands and comes back: nothing that was kept of its fleets counts, somebody else had them meanwhile."""

from __future__ import annotations

from fleet_operator.reconciler import Reconciler
from tests.fleet_operator.world import NAMESPACE, World, play

AWAY_S = 3_600.0


def test_what_was_read_before_is_no_news_when_a_namespace_comes_back():
    """Its load was read an hour ago: TelemetryFresh was Unknown at once, with a Warning, and the other installation had read it a
    second ago."""

    async def go(world: World) -> None:
        ours = True
        world.operator = Reconciler(
            world.api, world.platform, world, namespace=NAMESPACE, now=lambda: world.now, monotonic=lambda: world.now,
            owns=lambda namespace: ours,
        )  # fmt: skip
        world._seen = {}
        world.measure(1, 1)
        await world.settle_with_telemetry()
        assert (await world.condition("TelemetryFresh"))["reason"] == "Fresh"
        before = await world.events()
        ours = False
        world.now += AWAY_S
        await world.touch()
        ours = True
        world.operator.touch_namespace(NAMESPACE)
        await world.operator.drain()  # no telemetry was read in between
        assert (await world.condition("TelemetryFresh"))["reason"] == "Fresh"
        await world.settle_with_telemetry()
        assert await world.events() == before

    play(go)
