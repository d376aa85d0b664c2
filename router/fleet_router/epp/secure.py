"""TLS of the gRPC port, by the files of the router's own: a new pair holds for connections from then on, a bad one is none."""

from __future__ import annotations

from typing import Any

import grpc

from fleet_router.tls import TlsError, TlsFiles, context_of, stamp_of


def credentials(files: TlsFiles) -> Any:
    """gRPC asks for them at every handshake, in a thread of its own. TlsError when there is no usable pair at first."""
    seen, first = stamp_of(files), _pair(files)

    def changed() -> Any:
        """A new pair; None: the old one holds."""
        nonlocal seen
        stamp = stamp_of(files)
        if stamp == seen:
            return None
        try:
            found = _pair(files)
        except TlsError:
            return None  # a key that is written after its certificate: looked at again
        seen = stamp
        return found

    return grpc.dynamic_ssl_server_credentials(first, changed, require_client_authentication=files.client_ca is not None)


def _pair(files: TlsFiles) -> Any:
    context_of(files)  # says what is wrong, by the file's name
    try:
        ca = files.client_ca.read_bytes() if files.client_ca is not None else None
        return grpc.ssl_server_certificate_configuration(
            [(files.key.read_bytes(), files.cert.read_bytes())], root_certificates=ca
        )
    except OSError as error:
        raise TlsError(f"{error.filename}: {error.strerror}") from error
