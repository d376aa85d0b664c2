"""Which model a fleet serves and which engine runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fleet_api.quantities import parse_quantity
from fleet_api.v1alpha1.base import DNS_SUBDOMAIN, ApiModel, QuantityText

SOURCE_PATTERN = (
    r"^(file://(/[^/\x00-\x1f]+)+|pvc://[a-z0-9]([-.a-z0-9]*[a-z0-9])?(/[^/\x00-\x1f]+)+"
    r"|hf://[A-Za-z0-9][-._A-Za-z0-9]*/[A-Za-z0-9][-._A-Za-z0-9]*)$"
)
DEFAULT_REVISION = "main"


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


class ModelSpec(ApiModel):
    """The model and the name under which clients ask for it."""

    source: Annotated[str, Field(pattern=SOURCE_PATTERN, max_length=1024)] = Field(
        description="Where the checkpoint (safetensors, config.json, tokenizer) is: file:///DIR on every node, "
        "pvc://CLAIM/DIR in a PersistentVolumeClaim of the namespace, or hf://ORG/NAME on the Hugging Face hub."
    )
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-._/A-Za-z0-9]*$", max_length=128)] | None = Field(
        default=None, description="Branch, tag or commit of an hf:// source. Default: main."
    )
    served_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-._:/A-Za-z0-9]*$", max_length=128)] | None = Field(
        default=None, description="The name that clients send in `model`. Default: metadata.name."
    )
    token_secret_ref: TokenSecretRef | None = Field(
        default=None, description="Token for an hf:// source. Workers get it as HF_TOKEN from the Secret. Default: none."
    )
    cache: ModelCacheSpec | None = Field(
        default=None, description="Where workers keep an hf:// model between restarts. Default: in the pod."
    )

    @property
    def location(self) -> Source:
        """The source, parsed."""
        scheme, _, rest = self.source.partition("://")
        if scheme == "file":
            return FileSource(path=rest)
        if scheme == "pvc":
            claim, _, path = rest.partition("/")
            return ClaimSource(claim=claim, path=path)
        return HubSource(repository=rest, revision=self.revision or DEFAULT_REVISION)


class EngineSpec(ApiModel):
    """The inference engine of every worker of the fleet."""

    type: Literal["torch", "vllm"] = Field(
        default="torch", description="torch: the built-in engine for Llama-family models. vllm: vLLM. Default: torch."
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="Container image of the workers. Default: the image of this release."
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
        default="64Mi", description="KV cache of one worker, 1Mi to 16Ti, as a quantity such as 64Mi or 40Gi. Default: 64Mi."
    )

    @property
    def cache_bytes(self) -> int:
        """KV cache of one worker in bytes."""
        return parse_quantity(self.cache_size)
