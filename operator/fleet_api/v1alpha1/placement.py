"""Where the pods of a tier go, relative to each other and to everybody else."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleet_api.v1alpha1.base import LABEL_KEY, ApiModel


class PlacementSpec(ApiModel):
    """Workers of a tier near each other, so that KV takes a short way."""

    topology_key: Annotated[str, Field(pattern=LABEL_KEY, max_length=317)] = Field(
        description="Node label whose value names a domain, e.g. topology.kubernetes.io/rack."
    )
    policy: Literal["preferred", "required"] = Field(
        default="preferred",
        description="required: all workers of the tier in one domain, or unschedulable; preferred: where possible. "
        "Default: preferred.",
    )
    exclusive: bool = Field(
        default=False, description="true: no worker of another tier or fleet shares the domain. Default: false."
    )
