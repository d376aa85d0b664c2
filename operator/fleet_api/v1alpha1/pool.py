"""WorkerPool: the workers of one role of one tier at one revision; made by the operator, scaled by anybody."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleet_api.v1alpha1.base import DNS_LABEL, TIER_NAME_MAX, ApiModel, Metadata
from fleet_api.v1alpha1.status import PoolStatus
from fleet_api.v1alpha1.tier import Role


class PoolSpec(ApiModel):
    """What the operator wants of one role."""

    fleet: Annotated[str, Field(min_length=1, max_length=63)] = Field(description="The InferenceFleet of this pool.")
    tier: Annotated[str, Field(pattern=DNS_LABEL, max_length=TIER_NAME_MAX)] = Field(description="The tier of the fleet.")
    role: Role = Field(description="prefill or decode.")
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")] = Field(description="Hash of the pod template.")
    replicas: Annotated[int, Field(ge=0, le=1000)] = Field(
        description="Workers of this pool. Changed through /scale, the operator obeys within bounds and ratio of the tier."
    )


class WorkerPool(ApiModel):
    """The workers of one role of one tier at one revision. The operator makes pools; use /scale to size them."""

    api_version: Literal["inferencefleet.io/v1alpha1"] = "inferencefleet.io/v1alpha1"
    kind: Literal["WorkerPool"] = "WorkerPool"
    metadata: Metadata
    spec: PoolSpec
    status: PoolStatus = PoolStatus()
