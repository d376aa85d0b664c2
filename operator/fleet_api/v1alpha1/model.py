"""Which model a fleet serves and which engine runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fleet_api.quantities import parse_duration, parse_quantity
from fleet_api.v1alpha1.base import DNS_SUBDOMAIN, ApiModel, DurationText, QuantityText

SOURCE_PATTERN = (
    r"^(file://(/[^/\x00-\x1f]+)+|pvc://[a-z0-9]([-.a-z0-9]*[a-z0-9])?(/[^/\x00-\x1f]+)+"
    r"|hf://[A-Za-z0-9][-._A-Za-z0-9]*/[A-Za-z0-9][-._A-Za-z0-9]*)$"
)
SERVED_PATTERN = r"^[A-Za-z0-9][-._:/A-Za-z0-9]*$"
REVISION_PATTERN = r"^[A-Za-z0-9][-._/A-Za-z0-9]*$"
ROOT_PATTERN = r"^(file://(/[^/\x00-\x1f]+)+|pvc://[a-z0-9]([-.a-z0-9]*[a-z0-9])?(/[^/\x00-\x1f]+)*)$"
DEFAULT_REVISION = "main"
ADAPTER_SLOTS = {"torch": 8, "vllm": 0}
"""Adapters at once where the spec says nothing: vLLM sets memory aside for each."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """A directory of the node."""

    path: str


@dataclass(frozen=True, slots=True)
class ClaimSource:
    """A directory `path` (no leading slash) inside the PersistentVolumeClaim `claim`."""

    claim: str
    path: str


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hugging Face hub."""

    repository: str
    revision: str


Source = FileSource | ClaimSource | HubSource


class TokenSecretRef(ApiModel):
    """A key of a Secret of the fleet's namespace; the operator never reads it."""

    name: Annotated[str, Field(pattern=DNS_SUBDOMAIN, max_length=253)] = Field(description="Name of the Secret.")
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = Field(
        default="token", description="Key in its data. Default: token."
    )


class PrefetchSpec(ApiModel):
    """How the model gets to nodes before their workers do."""

    parallel: Annotated[int, Field(ge=1, le=64)] = Field(default=4, description="Nodes that fetch at the same time. Default: 4.")
    wait: DurationText = Field(
        default="5m",
        description="New workers wait this long for nodes that still fetch, 0s to 24h; then they start and fetch by themselves. "
        "Default: 5m.",
    )

    @property
    def wait_s(self) -> float:
        """Longest wait in seconds."""
        return parse_duration(self.wait)


class ModelCacheSpec(ApiModel):
    """Where workers keep an hf:// model between restarts."""

    type: Literal["none", "nodeLocal", "pvc"] = Field(
        default="none", description="none: in the pod; nodeLocal: a folder of the node; pvc: a shared claim. Default: none."
    )
    path: Annotated[str, Field(pattern=r"^(/[^/\x00-\x1f]+)+$", max_length=1024)] | None = Field(
        default=None, description="Folder of the node for nodeLocal; user 65532 must be able to write there."
    )
    claim: Annotated[str, Field(pattern=DNS_SUBDOMAIN, max_length=253)] | None = Field(
        default=None, description="PersistentVolumeClaim for pvc, writable from every node."
    )
    prefetch: PrefetchSpec | None = Field(
        default=None,
        description="For nodeLocal: nodes that may get workers fetch the model before new workers start there. Default: as {}.",
    )


class AdapterSpec(ApiModel):
    """A LoRA adapter over the model. It comes, goes and changes without a restart."""

    name: Annotated[str, Field(pattern=SERVED_PATTERN, max_length=128)] = Field(
        description="The name that clients send in `model`, unique in the fleet."
    )
    source: Annotated[str, Field(pattern=SOURCE_PATTERN, max_length=1024)] = Field(
        description="Folder with adapter_config.json and adapter_model.safetensors (PEFT): hf://ORG/NAME, or file:///DIR or "
        "pvc://CLAIM/DIR below adapterRoot. Content is read when it is loaded: give another content another folder or revision."
    )
    revision: Annotated[str, Field(pattern=REVISION_PATTERN, max_length=128)] | None = Field(
        default=None, description="Branch, tag or commit of an hf:// source. Default: main."
    )


