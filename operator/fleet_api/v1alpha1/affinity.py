"""Affinity as Kubernetes has it, bounded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleet_api.v1alpha1.base import LABEL_KEY, ApiModel, LabelMap

LabelValue = Annotated[str, Field(max_length=63)]
Key = Annotated[str, Field(pattern=LABEL_KEY, max_length=317)]
Values = Annotated[tuple[LabelValue, ...], Field(max_length=16)]
Weight = Annotated[int, Field(ge=1, le=100)]


class NodeRequirement(ApiModel):
    """What a node's label must be."""

    key: Key = Field(description="Label.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = Field(description="How it is compared.")
    values: Values = Field(default=(), description="With what; none for Exists and DoesNotExist.")


class NodeTerm(ApiModel):
    """All of these."""

    match_expressions: Annotated[tuple[NodeRequirement, ...], Field(min_length=1, max_length=8)] = Field(
        description="Requirements, all of them."
    )


class PreferredNodeTerm(ApiModel):
    """A wish with a weight."""

    weight: Weight = Field(description="1 to 100.")
    preference: NodeTerm = Field(description="What is wished.")


class NodeSelectorTerms(ApiModel):
    """One of these terms."""

    node_selector_terms: Annotated[tuple[NodeTerm, ...], Field(min_length=1, max_length=8)] = Field(
        description="Terms, one of them."
    )


class NodeAffinity(ApiModel):
    """Which nodes."""

    required_during_scheduling_ignored_during_execution: NodeSelectorTerms | None = Field(default=None, description="Must hold.")
    preferred_during_scheduling_ignored_during_execution: Annotated[tuple[PreferredNodeTerm, ...], Field(max_length=8)] = Field(
        default=(), description="Should hold."
    )


class LabelRequirement(ApiModel):
    """What a pod's label must be."""

    key: Key = Field(description="Label.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="How it is compared.")
    values: Values = Field(default=(), description="With what; none for Exists and DoesNotExist.")


class LabelSelector(ApiModel):
    """Pods by their labels."""

    match_labels: LabelMap = Field(default={}, description="Labels, all of them.")
    match_expressions: Annotated[tuple[LabelRequirement, ...], Field(max_length=8)] = Field(
        default=(), description="Requirements, all of them."
    )


class PodTerm(ApiModel):
    """Pods in a topology domain."""

    label_selector: LabelSelector = Field(description="Which pods of the namespace.")
    topology_key: Key = Field(description="Node label that names the domain.")


class PreferredPodTerm(ApiModel):
    """A wish with a weight."""

    weight: Weight = Field(description="1 to 100.")
    pod_affinity_term: PodTerm = Field(description="What is wished.")


class PodTerms(ApiModel):
    """Near to, or far from, these pods."""

    required_during_scheduling_ignored_during_execution: Annotated[tuple[PodTerm, ...], Field(max_length=8)] = Field(
        default=(), description="Must hold."
    )
    preferred_during_scheduling_ignored_during_execution: Annotated[tuple[PreferredPodTerm, ...], Field(max_length=8)] = Field(
        default=(), description="Should hold."
    )


class AffinitySpec(ApiModel):
    """Nodes and neighbours."""

    node_affinity: NodeAffinity | None = Field(default=None, description="Which nodes.")
    pod_affinity: PodTerms | None = Field(default=None, description="Near which pods.")
    pod_anti_affinity: PodTerms | None = Field(default=None, description="Far from which pods.")
