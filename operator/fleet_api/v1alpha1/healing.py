"""What the operator mends by itself, beyond what is lost."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleet_api.quantities import parse_duration
from fleet_api.v1alpha1.base import ApiModel, DurationText


class RestartPoisonedSpec(ApiModel):
    """Replace a worker that is ready and hands no KV over, or gets none, while those that it fails with get along with others."""

    enabled: bool = Field(
        default=True, description="false: such a worker is named (Disaggregating), and left to somebody. Default: true."
    )
    per_hour: Annotated[int, Field(ge=1, le=10)] = Field(
        default=1, description="Most workers of one tier that are replaced for it in any hour. Default: 1."
    )
    after: DurationText = Field(
        default="1m", description="A worker is replaced when it looked so for this long without a break, 0s to 1h. Default: 1m."
    )
    fabric_percent: Annotated[int, Field(ge=1, le=100)] = Field(
        default=25,
        description="When more than so many percent of a tier's workers fail with their partners at once, it is what is between "
        "them that fails, and none is replaced; one alone is always believed. Default: 25.",
    )

    @property
    def after_s(self) -> float:
        """Wait in seconds."""
        return parse_duration(self.after)


class HealingSpec(ApiModel):
    """What the operator mends by itself."""

    restart_poisoned: RestartPoisonedSpec = Field(
        default=RestartPoisonedSpec(), description="Whether workers between which and others no KV moves are replaced."
    )
