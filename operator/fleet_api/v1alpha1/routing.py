"""Routing, limits, service level, scaling and telemetry of a fleet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleet_api.quantities import parse_duration, parse_quantity
from fleet_api.v1alpha1.base import ApiModel, DurationText, QuantityText

Tokens = Annotated[int, Field(ge=1, le=1_048_576)]


class LoadSpec(ApiModel):
    """The bounded-load rule."""

    bound: Annotated[float, Field(ge=1.0, le=10.0)] = Field(
        default=1.25, description="No worker gets more than this many times the mean load, 1 to 10. Default: 1.25."
    )


class RemotePrefillSpec(ApiModel):
    """When a prompt goes through a prefill worker."""

    min_uncached_tokens: Annotated[int, Field(ge=0, le=1_048_576)] = Field(
        default=64, description="Prompts with fewer uncached tokens are prefilled on the decode worker. Default: 64."
    )


class RoutingSpec(ApiModel):
    """How the router chooses workers."""

    policy: Literal["kvAware", "prefixHash", "leastLoad", "roundRobin"] = Field(
        default="kvAware", description="kvAware prefers workers that hold the prompt's prefix. Default: kvAware."
    )
    load: LoadSpec = Field(default=LoadSpec(), description="The bounded-load rule.")
    remote_prefill: RemotePrefillSpec = Field(default=RemotePrefillSpec(), description="When a prompt goes to a prefill worker.")
    replicas: Annotated[int, Field(ge=1, le=32)] = Field(default=1, description="Router pods. Default: 1.")


class HoldSpec(ApiModel):
    """Requests that wait in a router while a tier wakes from zero; the bounds are each router pod's own."""

    requests: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=256, description="Most requests that one router pod holds; further ones get 503. Default: 256."
    )
    size: QuantityText = Field(
        default="64Mi", description="Most bytes of their bodies that one router pod holds, 4Mi to 16Gi. Default: 64Mi."
    )
    time: DurationText = Field(
        default="5m", description="Longest time that a request is held before it gets 503, 1s to 1h. Default: 5m."
    )

    @property
    def size_bytes(self) -> int:
        """Bodies in bytes."""
        return parse_quantity(self.size)

    @property
    def time_s(self) -> float:
        """Time in seconds."""
        return parse_duration(self.time)


class LimitsSpec(ApiModel):
    """What one request may ask for, and how many may wait."""

    max_input_tokens: Tokens | None = Field(
        default=None, description="Longest prompt in tokens, at most engine.maxModelLen. Default: engine.maxModelLen."
    )
    max_output_tokens: Tokens = Field(default=4096, description="Most tokens that one request may generate. Default: 4096.")
    hold: HoldSpec = Field(default=HoldSpec(), description="Requests that wait while a tier wakes from zero.")


class LatencySpec(ApiModel):
    """A latency objective."""

    p99: DurationText = Field(description="99 of 100 requests are at least this fast, 1ms to 1h.")

    @property
    def p99_s(self) -> float:
        """Objective in seconds."""
        return parse_duration(self.p99)


class SloSpec(ApiModel):
    """Latency objectives; scaling adds workers when they are missed."""

    ttft: LatencySpec | None = Field(default=None, description="Time to the first token; prefill workers are added when missed.")
    itl: LatencySpec | None = Field(default=None, description="Time between tokens; decode workers are added when missed.")


class TargetInflightSpec(ApiModel):
    """Requests in flight per worker that scaling aims at."""

    prefill: Annotated[int, Field(ge=1, le=1024)] = Field(default=4, description="Per prefill worker. Default: 4.")
    decode: Annotated[int, Field(ge=1, le=1024)] = Field(default=16, description="Per decode worker. Default: 16.")


class BudgetSpec(ApiModel):
    """What a fleet may cost."""

    gpus: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        description="Most devices of all tiers together; the minimum of a tier is always asked for, and a rollout adds its surge."
    )


class ToZeroSpec(ApiModel):
    """No worker at all while nobody asks: prefill and decode go together, and come back together for the first request."""

    enabled: bool = Field(
        default=False,
        description="true: an idle fleet has no workers; its router holds the requests that wake it. A tier with warm workers "
        "keeps its workers. Default: false.",
    )
    idle: DurationText = Field(
        default="30m",
        description="The fleet gives its workers up after so long without a request, and at the earliest so long after it woke; "
        "a fleet whose load is unknown keeps them. 5s to 24h. Default: 30m.",
    )

    @property
    def idle_s(self) -> float:
        """Idle time in seconds."""
        return parse_duration(self.idle)


class ScalingSpec(ApiModel):
    """How the operator sizes the tiers."""

    mode: Literal["auto", "manual"] = Field(
        default="auto", description="auto follows the load; manual follows only /scale of the worker pools. Default: auto."
    )
    target_inflight: TargetInflightSpec = Field(default=TargetInflightSpec(), description="Requests in flight per worker.")
    scale_down_window: DurationText = Field(
        default="2m", description="Workers leave only after the load stayed low for this long, at most 24h. Default: 2m."
    )

    capacity_wait: DurationText = Field(
        default="5m",
        description="A worker without a node for this long, or refused by a quota, caps its tier at what exists, for as long; "
        "then it is tried again. 1s to 24h. Default: 5m.",
    )
    budget: BudgetSpec | None = Field(default=None, description="Most devices. Default: no limit.")
    to_zero: ToZeroSpec = Field(default=ToZeroSpec(), description="Whether an idle fleet keeps its workers.")

    @property
    def capacity_wait_s(self) -> float:
        """Wait in seconds."""
        return parse_duration(self.capacity_wait)

    @property
    def scale_down_window_s(self) -> float:
        """Window in seconds."""
        return parse_duration(self.scale_down_window)


class PrometheusSpec(ApiModel):
    """A Prometheus server to read metrics from."""

    url: Annotated[str, Field(pattern=r"^https?://[^/\s@]+(/[^\s@]*)?$", max_length=2048)] = Field(
        description="Base URL, e.g. http://prometheus.monitoring:9090; without credentials, because everybody can read them here."
    )


class TelemetrySpec(ApiModel):
    """Where load and latency come from."""

    prometheus: PrometheusSpec | None = Field(
        default=None, description="Read from Prometheus. Default: the operator scrapes workers and routers itself."
    )
    interval: DurationText = Field(default="5s", description="Time between two readings, 1s to 5m. Default: 5s.")

    @property
    def interval_s(self) -> float:
        """Interval in seconds."""
        return parse_duration(self.interval)
