"""TLS of the gRPC port, by what the router's own port serves: the same certificates at the same time, checked in one place."""

from __future__ import annotations

from typing import Any

import grpc

from fleet_router.tls import Certificates, Pem


def credentials(certificates: Certificates) -> Any:
    """gRPC asks for them at every handshake, in a thread of its own."""
    served = certificates.current.pem

    def changed() -> Any:
        """A new pair; None: the old one holds."""
        nonlocal served
        now = certificates.current.pem
        if now is served:
            return None
        served = now
        return _pair(now)

    return grpc.dynamic_ssl_server_credentials(_pair(served), changed, require_client_authentication=served.client_ca is not None)


def _pair(pem: Pem) -> Any:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.client_ca)
