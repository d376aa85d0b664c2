"""How KV blocks travel: one field per fact about the fabric; render/fabric.py turns them into the pod's shape."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleet_api.quantities import parse_duration
from fleet_api.v1alpha1.accelerator import ResourceName
from fleet_api.v1alpha1.base import ApiModel, DurationText

DEVICE_CLASS_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
DeviceClass = Annotated[str, Field(pattern=DEVICE_CLASS_PATTERN, max_length=253)]
HOST_PORT_STRIDE = 32
"""Ports of one worker on its host: some of our own, and one side channel per data parallel rank."""
HOST_PORT_RANKS = 24
"""Data parallel ranks whose side channels fit into these: vLLM 0.32 counts them over all nodes of a worker."""
HOST_PORT_SLOTS = 16
"""Workers of a tier that one node can hold: a node has at most so many devices."""


class DraSpec(ApiModel):
    """Devices by dynamic resource allocation: one claim per GPU, so that each has its NIC on its own PCIe root."""

    gpu: DeviceClass | None = Field(
        default=None,
        description="DeviceClass of the GPU, e.g. gpu.nvidia.com: GPU and NIC then come from one PCIe root, and "
        "accelerator.resource is not requested. Default: none, the GPU is requested as accelerator.resource.",
    )
    nic: DeviceClass = Field(description="DeviceClass of the NIC, e.g. mrdma.google.com.")


class HostPortsSpec(ApiModel):
    """Ports on the host's network, so that several workers fit on one node."""

    first: Annotated[int, Field(ge=1024, le=65536 - HOST_PORT_STRIDE * HOST_PORT_SLOTS)] = Field(
        description=f"First of the {HOST_PORT_STRIDE * HOST_PORT_SLOTS} ports that this tier may use on a node, 1024 to "
        f"{65536 - HOST_PORT_STRIDE * HOST_PORT_SLOTS}."
    )


class SeedSpec(ApiModel):
    """Hot prefixes for a new worker, from one that serves."""

    enabled: bool = Field(
        default=True,
        description="Whether a new worker of the torch engine reads the most used blocks of another one's prefix cache before "
        "it is ready. Default: true; vLLM has no interface for it.",
    )
    max_percent: Annotated[int, Field(ge=1, le=50)] = Field(
        default=25, description="Percent of the new worker's cache that they may take. Default: 25."
    )
    timeout: DurationText = Field(
        default="5s", description="What they may delay a new worker's readiness, 1s to 60s. Default: 5s."
    )

    @property
    def timeout_s(self) -> float:
        """Timeout in seconds."""
        return parse_duration(self.timeout)


class KvTransferSpec(ApiModel):
    """How KV blocks travel from prefill to decode workers."""

    transport: Literal["auto", "tcp", "shm", "rdma"] = Field(
        default="auto",
        description="rdma and shm may fall back to tcp unless required; auto takes the best that both workers have. "
        "Default: auto.",
    )
    required: bool = Field(
        default=False,
        description="true: a worker that cannot use the transport does not serve, and tcp is no fallback for rdma. "
        "Default: false.",
    )
    resource: ResourceName | None = Field(
        default=None, description="Extended resource of the NIC, e.g. rdma/ib or vpc.amazonaws.com/efa. Default: none."
    )
    count: Annotated[int, Field(ge=1, le=16)] | None = Field(
        default=None, description="NICs per pod of a worker; with via dra, NICs per GPU. Default: 1."
    )
    via: Literal["hostNetwork", "multus", "dra"] | None = Field(
        default=None,
        description="How the NIC comes into the pod. Default: by the resource alone, on the pod's own network.",
    )
    network: (
        Annotated[
            str,
            Field(pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-.a-z0-9]*[a-z0-9])?(@[a-z0-9]+)?$", max_length=253),
        ]
        | None
    ) = Field(default=None, description="NetworkAttachmentDefinition for via multus: NAME or NAMESPACE/NAME.")
    dra: DraSpec | None = Field(default=None, description="DeviceClasses for via dra.")
    host_ports: HostPortsSpec | None = Field(
        default=None,
        description="Ports for via hostNetwork. Default: the usual ones, and a node holds one worker.",
    )
    net_devices: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+(:[0-9]+)?$", max_length=63)], ...], Field(max_length=16)
    ] = Field(default=(), description="UCX_NET_DEVICES, e.g. mlx5_0:1. Default: none, UCX takes the nearest ones.")
    lease_duration: DurationText = Field(
        default="30s",
        description="How long a prefill worker keeps KV blocks for a decode worker to read, 5s to 10m. Default: 30s.",
    )

    seed: SeedSpec | None = Field(
        default=None,
        description="Hot prefixes for new workers. Default: on with the torch engine where the fleet's NetworkPolicy keeps "
        "others from the side channel (not with via hostNetwork, nor with networkPolicy.enabled false); none with vllm. Who asks "
        "has to have the fleet's key (spec.peerKey); images that are older than that key answer whoever reaches them.",
    )

    @property
    def lease_duration_s(self) -> float:
        """Lease in seconds."""
        return parse_duration(self.lease_duration)

    def seeding(self, *, guarded: bool) -> SeedSpec:
        """`seed` with its defaults. `guarded`: a NetworkPolicy says who reaches the workers. Who asks for hot prefixes is told
        the tokens of prompts, so that nobody but workers should be able to, unless a user wants it so: workers ask for a proof of
        the fleet's key, but an image that is older than that key does not, and nobody sees from here which one that is."""
        return self.seed or SeedSpec(enabled=guarded and self.via != "hostNetwork")

    @property
    def nics(self) -> int:
        """NICs per pod, or per GPU with via dra."""
        return self.count or 1

    @property
    def locks_memory(self) -> bool:
        """Whether a worker may register memory with a NIC."""
        return self.transport == "rdma" or (self.transport == "auto" and (self.resource is not None or self.via is not None))
