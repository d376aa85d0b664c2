"""TLS by files: certificate, key, and the CA of clients where these need a certificate. Read again when any of them changes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files."""

    cert: Path
    """Certificate, and those between it and the CA."""
    key: Path
    """Without a password."""
    client_ca: Path | None = None
    """Clients need a certificate of one of these; None: they need none."""


class TlsError(Exception):
    """The files are missing or do not fit together; the message names the file, never what is in it."""


class Certified(ssl.SSLContext):
    """A context, and until when its certificate is good: clients refuse it from then on."""

    expires_at: float | None = None
    """Unix seconds; None: not known."""

    def lines(self) -> Iterable[str]:
        """Prometheus text."""
        if self.expires_at is not None:
            yield "# TYPE fleet_router_certificate_expires_timestamp_seconds gauge"
            yield f"fleet_router_certificate_expires_timestamp_seconds {self.expires_at:.0f}"


def context_of(files: TlsFiles) -> Certified:
    """A new one each time: sessions of an older context are not resumed under this one."""
    context = Certified(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
        context.expires_at = expires_at(files.cert.read_bytes())
    except (OSError, ValueError) as error:
        raise TlsError(f"{files.cert} and {files.key}: {_why(error)}") from error
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ValueError) as error:
            raise TlsError(f"{files.client_ca}: {_why(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def expires_at(pem: bytes) -> float | None:
    """Unix seconds at which the first certificate of a file ends. None where the library does not read what OpenSSL serves: a
    figure keeps nobody from serving. It costs memory, which routers without TLS save."""
    from cryptography.x509 import InvalidVersion, load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    except (ValueError, InvalidVersion):
        return None


async def follow_tls(
    files: TlsFiles, seen: object, apply: Callable[[Certified], Awaitable[None]], failed: Callable[[str], None]
) -> None:
    """`apply` every new version, `failed` with every problem; the last good one stays in force. `seen`: what `stamp_of` said
    before they were read."""
    while True:
        await asyncio.sleep(POLL_S)
        stamp = stamp_of(files)
        if stamp == seen:
            continue
        try:
            await apply(context_of(files))
        except TlsError as error:
            failed(f"tls: {error}")  # a key that is written after its certificate: looked at again
        except OSError as error:
            failed(f"tls: new certificates cannot be served: {error.strerror or type(error).__name__}")
        else:
            seen = stamp


def stamp_of(files: TlsFiles) -> object:
    """Changes when a file does."""
    return tuple(_stamp(file) for file in (files.cert, files.key, files.client_ca) if file is not None)


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _no_password() -> str:
    raise ValueError("the key has a password")


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
