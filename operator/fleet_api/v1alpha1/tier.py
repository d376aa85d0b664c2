"""Tiers: worker sets of one accelerator type, split into a prefill and a decode role."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from fleet_api.quantities import Ratio, parse_quantity, parse_ratio
from fleet_api.v1alpha1.accelerator import CPU, DEFAULT_RESOURCE, AcceleratorSpec, ParallelismSpec
from fleet_api.v1alpha1.base import DNS_LABEL, TIER_NAME_MAX, ApiModel, QuantityText, RatioText
from fleet_api.v1alpha1.fabric import KvTransferSpec
from fleet_api.v1alpha1.model import REVISION_PATTERN, SOURCE_PATTERN
from fleet_api.v1alpha1.placement import PlacementSpec
from fleet_api.v1alpha1.podtemplate import PodTemplateSpec

Role = Literal["prefill", "decode"]


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
    min_replicas: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=1, description="Never fewer workers, but none at all while scaling.toZero lets the fleet rest. Default: 1."
    )
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = Field(default=8, description="Never more workers. Default: 8.")
    warm: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0,
        description="Workers above what the load needs, kept ready for a burst; the tier never goes to zero. Default: 0.",
    )
    accelerator: AcceleratorSpec | None = Field(
        default=None, description="The device of this role. Default: the tier's, as a whole."
    )
    parallelism: ParallelismSpec | None = Field(
        default=None, description="How a worker of this role spreads over its devices. Default: the tier's, as a whole."
    )
    args: Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=32)] = Field(
        default=(), description="More arguments for `vllm serve` of this role, after engine.args. Default: none."
    )
    pod_template: PodTemplateSpec | None = Field(default=None, description="Additions to the pods of this role.")


class TierModelSpec(ApiModel):
    """A model of the tier's own. Clients ask for it by the fleet's name, and what else spec.model says holds for it, too."""

    source: Annotated[str, Field(pattern=SOURCE_PATTERN, max_length=1024)] = Field(
        description="Where the checkpoint is, as in spec.model.source."
    )
    revision: Annotated[str, Field(pattern=REVISION_PATTERN, max_length=128)] | None = Field(
        default=None, description="Branch, tag or commit of an hf:// source, whatever spec.model.revision says. Default: main."
    )


PRICE_MOST: Final = 1_000_000.0


class CostSpec(ApiModel):
    """What the workers of a tier cost."""

    per_gpu_hour: Annotated[float, Field(ge=0.0, le=PRICE_MOST)] = Field(
        description="Price of one device of either role for an hour, in a currency that all tiers share. Workers without devices "
        "cost nothing."
    )


class TierSpec(ApiModel):
    """Prefill and decode workers on one accelerator type."""

    name: Annotated[str, Field(pattern=DNS_LABEL, max_length=TIER_NAME_MAX)] = Field(
        description="Name of the tier, unique in the fleet; part of the names of its workers."
    )
    accelerator: AcceleratorSpec = Field(description="The device of one worker.")
    model: TierModelSpec | None = Field(
        default=None,
        description="A model of this tier's own, smaller or larger than other tiers'; needs routing.cascade. Default: "
        "spec.model's.",
    )
    parallelism: ParallelismSpec | None = Field(
        default=None, description="How one worker spreads over its devices; a role may have its own. Default: all sizes 1."
    )
    cost: CostSpec | None = Field(
        default=None,
        description="What the devices cost, for scaling.budget.perHour and status.costPerHour; changing it restarts nothing. "
        "Default: unknown.",
    )
    quantization: Annotated[str, Field(pattern=r"^[a-z][-_a-z0-9]*$", max_length=32)] | None = Field(
        default=None, description="Quantization of the weights for vllm, e.g. fp8 or awq. Default: as the checkpoint says."
    )
    shared_memory: QuantityText | None = Field(
        default=None,
        description="Size of /dev/shm, e.g. 20Gi; it counts as the pod's memory. Default: half of the node's memory.",
    )
    placement: PlacementSpec | None = Field(default=None, description="Where the workers go. Default: wherever there is room.")
    ratio: RatioSpec = Field(default=RatioSpec(), description="Prefill workers to decode workers.")
    prefill: RoleSpec = Field(default=RoleSpec(), description="Workers that read prompts.")
    decode: RoleSpec = Field(default=RoleSpec(), description="Workers that write tokens.")
    kv_transfer: KvTransferSpec = Field(default=KvTransferSpec(), description="How KV blocks travel from prefill to decode.")

    def role(self, role: Role) -> RoleSpec:
        """The size of `role`."""
        return self.prefill if role == "prefill" else self.decode

    def accelerator_of(self, role: Role) -> AcceleratorSpec:
        """The device of a worker of `role`."""
        return self.role(role).accelerator or self.accelerator

    def parallelism_of(self, role: Role) -> ParallelismSpec:
        """How a worker of `role` spreads."""
        return self.role(role).parallelism or self.parallelism or ParallelismSpec()

    def nodes_of(self, role: Role) -> int:
        """Pods of one worker of `role`."""
        return self.parallelism_of(role).nodes

    def device_request(self, role: Role) -> tuple[str, int] | None:
        """(resource, count) that a worker of `role` needs, all of its pods together; None for CPU workers."""
        device = self.accelerator_of(role)
        if device.type == CPU:
            return None
        return device.resource or DEFAULT_RESOURCE, max(device.count, self.parallelism_of(role).ranks)

    def pod_devices(self, role: Role) -> tuple[str, int] | None:
        """(resource, count) that one pod of a worker of `role` needs, by whatever way it gets them; None for CPU workers."""
        device = self.device_request(role)
        return None if device is None else (device[0], device[1] // self.nodes_of(role))

    @property
    def shared_memory_bytes(self) -> int | None:
        """Size of /dev/shm; None: the node's default."""
        return parse_quantity(self.shared_memory) if self.shared_memory is not None else None

    @property
    def initial(self) -> tuple[int, int]:
        """(prefill, decode) workers to start with: as asked, else the smallest multiple of the shape that has both minimums."""
        times = max(-(-self.prefill.min_replicas // self.ratio.prefill), -(-self.decode.min_replicas // self.ratio.decode))
        prefill = self.prefill.replicas or min(times * self.ratio.prefill, self.prefill.max_replicas)
        decode = self.decode.replicas or min(times * self.ratio.decode, self.decode.max_replicas)
        return prefill, decode
