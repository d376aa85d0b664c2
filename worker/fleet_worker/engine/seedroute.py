"""POST /kv/seed: the agent of this pod has its new engine take hot prefixes from another worker."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from starlette.responses import JSONResponse, Response

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.engine.core import EngineCore
from fleet_worker.engine.errors import BadRequestError
from fleet_worker.engine.loop import EngineLoop
from fleet_worker.engine.references import HOST
from fleet_worker.engine.seeding import Order, Seeded

LATE_S = 1.0
"""An engine that does not say what came of it is in a long step, or stuck."""


class SeedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body: whom to ask, and the bounds."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    most_share: Annotated[float, msgspec.Meta(gt=0, le=0.5)]
    """Of the cache, in blocks."""
    within_s: Annotated[float, msgspec.Meta(gt=0, le=60)]


async def seed(body: bytes, loop: EngineLoop) -> Response:
    """What came of it (seeding.Seeded), within `within_s` and a moment; BadRequestError."""
    try:
        asked = msgspec.json.decode(body, type=SeedRequest)
    except UNREADABLE as error:
        raise BadRequestError(str(error)) from error
    if not HOST.fullmatch(asked.host):
        raise BadRequestError("host is no name and no address", "host")
    here = asyncio.get_running_loop()
    told: asyncio.Future[Seeded] = here.create_future()

    def tell(found: Seeded) -> None:
        if not told.done():
            told.set_result(found)

    def done(found: Seeded) -> None:
        here.call_soon_threadsafe(tell, found)

    def begin(core: EngineCore) -> None:
        if core.hot is None:
            done(Seeded(reason="off", message="this engine takes no hot prefixes"))
            return
        order = Order(asked.host, asked.port, int(core.blocks.total * asked.most_share), asked.within_s)
        core.hot.begin(order, done)

    loop.call(begin)
    try:
        found = await asyncio.wait_for(told, asked.within_s + LATE_S)
    except TimeoutError:
        found = Seeded(reason="deadline", message="the engine did not say what came of it")
    return JSONResponse(msgspec.to_builtins(found))
