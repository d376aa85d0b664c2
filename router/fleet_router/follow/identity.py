"""Is the worker at an address the one that the operator means? Its agent says its uid at /state.

An address can go to another pod before this router hears of it, and that pod may answer under the same model name. So nothing is
sent on a new connection before the agent was asked; who joins, who failed and whose connections closed is asked, too. One that
says another uid is left out until the operator's document changes. Who does not answer stays in: not every worker has an agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from fleet_router.follow.capacity import fetched
from fleet_wire.endpoints import Endpoint
from fleet_wire.unreadable import UNREADABLE

EVERY_S = 0.25
PROOF_S = 1.0
"""Longest that a new connection waits for an agent that does not answer."""
AGAIN_S = 1.0
"""Who did not answer is asked again after so long."""
HEAD_END = b"\r\n\r\n"


class Suspect(Protocol):
    """A worker of which it is not known whether it is the one that was meant."""

    endpoint: Endpoint
    unproven: bool


class _State(msgspec.Struct):
    uid: str = ""


_STATE = msgspec.json.Decoder(_State)


class Identity:
    """Asks one worker who it is, for connections that were just made: between the death of a pod and the next one at its address
    no event needs to reach us. Connects that come while it is asked share the question that follows theirs."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._asking: asyncio.Task[bool] | None = None

    async def proven(self) -> bool:
        """Nobody else answers there; True, too, when no agent answers at all."""
        before = self._asking
        if before is not None:
            await asyncio.wait({before})  # it may have begun before our connect
        asking = self._asking
        if asking is None or asking is before:
            self._asking = asking = asyncio.get_running_loop().create_task(self._ask())
        return await asyncio.shield(asking)

    async def _ask(self) -> bool:
        one = self._endpoint
        return uid_in(await fetched(one.address, one.agent_port, "/state", PROOF_S)) in ("", one.uid)


async def follow_identity(suspects: Callable[[], Iterable[Suspect]], stranger: Callable[[Endpoint], object]) -> None:
    """Ask suspects who they are; call `stranger` with one who is somebody else, as it was asked; for ever."""
    asked: dict[str, float] = {}
    clock = asyncio.get_running_loop().time
    while True:
        now = clock()
        asked = {uid: at for uid, at in asked.items() if now - at < AGAIN_S}
        found = [one for one in suspects() if one.endpoint.uid not in asked]
        asked |= {one.endpoint.uid: now for one in found}
        places = [one.endpoint for one in found]
        for one, place, answer in zip(found, places, await asyncio.gather(*map(_ask, places)), strict=True):
            uid = uid_in(answer)
            if uid == place.uid:
                one.unproven = False
            elif uid:
                stranger(place)
        await asyncio.sleep(EVERY_S)


async def _ask(one: Endpoint) -> bytes:
    return await fetched(one.address, one.agent_port, "/state")


def uid_in(answer: bytes) -> str:
    """The uid that an agent's answer names; empty when it names none."""
    try:
        return _STATE.decode(answer.partition(HEAD_END)[2]).uid
    except UNREADABLE:
        return ""
