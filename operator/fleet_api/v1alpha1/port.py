"""The router's port and its siblings: TLS, and the keys by which pods believe each other. Secrets are mounted by the pods; the
operator never reads them."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from fleet_api.v1alpha1.base import DNS_SUBDOMAIN, ApiModel

SecretName = Annotated[str, Field(pattern=DNS_SUBDOMAIN, max_length=253)]
SecretKey = Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]


class TlsSecretRef(ApiModel):
    """A Secret of type kubernetes.io/tls."""

    name: SecretName = Field(description="Name of the Secret, with the keys tls.crt and tls.key.")


class ClientCaSecretRef(ApiModel):
    """A key of a Secret."""

    name: SecretName = Field(description="Name of the Secret.")
    key: SecretKey = Field(default="ca.crt", description="Key in its data: certificates of CAs as PEM. Default: ca.crt.")


class TlsSpec(ApiModel):
    """TLS at the router's port; plain HTTP stays on port 8081 for probes and scrapes alone."""

    secret_ref: TlsSecretRef = Field(
        description="Certificate and key. A change is taken up within a minute or so, without a restart: by new connections."
    )
    client_ca_secret_ref: ClientCaSecretRef | None = Field(
        default=None, description="Clients need a certificate of one of these CAs (mTLS). Default: they need none."
    )


class GossipKeyRef(ApiModel):
    """A key of a Secret."""

    name: SecretName = Field(description="Name of the Secret.")
    key: SecretKey = Field(
        default="gossip.key",
        description="Key in its data: text of at least 32 characters. To change it put the new one on a second line, later "
        "first, then remove the old one. Default: gossip.key.",
    )


class GossipSpec(ApiModel):
    """Router pods tell each other how busy workers are, which prefixes were sent where and what tenants have used, in signed
    UDP datagrams to port 8082."""

    key_secret_ref: GossipKeyRef = Field(
        description="What datagrams are signed with. With gossip a tenant's quotas hold over all router pods, but for what each "
        "of the others admits between two rounds, at most its burst; without it each router pod counts alone, so that with N of "
        "them a tenant has up to N times its quota."
    )


PEER_KEY: Final = "key"


class PeerKeyRef(ApiModel):
    """A key of a Secret."""

    name: SecretName = Field(description="Name of the Secret.")
    key: SecretKey = Field(
        default=PEER_KEY,
        description="Key in its data: text of at least 32 characters, as for routing.gossip.keySecretRef. Default: key.",
    )


class PeerKeySpec(ApiModel):
    """The key by which the pods of this fleet know each other."""

    secret_ref: PeerKeyRef = Field(
        description="Where it is. The Secret may be made later; until then gossip of several routers and hot "
        "prefixes for new workers are off, and torch workers give KV to whoever reaches them."
    )
