"""Where the pods of a tier go, relative to each other and to everybody else, and who must let them in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleet_api.v1alpha1.base import DNS_LABEL, LABEL_KEY, ApiModel


class GangSpec(ApiModel):
    """Where the pods of one worker go that spans several nodes."""

    topology_key: Annotated[str, Field(pattern=LABEL_KEY, max_length=317)] = Field(
        description="Node label whose value names a domain, e.g. topology.kubernetes.io/rack."
    )
    policy: Literal["preferred", "required", "exclusive"] = Field(
        default="required",
        description="required: all pods of a worker in one domain; exclusive: and no other worker's pods in it; preferred: where "
        "possible. Default: required.",
    )


class PlacementSpec(ApiModel):
    """Where workers go, and who lets them in."""

    topology_key: Annotated[str, Field(pattern=LABEL_KEY, max_length=317)] | None = Field(
        default=None,
        description="Workers of the tier near each other, so that KV takes a short way: node label whose value names a domain, "
        "e.g. topology.kubernetes.io/rack. Default: none.",
    )
    policy: Literal["preferred", "required"] = Field(
        default="preferred",
        description="required: all workers of the tier in one domain, or unschedulable; preferred: where possible. "
        "Default: preferred.",
    )
    exclusive: bool = Field(
        default=False, description="true: no worker of another tier or fleet shares the domain. Default: false."
    )
    gang: GangSpec | None = Field(
        default=None, description="The pods of one worker relative to each other, when it spans several nodes. Default: anywhere."
    )
    queue: Annotated[str, Field(pattern=DNS_LABEL, max_length=63)] | None = Field(
        default=None,
        description="Kueue LocalQueue that admits the workers, each with all of its pods or not at all; until then they are "
        "gated. Default: none.",
    )
    pod_group: Literal["coscheduling", "volcano", "kubernetes"] | None = Field(
        default=None,
        description="Scheduler that places the pods of a worker all or none, and is told by a PodGroup: coscheduling of "
        "scheduler-plugins (name it in podTemplate.schedulerName), volcano, or kubernetes (feature GangScheduling). Default: "
        "none; a worker that gets only some of its nodes gives them back after scaling.capacityWait.",
    )
