"""What one worker runs on: devices, the nodes that have them, and how the engine spreads over them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleet_api.v1alpha1.base import ApiModel, LabelMap

CPU = "cpu"
DEFAULT_RESOURCE = "nvidia.com/gpu"
RESOURCE_PATTERN = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
ResourceName = Annotated[str, Field(pattern=RESOURCE_PATTERN, max_length=253)]


class AcceleratorSpec(ApiModel):
    """The device of one worker."""

    type: Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=63)] = Field(
        description="Accelerator type, e.g. h100-sxm; cpu asks for no device."
    )
    resource: ResourceName | None = Field(
        default=None, description="Extended resource to request; not with type cpu. Default: nvidia.com/gpu."
    )
    count: Annotated[int, Field(ge=1, le=16)] = Field(
        default=1,
        description="Devices per worker, all of its nodes together; not with type cpu. Default: tensor x pipeline x data of "
        "parallelism.",
    )
    node_selector: LabelMap = Field(
        default={}, description="Labels of the nodes that have this accelerator, e.g. nvidia.com/gpu.product: H100."
    )


class ParallelismSpec(ApiModel):
    """How `vllm serve` spreads one worker over its devices; of the torch engine nodes alone."""

    tensor: Annotated[int, Field(ge=1, le=64)] = Field(default=1, description="Tensor parallel size. Default: 1.")
    pipeline: Annotated[int, Field(ge=1, le=64)] = Field(default=1, description="Pipeline parallel size. Default: 1.")
    data: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="Data parallel ranks behind the worker's one address. KV events are off when more than 1. Default: 1.",
    )
    expert: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Expert parallel size: 1, or tensor x data, because vLLM spreads experts over all of these. Default: 1.",
    )

    nodes: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="Nodes that one worker spans: so many pods, which share its devices evenly, and start, serve and end "
        "together. Default: 1.",
    )

    @property
    def ranks(self) -> int:
        """Devices that one worker needs, all of its nodes together."""
        return self.tensor * self.pipeline * self.data
