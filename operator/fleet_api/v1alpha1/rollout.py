"""How a new revision replaces the old one."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from fleet_api.quantities import parse_duration
from fleet_api.v1alpha1.base import ApiModel, DurationText

FACTOR_PATTERN = r"^[1-9](\.[0-9]{1,2})?x$"
FactorText = Annotated[str, Field(pattern=FACTOR_PATTERN, max_length=5)]
DRAIN_MOST_S = 600.0
TOKEN_S = 0.05
"""A slow decode step: what a user still takes for fluent."""
Percent = Annotated[int, Field(ge=1, le=99)]


def parse_factor(text: str) -> float:
    """1.2 of "1.2x"; ValueError for anything else."""
    if not re.fullmatch(FACTOR_PATTERN[1:-1], text):
        raise ValueError(f"{text!r} is not a factor such as 1.2x")
    return float(text[:-1])


class AnalysisSpec(ApiModel):
    """When a canary is bad: compared with the old revision over the same window."""

    ttft_p99: FactorText = Field(
        default="1.5x", description="Most that the canary's TTFT p99 may be, as a multiple of the old revision's. Default: 1.5x."
    )
    itl_p99: FactorText = Field(
        default="1.5x", description="Most that the canary's ITL p99 may be, as a multiple of the old revision's. Default: 1.5x."
    )
    error_rate: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.01, description="Largest share of the canary's requests that may fail. Default: 0.01."
    )
    min_requests: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=20,
        description="Requests that the canary must have got before it is judged: its latency by those of one "
        "minute, of the old revision as well, its errors also by all. Default: 20.",
    )


class CanarySpec(ApiModel):
    """The new revision gets a growing share of the requests before it replaces the old one."""

    steps: Annotated[tuple[Percent, ...], Field(min_length=1, max_length=10)] = Field(
        description="Shares of the requests in percent, growing, e.g. [5, 25, 50]."
    )
    interval: DurationText = Field(default="1m", description="Shortest time at each step, 1s to 24h. Default: 1m.")
    analysis: AnalysisSpec = Field(default=AnalysisSpec(), description="When the canary is bad and is rolled back.")

    @property
    def interval_s(self) -> float:
        """Interval in seconds."""
        return parse_duration(self.interval)


class RolloutSpec(ApiModel):
    """How a new revision replaces the old one, prefill and decode in step."""

    max_surge_gpus: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        default=None,
        description="Devices above the wanted size that a rollout may use; a worker on a CPU tier counts as one. "
        "Default: the fewest with which it can go on.",
    )
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0, description="Workers of each role that may be missing when surge does not suffice. Default: 0."
    )
    progress_deadline: DurationText = Field(
        default="30m",
        description="A new revision without progress for this long is called stuck; a canary is rolled back. 1s to 24h. "
        "Default: 30m.",
    )
    drain_timeout: DurationText | None = Field(
        default=None,
        description="Longest time that a leaving worker may take for its streams and unread KV, 1s to 1h. Part of the pods, so "
        "that another value is another revision. Default: the lease and 50 ms for each of limits.maxOutputTokens, at most 10m.",
    )
    paused: bool = Field(default=False, description="True: what exists stays, lost workers come back. Default: false.")
    history_limit: Annotated[int, Field(ge=1, le=100)] = Field(
        default=10, description="Old revisions that can be returned to. Default: 10."
    )
    canary: CanarySpec | None = Field(default=None, description="Judge a new revision on real requests first. Default: no.")

    def drain_timeout_s(self, lease_s: float, max_output_tokens: int) -> float:
        """As asked, else what the longest answer takes."""
        if self.drain_timeout is not None:
            return parse_duration(self.drain_timeout)
        return min(DRAIN_MOST_S, lease_s + max_output_tokens * TOKEN_S)

    @property
    def progress_deadline_s(self) -> float:
        """Deadline in seconds."""
        return parse_duration(self.progress_deadline)
