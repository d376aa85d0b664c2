"""What all models of the group share: frozen, camelCase outside, snake_case inside, nothing unknown."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from fleet_api.quantities import CPU_PATTERN, DURATION_PATTERN, QUANTITY_PATTERN, RATIO_PATTERN

TIER_NAME_MAX = 20
GROUP = "inferencefleet.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


def amount_text(value: Any) -> Any:
    """An amount that was written without quotes is an integer in YAML and in JSON; Kubernetes takes both, and so do we."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def int_or_string(digits: int) -> dict[str, Any]:
    """What the schema says beside the pattern, which holds for text alone."""
    return {"x-kubernetes-int-or-string": True, "minimum": 0, "maximum": 10**digits - 1}


DurationText = Annotated[str, Field(pattern=DURATION_PATTERN, max_length=8)]
QuantityText = Annotated[
    str, Field(pattern=QUANTITY_PATTERN, max_length=21, json_schema_extra=int_or_string(15)), BeforeValidator(amount_text)
]
CpuText = Annotated[
    str, Field(pattern=CPU_PATTERN, max_length=11, json_schema_extra=int_or_string(6)), BeforeValidator(amount_text)
]
RatioText = Annotated[str, Field(pattern=RATIO_PATTERN, max_length=5)]

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
LABEL_KEY = r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
LabelMap = Annotated[dict[str, Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$", max_length=63)]],
                     Field(max_length=32)]  # fmt: skip
"""Labels; a structural schema cannot say what a key looks like, so that the API server judges it when a pod is made."""


class ApiModel(BaseModel):
    """Base of every resource model."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a manifest: camelCase, absent instead of null."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Metadata(ApiModel):
    """The part of ObjectMeta that we read; the API server owns its schema, so unknown fields are its business."""

    model_config = ConfigDict(extra="ignore")

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
