"""Tiers: worker sets of one accelerator type, split into a prefill and a decode role."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleet_api.quantities import Ratio, parse_duration, parse_ratio
from fleet_api.v1alpha1.base import DNS_LABEL, ApiModel, DurationText, RatioText

Role = Literal["prefill", "decode"]
CPU = "cpu"
DEFAULT_RESOURCE = "nvidia.com/gpu"
TIER_NAME_MAX = 20


class AcceleratorSpec(ApiModel):
    """The device of one worker."""

    type: Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=63)] = Field(
        description="Accelerator type, e.g. h100-sxm; cpu asks for no device."
    )
    resource: (
        Annotated[
            str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$", max_length=253)
        ]
        | None
    ) = Field(default=None, description="Extended resource to request; not with type cpu. Default: nvidia.com/gpu.")
    count: Annotated[int, Field(ge=1, le=16)] = Field(default=1, description="Devices per worker; not with type cpu. Default: 1.")

    @property
    def device_request(self) -> tuple[str, int] | None:
        """(resource, count) that a worker pod requests; None for CPU workers."""
        return None if self.type == CPU else (self.resource or DEFAULT_RESOURCE, self.count)


class RatioSpec(ApiModel):
    """Prefill workers to decode workers: the default shape and the bounds that hold at every moment."""

    prefill: Annotated[int, Field(ge=1, le=99)] = Field(default=1, description="Prefill part of the default shape. Default: 1.")
    decode: Annotated[int, Field(ge=1, le=99)] = Field(default=2, description="Decode part of the default shape. Default: 2.")
    min: RatioText = Field(
        default="1:4", description="Fewest prefill workers per decode worker, as prefill:decode. Default: 1:4."
    )
    max: RatioText = Field(default="1:1", description="Most prefill workers per decode worker, as prefill:decode. Default: 1:1.")

    @property
    def shape(self) -> Ratio:
        """The default shape."""
        return Ratio(self.prefill, self.decode)

    @property
    def min_ratio(self) -> Ratio:
        """Lower bound of prefill/decode."""
        return parse_ratio(self.min)

    @property
    def max_ratio(self) -> Ratio:
        """Upper bound of prefill/decode."""
        return parse_ratio(self.max)


class RoleSpec(ApiModel):
    """Size of one role of a tier."""

    replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        default=None,
        description="Workers to start with; scaling moves on from there. Default: minReplicas, raised to the shape of ratio.",
    )
    min_replicas: Annotated[int, Field(ge=1, le=1000)] = Field(default=1, description="Never fewer workers. Default: 1.")
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = Field(default=8, description="Never more workers. Default: 8.")
    warm: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0, description="Workers above what the load needs, kept ready for a burst. Default: 0."
    )


class KvTransferSpec(ApiModel):
    """How KV blocks travel from prefill to decode workers."""

    transport: Literal["auto", "tcp", "shm", "rdma"] = Field(
        default="auto", description="auto takes the best that both workers have; the others allow only that one. Default: auto."
    )
    lease_duration: DurationText = Field(
        default="30s",
        description="How long a prefill worker keeps KV blocks for a decode worker to read, 5s to 10m. Default: 30s.",
    )

    @property
    def lease_duration_s(self) -> float:
        """Lease in seconds."""
        return parse_duration(self.lease_duration)


class TierSpec(ApiModel):
    """Prefill and decode workers on one accelerator type."""

    name: Annotated[str, Field(pattern=DNS_LABEL, max_length=TIER_NAME_MAX)] = Field(
        description="Name of the tier, unique in the fleet; part of the names of its workers."
    )
    accelerator: AcceleratorSpec = Field(description="The device of one worker.")
    ratio: RatioSpec = Field(default=RatioSpec(), description="Prefill workers to decode workers.")
    prefill: RoleSpec = Field(default=RoleSpec(), description="Workers that read prompts.")
    decode: RoleSpec = Field(default=RoleSpec(), description="Workers that write tokens.")
    kv_transfer: KvTransferSpec = Field(default=KvTransferSpec(), description="How KV blocks travel from prefill to decode.")

    def role(self, role: Role) -> RoleSpec:
        """The size of `role`."""
        return self.prefill if role == "prefill" else self.decode

    @property
    def initial(self) -> tuple[int, int]:
        """(prefill, decode) workers to start with: as asked, else the smallest multiple of the shape that has both minimums."""
        times = max(-(-self.prefill.min_replicas // self.ratio.prefill), -(-self.decode.min_replicas // self.ratio.decode))
        prefill = self.prefill.replicas or min(times * self.ratio.prefill, self.prefill.max_replicas)
        decode = self.decode.replicas or min(times * self.ratio.decode, self.decode.max_replicas)
        return prefill, decode
