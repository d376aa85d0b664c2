"""What the operator reports: status of a fleet and of a worker pool."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, computed_field, model_validator

from fleet_api.quantities import format_ratio
from fleet_api.v1alpha1.base import ApiModel

ConditionStatus = Literal["True", "False", "Unknown"]
Count = Annotated[int, Field(ge=0)]
Cost = Annotated[float, Field(ge=0.0)]


class Condition(ApiModel):
    """One observation, as in metav1.Condition."""

    type: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="What was observed, e.g. Ready.")
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=128)] = Field(
        description="Why, in one CamelCase word."
    )
    message: Annotated[str, Field(max_length=4096)] = Field(default="", description="Why, in a sentence.")
    observed_generation: Count = Field(default=0, description="The metadata.generation that this is about.")
    last_transition_time: Annotated[str, Field(max_length=40)] = Field(
        default="", description="When status last changed, RFC 3339 in UTC."
    )


class RoleStatus(ApiModel):
    """Workers of one role."""

    desired: Count = Field(default=0, description="Workers that should be there.")
    ready: Count = Field(default=0, description="Workers whose pod is Ready.")
    serving: Count = Field(default=0, description="Workers that the router may use.")
    flipping: Count = Field(default=0, description="Workers on their way into this role from the other one.")


class KvStatus(ApiModel):
    """What moved between prefill and decode workers, from the engines' own counters."""

    transfers: Count = Field(default=0, description="KV hand-offs that decode workers finished.")
    blocks: Count = Field(default=0, description="KV blocks received.")
    bytes: Count = Field(default=0, description="Bytes received.")
    failed: Count = Field(default=0, description="Hand-offs that failed.")
    transport: str | None = Field(default=None, description="Transport in use, as the workers report it.")


class RolloutStatus(ApiModel):
    """Where a tier stands between two revisions."""

    stable: str = Field(default="", description="The revision that was last rolled out to its end.")
    previous: str | None = Field(
        default=None, description="The one that was so before it, which `fleet rollout undo` returns to; absent: none is known."
    )
    target: str = Field(default="", description="The revision that is being rolled out; absent at rest.")
    step: Count = Field(default=0, description="Canary steps that are passed.")
    step_since: str = Field(default="", description="When the present canary step began to serve, RFC 3339 in UTC.")
    percent: Count | None = Field(default=None, description="Share of the requests that the canary gets now.")
    progress: str = Field(default="", description="Workers of the new and of the old revisions.")
    progress_since: str = Field(default="", description="When that last changed, RFC 3339 in UTC.")
    requests_before: Count | None = Field(
        default=None,
        description="Requests that routers had counted of the target before its rollout; absent: none. Those since judge it.",
    )
    errors_before: Count | None = Field(default=None, description="Those of them that failed; absent: none.")
    failed: str = Field(default="", description="The revision that was rolled back; it is not tried again.")
    message: str = Field(default="", description="Why it was rolled back, or what the rollout waits for.")


class FlipStatus(ApiModel):
    """The last role flip that failed; absent when the next one may be tried, or `role` is not needed any more."""

    failed_at: Annotated[str, Field(max_length=40)] = Field(description="When, RFC 3339 in UTC.")
    message: str = Field(default="", description="The worker and why.")
    role: Literal["", "prefill", "decode"] = Field(
        default="", description="Of a worker that said another role than its label and was replaced for it: the label's."
    )


class ReplacedStatus(ApiModel):
    """A worker that is replaced because no KV moved between it and others."""

    worker: str = Field(description="Name of its pod, or of its leader.")
    uid: Annotated[str, Field(max_length=64)] = Field(description="Its uid.")
    at: Annotated[str, Field(max_length=40)] = Field(description="When that was decided, RFC 3339 in UTC.")
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="Why.")


class HealingStatus(ApiModel):
    """What was replaced in the last hour. Written before anything is deleted, so that no restart of the operator forgets it."""

    replaced: Annotated[tuple[ReplacedStatus, ...], Field(max_length=32)] = Field(default=(), description="Oldest first.")


class ZeroStatus(ApiModel):
    """A tier without workers, or on its way back."""

    state: Literal["AtZero", "Waking"] = Field(description="AtZero: no workers. Waking: some are wanted, none serves yet.")
    since: Annotated[str, Field(max_length=40)] = Field(description="When that began, RFC 3339 in UTC.")


