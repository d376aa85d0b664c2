"""Who may ask a fleet for what: SLO classes and tenants."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleet_api.v1alpha1.base import DNS_LABEL, DNS_SUBDOMAIN, ApiModel
from fleet_api.v1alpha1.routing import LatencySpec, Tokens


class ClassSloSpec(ApiModel):
    """The objective of a class."""

    ttft: LatencySpec = Field(
        description="Time to the first token. It bounds the queue, and a request that waited 0.85 of it is answered 503."
    )


class SloClassSpec(ApiModel):
    """A class of requests."""

    name: Annotated[str, Field(pattern=DNS_LABEL, max_length=63)] = Field(
        description="Tenants have a class, requests name one with the header x-slo-class. default: requests that name none."
    )
    priority: Annotated[int, Field(ge=-1000, le=1000)] = Field(
        default=0, description="Of the requests that wait, those of the highest priority go first. Default: 0."
    )
    slo: ClassSloSpec | None = Field(default=None, description="Objective of the class. Default: that of the fleet.")
    max_input_tokens: Tokens | None = Field(
        default=None, description="Longest prompt of the class, at most limits.maxInputTokens. Default: that."
    )
    max_output_tokens: Tokens | None = Field(
        default=None,
        description="Most tokens that a request of the class may generate, at most limits.maxOutputTokens. Default: that.",
    )


class TenantsSecretRef(ApiModel):
    """A key of a Secret of the fleet's namespace; the routers mount it, the operator never reads it."""

    name: Annotated[str, Field(pattern=DNS_SUBDOMAIN, max_length=253)] = Field(description="Name of the Secret.")
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = Field(
        default="tenants.json",
        description="Key in its data: tenants with hashes of their API keys, as JSON. Default: tenants.json.",
    )


class TenantsSpec(ApiModel):
    """Who may ask. With it every request needs an API key."""

    secret_ref: TenantsSecretRef = Field(description="Where tenants, their keys' hashes, quotas and rights are.")
