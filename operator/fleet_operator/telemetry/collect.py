"""The telemetry of an operator process: each fleet has one source, its Prometheus when it names one, else a direct scrape."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.telemetry.prometheus import PrometheusTelemetry
from fleet_operator.telemetry.scrape import ScrapeTelemetry
from fleet_planner.types import TierTelemetry


class FleetTelemetry:
    """Chooses the source; the two are never mixed."""

    def __init__(self, scrape: ScrapeTelemetry, prometheus: PrometheusTelemetry) -> None:
        self._scrape = scrape
        self._prometheus = prometheus

    async def collect(self, fleet: InferenceFleet, pods: list[Object], routers: list[str]) -> dict[str, TierTelemetry]:
        """Telemetry per tier."""
        source = fleet.spec.telemetry.prometheus
        if source is not None:
            return await self._prometheus.collect(fleet, source.url, pods)
        return await self._scrape.collect(fleet, pods, routers)


@asynccontextmanager
async def open_telemetry() -> AsyncIterator[FleetTelemetry]:
    """Connections and threads are released when the block ends."""
    scrape, prometheus = ScrapeTelemetry(), PrometheusTelemetry()
    try:
        yield FleetTelemetry(scrape, prometheus)
    finally:
        await scrape.close()
        await prometheus.close()
