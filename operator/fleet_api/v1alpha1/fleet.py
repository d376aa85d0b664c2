"""InferenceFleet: one model served by tiers of prefill and decode workers behind one router."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field
from pydantic_core import to_json

from fleet_api.quantities import parse_duration
from fleet_api.v1alpha1.accelerator import CPU, DEFAULT_RESOURCE, ParallelismSpec
from fleet_api.v1alpha1.admission import SloClassSpec, TenantsSpec
from fleet_api.v1alpha1.base import DNS_LABEL, GROUP, ApiModel, DurationText, Metadata
from fleet_api.v1alpha1.healing import HealingSpec
from fleet_api.v1alpha1.model import DEFAULT_REVISION, EngineSpec, HubSource, ModelSpec
from fleet_api.v1alpha1.port import PeerKeySpec
from fleet_api.v1alpha1.rollout import RolloutSpec
from fleet_api.v1alpha1.routing import LimitsSpec, RoutingSpec, ScalingSpec, SloSpec, TelemetrySpec
from fleet_api.v1alpha1.status import FleetStatus
from fleet_api.v1alpha1.tier import Role, TierSpec

ROLES: tuple[Role, ...] = ("prefill", "decode")
RESOLVED_MOST_BYTES: Final = 262_144
"""etcd takes an object of 1.5 MiB: the spec, what `kubectl apply` writes of it once more, and the status. Beyond that no status
is written any more, nor a decision that must be in it."""


class NetworkPolicySpec(ApiModel):
    """Who may reach the workers of a fleet, for clusters whose network enforces NetworkPolicies."""

    enabled: bool = Field(
        default=True,
        description="true: only the fleet's workers reach the transfer ports, only its routers and the operator the engines and "
        "the agents. false: no policy, and one that exists is deleted. Default: true.",
    )
    metrics_from: Annotated[tuple[Annotated[str, Field(pattern=DNS_LABEL, max_length=63)], ...], Field(max_length=8)] = Field(
        default=(), description="More namespaces that may read the workers' metrics, e.g. monitoring. Default: none."
    )


DRAIN: Final = f"{GROUP}/drain"
"""Finalizer of fleets that say how long their end may take."""


class DeletionSpec(ApiModel):
    """How a fleet ends whose streams take longer than a drain."""

    wait: DurationText = Field(
        description="How long the fleet, once deleted, may take for what runs: a finalizer keeps it until its workers are idle, "
        "for so long at the most. 1s to 24h. The operator takes that finalizer off. Where none watches the fleet's namespace any "
        f"more, kubectl edit does: take {DRAIN} out of metadata.finalizers."
    )

    @property
    def wait_s(self) -> float:
        """Longest wait in seconds."""
        return parse_duration(self.wait)


class FleetSpec(ApiModel):
    """What the user wants."""

    model: ModelSpec = Field(description="The model to serve.")
    engine: EngineSpec = Field(default=EngineSpec(), description="The inference engine of every worker.")
    tiers: Annotated[tuple[TierSpec, ...], Field(min_length=1, max_length=8)] = Field(
        description="Sets of prefill and decode workers, one per accelerator type."
    )
    slo: SloSpec = Field(default=SloSpec(), description="Latency objectives; scaling acts on them.")
    routing: RoutingSpec = Field(default=RoutingSpec(), description="How the router chooses workers.")
    classes: Annotated[tuple[SloClassSpec, ...], Field(max_length=16)] = Field(
        default=(), description="SLO classes. Default: one class, default, with the fleet's objective."
    )
    tenants: TenantsSpec | None = Field(
        default=None, description="Who may ask, by API key. Default: everybody who reaches the router."
    )
    limits: LimitsSpec = Field(default=LimitsSpec(), description="What one request may ask for.")
    scaling: ScalingSpec = Field(default=ScalingSpec(), description="How the operator sizes the tiers.")
    rollout: RolloutSpec = Field(default=RolloutSpec(), description="How a new revision replaces the old one.")
    healing: HealingSpec = Field(default=HealingSpec(), description="What the operator mends by itself.")
    telemetry: TelemetrySpec = Field(default=TelemetrySpec(), description="Where load and latency come from.")
    network_policy: NetworkPolicySpec = Field(default=NetworkPolicySpec(), description="Who may reach the workers.")
    peer_key: PeerKeySpec | None = Field(
        default=None,
        description="Key by which several routers (gossip) and torch workers (hot prefixes, KV) know their own. Default: where "
        "they need one the operator makes it for the fleet, in a Secret.",
    )
    deletion: DeletionSpec | None = Field(
        default=None,
        description="Give what runs more time when the fleet is deleted. Default: no finalizer; workers and routers finish what "
        "they can inside their drain time.",
    )

    @property
    def max_input_tokens(self) -> int:
        """Longest prompt in tokens."""
        return self.limits.max_input_tokens or self.engine.max_model_len


class InferenceFleet(ApiModel):
    """One model served by prefill and decode workers that hand KV caches over, behind one OpenAI endpoint."""

    api_version: Literal["inferencefleet.io/v1alpha1"] = "inferencefleet.io/v1alpha1"
    kind: Literal["InferenceFleet"] = "InferenceFleet"
    metadata: Metadata
    spec: FleetSpec
    status: FleetStatus = FleetStatus()

    @property
    def served_name(self) -> str:
        """The name that clients send in `model`."""
        return self.spec.model.served_name or self.metadata.name

    def tier(self, name: str) -> TierSpec:
        """The tier called `name`; KeyError when there is none."""
        for tier in self.spec.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)

    def model_of(self, tier: TierSpec) -> ModelSpec:
        """The model that the workers of `tier` load: spec.model, with the source and the revision of the tier's own if it has
        one. What fetches from the hub (token, cache) is left out where nothing comes from there."""
        found = self.spec.model
        if tier.model is not None:
            found = found.model_copy(update={"source": tier.model.source, "revision": tier.model.revision})
        if isinstance(found.location, HubSource) or found.adapters:  # adapters may come from the hub, too
            return found
        return found.model_copy(update={"token_secret_ref": None, "cache": None})

    def resolved(self) -> dict[str, Any]:
        """The spec with every default filled in, for status.resolved; never written back to spec. One that is larger than
        RESOLVED_MOST_BYTES is left out, and its size is in its place."""
        spec = self._resolved()
        size = len(to_json(spec))
        return spec if size <= RESOLVED_MOST_BYTES else {"leftOut": f"it has {size} bytes, more than {RESOLVED_MOST_BYTES}"}

    def _resolved(self) -> dict[str, Any]:
        spec = self.spec.to_dict()
        spec["model"]["servedName"] = self.served_name
        if isinstance(self.spec.model.location, HubSource):
            spec["model"].setdefault("revision", DEFAULT_REVISION)
        spec["model"]["maxSimultaneousAdapters"] = self.spec.model.adapter_slots(self.spec.engine.type)
        if self.spec.engine.type != "torch":
            del spec["engine"]["blockTokens"]
        spec["limits"]["maxInputTokens"] = self.spec.max_input_tokens
        for tier, model in zip(spec["tiers"], self.spec.tiers, strict=True):
            tier["prefill"]["replicas"], tier["decode"]["replicas"] = model.initial
            if "model" in tier and isinstance(self.model_of(model).location, HubSource):
                tier["model"].setdefault("revision", DEFAULT_REVISION)
            _resolve_tier(tier, model, vllm=self.spec.engine.type == "vllm", guarded=self.spec.network_policy.enabled)
        return spec


def _resolve_tier(tier: dict[str, Any], model: TierSpec, *, vllm: bool, guarded: bool) -> None:
    """Devices and parallel sizes; only what the rules between fields let a user write, too."""
    claimed = model.kv_transfer.dra is not None and model.kv_transfer.dra.gpu is not None
    if vllm:
        tier.setdefault("parallelism", ParallelismSpec().to_dict())
    else:
        tier["kvTransfer"]["seed"] = model.kv_transfer.seeding(guarded=guarded).to_dict()
    if model.kv_transfer.resource is not None or model.kv_transfer.dra is not None:
        tier["kvTransfer"]["count"] = model.kv_transfer.nics
    own = [(tier["accelerator"], (model.parallelism or ParallelismSpec()).ranks)]
    own += [(tier[role]["accelerator"], model.parallelism_of(role).ranks) for role in ROLES if "accelerator" in tier[role]]
    for device, ranks in own:
        if device["type"] == CPU:
            del device["count"]
            continue
        device["count"] = max(device["count"], ranks)
        if not claimed:
            device.setdefault("resource", DEFAULT_RESOURCE)
