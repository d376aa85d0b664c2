"""Endpoints that name no worker while workers were there: a mistake of whoever wrote them (nodes that the control plane does not
reach any more have no pod that is ready), or the truth (all were scaled away by hand, all were lost)?

Only the workers can tell. For KEPT_S it is a mistake; then the agents of those that were there last are asked, and it is believed
as soon as none says that it serves. Believing it with workers at hand would refuse everybody; keeping on with none would send
each request to addresses that nobody has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from fleet_router.follow.capacity import fetched
from fleet_router.follow.documents import Documents
from fleet_router.follow.identity import HEAD_END
from fleet_wire.endpoints import Endpoint
from fleet_wire.unreadable import UNREADABLE

KEPT_S = 60.0
AGAIN_S = 5.0
AT_ONCE = 128


class _State(msgspec.Struct):
    uid: str = ""
    phase: str = "Serving"


class Emptied:
    """The document that names nobody, and since when there is one."""

    def __init__(self) -> None:
        self.documents: Documents | None = None
        self._since = self._asked_at = 0.0

    def came(self, documents: Documents, now: float) -> None:
        """Another one, or the first."""
        if self.documents is None:
            self._since, self._asked_at = now, -AGAIN_S
        self.documents = documents

    def over(self) -> None:
        """Workers are named again, or it was believed."""
        self.documents = None

    def due(self, now: float) -> bool:
        """Whether workers are to be asked; they are, if so."""
        if self.documents is None or now - self._since <= KEPT_S or now - self._asked_at < AGAIN_S:
            return False
        self._asked_at = now
        return True


async def serves(one: Endpoint) -> bool:
    """Its agent answers, is the one that was meant, and says so."""
    answer = await fetched(one.address, one.agent_port, "/state")
    try:
        state = msgspec.json.decode(answer.partition(HEAD_END)[2], type=_State)
    except UNREADABLE:
        return False
    return state.uid == one.uid and state.phase == "Serving"


async def any_serves(workers: Sequence[Endpoint], ask: Callable[[Endpoint], Awaitable[bool]] = serves) -> bool:
    """Whether one of them does; a few are asked at a time."""
    for start in range(0, len(workers), AT_ONCE):
        if any(await asyncio.gather(*map(ask, workers[start : start + AT_ONCE]))):
            return True
    return False
