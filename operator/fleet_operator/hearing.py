"""Fleets at zero are listened to: their routers say at once when they hold a request, and the fleet is looked at again.

Only the waiting for answers is here; what follows from one is the plan's to say. All of it may be lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from fleet_api.v1alpha1.status import FleetStatus
from fleet_operator.health.logs import about
from fleet_operator.work_queue import Key
from fleet_planner.types import Demand

LOG = logging.getLogger("fleet.operator")
PAUSE_S = 1.0
"""Routers that do not answer are asked again after this."""


class Listen(Protocol):
    """Asks routers."""

    async def __call__(self, routers: list[str]) -> Demand | None:
        """As soon as one of the routers holds a request, else after a while; None when none of them answers."""
        ...


@dataclass(slots=True)
class _Ear:
    heard: Demand | None = None
    listening: bool = False
    again_at: float = float("-inf")


class Hearing:
    """One question at a time per fleet at zero."""

    def __init__(self, listen: Listen, routers: Callable[[Key], list[str]], now: Callable[[], float]) -> None:
        """`routers`: base URLs of a fleet's routers."""
        self._listen = listen
        self._routers = routers
        self._now = now
        self._ears: dict[Key, _Ear] = {}

    def follow(self, key: Key, status: FleetStatus) -> None:
        """The fleet as it was just planned."""
        if any(tier.zero is not None and tier.zero.state == "AtZero" for tier in status.tiers):
            self._ears.setdefault(key, _Ear())
        else:
            self._ears.pop(key, None)

    def forget(self, key: Key) -> None:
        """The fleet is gone."""
        self._ears.pop(key, None)

    def heard(self, key: Key) -> Demand | None:
        """What was heard last, since the fleet is at zero."""
        ear = self._ears.get(key)
        return ear.heard if ear is not None else None

    def due(self, is_ours: Callable[[Key], bool], wake: Callable[[Key], None]) -> list[Coroutine[Any, Any, None]]:
        """A question for each fleet that nobody listens to; `wake` is called when one of its routers holds something."""
        found, now = [], self._now()
        for key, ear in self._ears.items():
            if not ear.listening and not 0 < ear.again_at - now <= PAUSE_S and is_ours(key):
                ear.listening = True
                found.append(self._hear(key, ear, wake))
        return found

    async def _hear(self, key: Key, ear: _Ear, wake: Callable[[Key], None]) -> None:
        try:
            heard = await self._asked(key)
            if heard is None:
                ear.again_at = self._now() + PAUSE_S
                return
            ear.heard = heard
            if heard.held:
                ear.again_at = self._now() + PAUSE_S  # it takes the pass a moment, and the answer would be the same
                wake(key)
        finally:
            ear.listening = False

    async def _asked(self, key: Key) -> Demand | None:
        """A question that breaks is as good as no answer: it costs its own fleet only."""
        try:
            return await self._listen(self._routers(key))
        except Exception:
            LOG.exception("fleet=%s/%s listening to its routers failed", *key, extra=about(*key))
            return None
