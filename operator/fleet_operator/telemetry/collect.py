"""The telemetry of an operator process, for as long as it is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleet_operator.telemetry.scrape import ScrapeTelemetry


@asynccontextmanager
async def open_telemetry() -> AsyncIterator[ScrapeTelemetry]:
    """Connections are released when the block ends."""
    telemetry = ScrapeTelemetry()
    try:
        yield telemetry
    finally:
        await telemetry.close()
