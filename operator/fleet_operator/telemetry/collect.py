"""The telemetry of an operator process: each fleet has one source, its Prometheus when it names one, else a direct scrape."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.telemetry.prometheus import PrometheusTelemetry
from fleet_operator.telemetry.scrape import ScrapeTelemetry
from fleet_planner.types import TierTelemetry

LOG = logging.getLogger("fleet.operator.telemetry")


class FleetTelemetry:
    """Chooses the source; the two are never mixed."""

    def __init__(self, scrape: ScrapeTelemetry, prometheus: PrometheusTelemetry) -> None:
        self._scrape = scrape
        self._prometheus = prometheus

    async def collect(self, fleet: InferenceFleet, pods: list[Object], routers: list[str]) -> dict[str, TierTelemetry]:
        """Telemetry per tier. Never raises: what one fleet's targets answer must not end the telemetry of all."""
        source = fleet.spec.telemetry.prometheus
        try:
            if source is not None:
                return await self._prometheus.collect(fleet, source.url, pods)
            return await self._scrape.collect(fleet, pods, routers)
        except Exception as error:
            LOG.exception("fleet=%s/%s telemetry failed", fleet.metadata.namespace, fleet.metadata.name)
            return {tier.name: TierTelemetry(problem=f"reading it failed: {type(error).__name__}") for tier in fleet.spec.tiers}


@asynccontextmanager
async def open_telemetry() -> AsyncIterator[FleetTelemetry]:
    """Connections and threads are released when the block ends."""
    scrape, prometheus = ScrapeTelemetry(), PrometheusTelemetry()
    try:
        yield FleetTelemetry(scrape, prometheus)
    finally:
        await scrape.close()
        await prometheus.close()