class ModelSpec(ApiModel):
    """The model and the name under which clients ask for it."""

    source: Annotated[str, Field(pattern=SOURCE_PATTERN, max_length=1024)] = Field(
        description="Where the checkpoint (safetensors, config.json, tokenizer) is: file:///DIR on every node, "
        "pvc://CLAIM/DIR in a PersistentVolumeClaim of the namespace, or hf://ORG/NAME on the Hugging Face hub."
    )
    revision: Annotated[str, Field(pattern=REVISION_PATTERN, max_length=128)] | None = Field(
        default=None, description="Branch, tag or commit of an hf:// source. Default: main."
    )
    served_name: Annotated[str, Field(pattern=SERVED_PATTERN, max_length=128)] | None = Field(
        default=None, description="The name that clients send in `model`. Default: metadata.name."
    )
    token_secret_ref: TokenSecretRef | None = Field(
        default=None, description="Token for an hf:// source. Workers get it as HF_TOKEN from the Secret. Default: none."
    )
    cache: ModelCacheSpec | None = Field(
        default=None, description="Where workers keep an hf:// model between restarts. Default: in the pod."
    )

    adapters: Annotated[tuple[AdapterSpec, ...], Field(max_length=64)] = Field(
        default=(), description="LoRA adapters; adding, changing and removing one restarts nothing. Default: none."
    )
    adapter_root: Annotated[str, Field(pattern=ROOT_PATTERN, max_length=1024)] | None = Field(
        default=None,
        description="Folder of every node (file:///DIR) or claim (pvc://CLAIM or pvc://CLAIM/DIR) that adapters with file:// and "
        "pvc:// sources lie in; mounted when a worker starts. Default: the model's source, when that is one of these.",
    )
    max_simultaneous_adapters: Annotated[int, Field(ge=0, le=64)] | None = Field(
        default=None,
        description="Adapters that a worker has room for; changing it restarts workers. Default: 8 for torch, 0 for vllm, which "
        "sets memory aside for each.",
    )
    max_adapter_rank: Annotated[int, Field(ge=1, le=512)] = Field(
        default=64, description="Largest rank of an adapter; changing it restarts workers. Default: 64."
    )

    @property
    def location(self) -> Source:
        """The source, parsed."""
        return located(self.source, self.revision)

    @property
    def adapter_folder(self) -> FileSource | ClaimSource | None:
        """Where adapters with file:// and pvc:// sources lie; None: nowhere."""
        found = located(self.adapter_root, None) if self.adapter_root is not None else self.location
        return None if isinstance(found, HubSource) else found

    def adapter_slots(self, engine: str) -> int:
        """Adapters that a worker of this engine has room for."""
        return ADAPTER_SLOTS[engine] if self.max_simultaneous_adapters is None else self.max_simultaneous_adapters


def located(source: str, revision: str | None) -> Source:
    """A source, parsed; a claim's path is empty when the whole claim is meant."""
    scheme, _, rest = source.partition("://")
    if scheme == "file":
        return FileSource(path=rest)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        return ClaimSource(claim=claim, path=path)
    return HubSource(repository=rest, revision=revision or DEFAULT_REVISION)


class EngineSpec(ApiModel):
    """The inference engine of every worker of the fleet."""

    type: Literal["torch", "vllm"] = Field(
        default="torch", description="torch: the built-in engine for Llama-family models. vllm: vLLM. Default: torch."
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        description="Container image of the workers; for vllm one that has it. Default: the operator's, made for torch.",
    )
    args: Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=64)] = Field(
        default=(), description="More arguments for `vllm serve`; refused for the torch engine. Default: none."
    )
    kv_cache_dtype: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=32)] | None = Field(
        default=None, description="Type of KV values of vllm, e.g. fp8; both sides of a hand-off have it. Default: vLLM's, auto."
    )
    max_model_len: Annotated[int, Field(ge=16, le=1_048_576)] = Field(
        default=2048, description="Longest sequence in tokens, prompt plus output. Default: 2048."
    )
    max_batch: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=32, description="Requests that one worker runs at the same time. Default: 32."
    )
    block_tokens: Annotated[int, Field(ge=1, le=256)] = Field(
        default=16, description="Tokens per KV block of the torch engine; refused for vllm. Default: 16."
    )
    cache_size: QuantityText = Field(
        default="64Mi",
        description="KV cache of one worker, 1Mi to 16Ti, as a quantity such as 64Mi or 40Gi. Not of vllm on a GPU, which takes "
        "a share of its memory: see --gpu-memory-utilization, for args. Default: 64Mi.",
    )

    @property
    def cache_bytes(self) -> int:
        """KV cache of one worker in bytes."""
        return parse_quantity(self.cache_size)
