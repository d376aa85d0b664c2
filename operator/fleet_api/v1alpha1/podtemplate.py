"""What a user may add to the pods of a role. Typed and bounded: what is not here belongs to the operator.

Merging (render/template.py): maps gain keys, the role's win over the accelerator's; lists follow the operator's own entries;
resources replace the engine's defaults for cpu, memory and storage. Names, paths and variables of the operator are refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleet_api.v1alpha1.affinity import AffinitySpec
from fleet_api.v1alpha1.base import DNS_LABEL, DNS_SUBDOMAIN, ApiModel, CpuText, LabelMap, QuantityText

ObjectName = Annotated[str, Field(pattern=DNS_SUBDOMAIN, max_length=253)]
KeyName = Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]


class KeyRef(ApiModel):
    """A key of a Secret or ConfigMap of the fleet's namespace."""

    name: ObjectName = Field(description="Name of the object.")
    key: KeyName = Field(description="Key in its data.")


class ValueSource(ApiModel):
    """Where a variable's value comes from."""

    secret_key_ref: KeyRef | None = Field(default=None, description="A key of a Secret; the operator never reads it.")
    config_map_key_ref: KeyRef | None = Field(default=None, description="A key of a ConfigMap.")


class EnvVar(ApiModel):
    """One environment variable: a value or a source."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)] = Field(description="Name.")
    value: Annotated[str, Field(max_length=4096)] | None = Field(default=None, description="Value as text.")
    value_from: ValueSource | None = Field(default=None, description="Source of the value.")


class EmptyDirSource(ApiModel):
    """A folder that lives as long as the pod."""

    medium: Literal["Memory"] | None = Field(default=None, description="Memory: in RAM. Default: the node's disk.")
    size_limit: QuantityText | None = Field(default=None, description="Largest size. Default: none.")


class ClaimVolume(ApiModel):
    """A PersistentVolumeClaim of the fleet's namespace."""

    claim_name: ObjectName = Field(description="Name of the claim.")
    read_only: bool = Field(default=False, description="Mount it read-only. Default: false.")


class HostPathSource(ApiModel):
    """A folder of the node. Pod Security `restricted` and `baseline` do not allow it."""

    path: Annotated[str, Field(pattern=r"^(/[^/\x00-\x1f]+)+$", max_length=1024)] = Field(description="Path on the node.")
    type: Literal["Directory", "DirectoryOrCreate", "File", "Socket", "CharDevice", "BlockDevice"] | None = Field(
        default=None, description="What must be there. Default: not checked."
    )


class ConfigMapSource(ApiModel):
    """A ConfigMap as a folder."""

    name: ObjectName = Field(description="Name of the ConfigMap.")


class SecretSource(ApiModel):
    """A Secret as a folder."""

    secret_name: ObjectName = Field(description="Name of the Secret.")


class Volume(ApiModel):
    """One volume with exactly one source."""

    name: Annotated[str, Field(pattern=DNS_LABEL, max_length=63)] = Field(description="Name, unique in the pod.")
    empty_dir: EmptyDirSource | None = Field(default=None, description="A folder that lives as long as the pod.")
    persistent_volume_claim: ClaimVolume | None = Field(default=None, description="A claim of the namespace.")
    host_path: HostPathSource | None = Field(default=None, description="A folder of the node.")
    config_map: ConfigMapSource | None = Field(default=None, description="A ConfigMap.")
    secret: SecretSource | None = Field(default=None, description="A Secret.")


class VolumeMount(ApiModel):
    """Where a volume of `volumes` appears in the worker."""

    name: Annotated[str, Field(pattern=DNS_LABEL, max_length=63)] = Field(description="Name of the volume.")
    mount_path: Annotated[str, Field(pattern=r"^(/[^/:\x00-\x1f]+)+$", max_length=1024)] = Field(description="Absolute path.")
    sub_path: Annotated[str, Field(pattern=r"^[^/:\x00-\x1f]+(/[^/:\x00-\x1f]+)*$", max_length=1024)] | None = Field(
        default=None, description="Path inside the volume. Default: its root."
    )
    read_only: bool = Field(default=False, description="Mount it read-only. Default: false.")


class ResourceAmounts(ApiModel):
    """Amounts of what every node has. Devices come from accelerator and kvTransfer."""

    cpu: CpuText | None = Field(default=None, description="Cores, e.g. 16 or 500m.")
    memory: QuantityText | None = Field(default=None, description="Memory, e.g. 64Gi.")
    ephemeral_storage: QuantityText | None = Field(
        default=None, alias="ephemeral-storage", description="Disk of the node, e.g. 1Ti."
    )
    hugepages: QuantityText | None = Field(default=None, alias="hugepages-2Mi", description="Huge pages of 2 MiB, as EFA needs.")


class ResourcesSpec(ApiModel):
    """Requests and limits of the worker container, devices excepted."""

    requests: ResourceAmounts = Field(
        default=ResourceAmounts(), description="Reserved, at most limits. Default: what the engine needs to start."
    )
    limits: ResourceAmounts = Field(default=ResourceAmounts(), description="Never more. Default: none.")


class Toleration(ApiModel):
    """A taint that does not keep the pod away."""

    key: Annotated[str, Field(max_length=317)] | None = Field(default=None, description="Key of the taint. Default: all.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="Exists or Equal. Default: Equal.")
    value: Annotated[str, Field(max_length=63)] | None = Field(default=None, description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint. Default: all."
    )
    toleration_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = Field(
        default=None, description="Seconds to stay after a NoExecute taint. Default: for ever."
    )


class LocalRef(ApiModel):
    """An object of the fleet's namespace."""

    name: ObjectName = Field(description="Name of the object.")


class PodTemplateSpec(ApiModel):
    """Additions to every pod of a role."""

    labels: LabelMap = Field(
        default={}, description="More labels of pods made from now on; running pods are not restarted for them."
    )
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32)] = Field(
        default={}, description="More annotations of pods made from now on; running pods are not restarted for them."
    )
    node_selector: LabelMap = Field(default={}, description="More node labels, beside accelerator.nodeSelector.")
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] = Field(
        default=(), description="More tolerations, beside the one for the accelerator."
    )
    affinity: AffinitySpec | None = Field(default=None, description="More affinity terms, beside those of placement.")
    priority_class_name: ObjectName | None = Field(default=None, description="PriorityClass. Default: the cluster's.")
    runtime_class_name: ObjectName | None = Field(default=None, description="RuntimeClass. Default: the node's.")
    scheduler_name: ObjectName | None = Field(default=None, description="Scheduler. Default: default-scheduler.")
    service_account_name: ObjectName | None = Field(
        default=None, description="ServiceAccount, e.g. for pull rights; its token is not mounted. Default: default."
    )
    image_pull_secrets: Annotated[tuple[LocalRef, ...], Field(max_length=8)] = Field(
        default=(), description="Secrets with registry credentials."
    )
    run_as_user: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = Field(
        default=None,
        description="User of the worker. 0 is root, which Pod Security `restricted` does not allow; an added capability such as "
        "IPC_LOCK has an effect for root only. Default: 65532.",
    )
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = Field(default=(), description="More environment variables.")
    volumes: Annotated[tuple[Volume, ...], Field(max_length=16)] = Field(default=(), description="More volumes.")
    volume_mounts: Annotated[tuple[VolumeMount, ...], Field(max_length=32)] = Field(
        default=(), description="Where they appear in the worker."
    )
    resources: ResourcesSpec = Field(default=ResourcesSpec(), description="cpu, memory and disk of the worker.")
