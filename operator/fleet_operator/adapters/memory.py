"""What one fleet's workers last said of their adapters, and when to ask again. All of it may be lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fleet_api.v1alpha1 import InferenceFleet
from fleet_api.v1alpha1.model import AdapterSpec
from fleet_operator.adapters.follow import UNCONCERNED_S, UNSETTLED_S, AdapterFollower, concerned, pause_s
from fleet_operator.adapters.told import Live
from fleet_operator.observe import observe_pods
from fleet_planner.types import AdapterSeen


@dataclass(slots=True)
class AdapterMemory:
    """Of one fleet."""

    seen: dict[str, tuple[AdapterSeen, ...]] = field(default_factory=dict)
    """By pod uid."""
    again_at: float = float("-inf")
    told: tuple[AdapterSpec, ...] = ()
    """What the spec asked for at the last look."""
    busy: bool = False

    def due(self, fleet: InferenceFleet, now: float) -> bool:
        """Whether to look now; then `look` must be called. What the spec newly asks for is told at once."""
        if self.busy or (0 < self.again_at - now <= UNCONCERNED_S and fleet.spec.model.adapters == self.told):
            return False
        self.busy = True
        return True

    async def look(self, follower: AdapterFollower, fleet: InferenceFleet, live: Live, now: Callable[[], float]) -> bool:
        """One look; True when something is different from before."""
        try:
            self.again_at, self.told = now() + UNSETTLED_S, fleet.spec.model.adapters
            pods = [obj for (kind, _), obj in live.items() if kind == "Pod"]
            if not concerned(fleet, pods, self.seen):
                self.again_at = now() + UNCONCERNED_S
                return False
            workers = observe_pods(pods)
            before, self.seen = self.seen, await follower.follow(fleet, workers, live, self.seen)
            self.again_at = now() + pause_s(fleet, workers, live, self.seen)
            return self.seen != before
        finally:
            self.busy = False
