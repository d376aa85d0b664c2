"""The telemetry of an operator process: each fleet has one source, its Prometheus when it names one, else a direct scrape."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.health.logs import about
from fleet_operator.telemetry.held import HeldRequests
from fleet_operator.telemetry.prometheus import PrometheusTelemetry
from fleet_operator.telemetry.scrape import ScrapeTelemetry
from fleet_planner.types import Demand, TierTelemetry

LOG = logging.getLogger("fleet.operator.telemetry")


class FleetTelemetry:
    """Chooses the source; the two are never mixed."""

    def __init__(self, scrape: ScrapeTelemetry, prometheus: PrometheusTelemetry, held: HeldRequests) -> None:
        self._scrape = scrape
        self._prometheus = prometheus
        self._held = held

    async def listen(self, routers: list[str]) -> Demand | None:
        """Held requests, from the routers themselves whatever the fleet's source is: Prometheus would tell of them too late."""
        return await self._held.listen(routers)

    async def collect(self, fleet: InferenceFleet, pods: list[Object], routers: list[str]) -> dict[str, TierTelemetry]:
        """Telemetry per tier. Never raises: what one fleet's targets answer must not end the telemetry of all."""
        source = fleet.spec.telemetry.prometheus
        try:
            if source is not None:
                return await self._prometheus.collect(fleet, source.url, pods)
            return await self._scrape.collect(fleet, pods, routers)
        except Exception as error:
            key = fleet.metadata.namespace, fleet.metadata.name
            LOG.exception("fleet=%s/%s telemetry failed", *key, extra=about(*key))
            return {tier.name: TierTelemetry(problem=f"reading it failed: {type(error).__name__}") for tier in fleet.spec.tiers}


@asynccontextmanager
async def open_telemetry() -> AsyncIterator[FleetTelemetry]:
    """Connections and threads are released when the block ends."""
    scrape, prometheus, held = ScrapeTelemetry(), PrometheusTelemetry(), HeldRequests()
    try:
        yield FleetTelemetry(scrape, prometheus, held)
    finally:
        await held.close()
        await scrape.close()
        await prometheus.close()