class TierStatus(ApiModel):
    """One tier."""

    name: str = Field(description="Name of the tier.")
    prefill: RoleStatus = Field(default=RoleStatus(), description="Prefill workers.")
    decode: RoleStatus = Field(default=RoleStatus(), description="Decode workers.")
    ratio: str = Field(default="", description="Serving prefill:decode in lowest terms.")
    cost_per_hour: Cost | None = Field(
        default=None, description="What the devices that its workers hold cost now, an hour; absent without cost.perGpuHour."
    )
    revision: str = Field(default="", description="Revision of the pod template that serves.")
    rollout: RolloutStatus | None = Field(default=None, description="The rollout; absent before the first worker.")
    flip: FlipStatus | None = Field(default=None, description="The last role flip that failed; no other is tried for a while.")
    healing: HealingStatus | None = Field(
        default=None, description="Workers that were replaced because no KV moved; absent: none."
    )
    zero: ZeroStatus | None = Field(default=None, description="Scale to zero; absent while workers serve.")
    starting_since: Annotated[str, Field(max_length=40)] | None = Field(
        default=None,
        description="Since when this revision comes up in a tier that has never served, RFC 3339 in UTC; absent: it has served.",
    )
    kv: KvStatus | None = Field(default=None, description="KV moved between the roles; absent before the first reading.")


class AdapterStatus(ApiModel):
    """One adapter of the spec."""

    name: str = Field(description="Name of the adapter.")
    desired: Count = Field(default=0, description="Workers that should have it.")
    loaded: Count = Field(default=0, description="Workers that have it as the spec says.")
    digest: str = Field(default="", description="sha256 over the files that most workers loaded; empty: none has.")
    reason: str = Field(default="", description="Why a worker does not have it, in one word; empty: all have, or are loading it.")
    message: str = Field(default="", description="The same in a sentence, with the worker's name.")


class FleetSummary(ApiModel):
    """Totals over all tiers, for `kubectl get`."""

    prefill: str = Field(default="", description="Desired/serving prefill workers.")
    decode: str = Field(default="", description="Desired/serving decode workers.")
    ratio: str = Field(default="", description="Serving prefill:decode in lowest terms.")


class FleetStatus(ApiModel):
    """Status of an InferenceFleet."""

    observed_generation: Count = Field(default=0, description="The metadata.generation that this status is about.")
    endpoint: str | None = Field(default=None, description="Base URL of the router inside the cluster.")
    authentication: Literal["open", "keys"] | None = Field(
        default=None, description="open: whoever reaches the router may ask. keys: API keys of spec.tenants are needed."
    )
    tiers: tuple[TierStatus, ...] = Field(default=(), description="Each tier.")
    cost_per_hour: Cost | None = Field(
        default=None,
        description="What all devices that the workers hold cost now, an hour; absent while that of some of them is unknown: its "
        "tier has no cost.perGpuHour, or left the spec with none.",
    )
    adapters: tuple[AdapterStatus, ...] = Field(default=(), description="Each adapter of the spec.")
    conditions: tuple[Condition, ...] = Field(default=(), description="What was observed.")
    resolved: dict[str, Any] | None = Field(
        default=None,
        description="The spec with every default filled in; leftOut instead, with its size, where that is beyond 256 KiB.",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_summary(cls, data: Any) -> Any:
        """The summary is computed, never read."""
        return {key: value for key, value in data.items() if key != "summary"} if isinstance(data, dict) else data

    @computed_field(description="Totals over all tiers.")
    def summary(self) -> FleetSummary:
        """Totals over all tiers."""
        prefill = [tier.prefill for tier in self.tiers]
        decode = [tier.decode for tier in self.tiers]
        return FleetSummary(
            prefill=_desired_serving(prefill),
            decode=_desired_serving(decode),
            ratio=format_ratio(sum(role.serving for role in prefill), sum(role.serving for role in decode)),
        )

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


class PoolStatus(ApiModel):
    """Status of a WorkerPool."""

    replicas: Count = Field(default=0, description="Worker pods that exist.")
    ready_replicas: Count = Field(default=0, description="Worker pods that are Ready.")
    serving_replicas: Count = Field(default=0, description="Worker pods that the router may use.")
    terminating_replicas: Count = Field(default=0, description="Worker pods that are leaving.")
    selector: str = Field(default="", description="Label selector of the pods, for autoscalers.")
    conditions: tuple[Condition, ...] = Field(default=(), description="What was observed.")


def _desired_serving(roles: list[RoleStatus]) -> str:
    return f"{sum(role.desired for role in roles)}/{sum(role.serving for role in roles)}"
