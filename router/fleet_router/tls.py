"""TLS by files: certificate, key, and the CA of clients where these need a certificate. Read again when any of them changes.

Files that are half-written, empty, not of one pair, or good at another time never take the place of good ones: what is served
goes on, the log says so once, and `fleet_router_certificate_outdated` is 1 while that is so.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

POLL_S = 1.0
END: Final = b"-----END "
BEGIN: Final = b"-----BEGIN "
BEGINS: Final = BEGIN + b"CERTIFICATE-----"
Term = tuple[float, float]
"""Unix seconds from when and until when a certificate is good."""


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


@dataclass(frozen=True, slots=True)
class Pem:
    """What the files held when they were read."""

    cert: bytes
    key: bytes
    client_ca: bytes | None


class Certified(ssl.SSLContext):
    """A context, what it was made of, and until when its certificate is good: clients refuse it from then on."""

    expires_at: float | None = None
    """Unix seconds; None: not known."""
    begins_at: float | None = None
    pem: Pem = Pem(b"", b"", None)
    """For the gRPC port, which has contexts of its own."""

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
    before = stamp_of(files)
    pem = context.pem = _read(files)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise TlsError(f"{files.cert} and {files.key}: {_why(error)}") from error
    if (term := term_of(pem.cert)) is not None:
        context.begins_at, context.expires_at = term
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ValueError) as error:
            raise TlsError(f"{files.client_ca}: {_why(error)}") from error
        if not context.cert_store_stats()["x509"]:  # OpenSSL is content with a list of revoked ones
            raise TlsError(f"{files.client_ca}: no certificate is in it")
        context.verify_mode = ssl.CERT_REQUIRED
    if stamp_of(files) != before:
        raise TlsError(f"{files.cert.parent}: files changed while they were read")
    return context


def _read(files: TlsFiles) -> Pem:
    found: list[bytes] = []
    for file in (files.cert, files.key, files.client_ca):
        try:
            found.append(b"" if file is None else file.read_bytes())
        except OSError as error:
            raise TlsError(f"{file}: {_why(error)}") from error
        if file is not None and is_cut(found[-1]):
            raise TlsError(f"{file}: it ends in the middle of a certificate or a key")
    return Pem(found[0], found[1], None if files.client_ca is None else found[2])


def is_cut(pem: bytes) -> bool:
    """Half of a PEM file: OpenSSL passes over a last certificate of which there is not even a first line."""
    last = pem.rstrip().rpartition(b"\n")[2]
    return pem.count(BEGIN) != pem.count(END) or (bool(last) and BEGINS.startswith(last))


def term_of(pem: bytes) -> Term | None:
    """Of the first certificate of a file. None where the library does not read what OpenSSL serves: a figure keeps nobody from
    serving. It costs memory, which routers without TLS save."""
    from cryptography.x509 import InvalidVersion, load_pem_x509_certificate

    try:
        found = load_pem_x509_certificate(pem)
        return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    except (ValueError, InvalidVersion):
        return None


def untimely(context: Certified, files: TlsFiles, now: float) -> str:
    """Why these are not good at this time (Unix seconds); empty: they are. Of several CAs one is enough. An old certificate
    between ours and the CA is no fault: clients may know another way."""
    if context.begins_at is not None and context.expires_at is not None:
        term = (context.begins_at, context.expires_at)
        if why := _outside(term, now):
            return f"{files.cert}: {why}"
    # as bytes: in Python's words one text that is no UTF-8 is an error, where OpenSSL takes the certificate
    terms = [term_of(ssl.DER_cert_to_PEM_cert(one).encode()) for one in context.get_ca_certs(binary_form=True)]
    bad = [why for term in terms if term is not None and (why := _outside(term, now))]
    return f"{files.client_ca}: {bad[0]}" if bad and len(bad) == len(terms) else ""


def _outside(term: Term, now: float) -> str:
    begins_at, ends_at = term
    if begins_at <= now <= ends_at:
        return ""
    what, at = ("valid from", begins_at) if now < begins_at else ("expired", ends_at)
    return f"{what} {datetime.fromtimestamp(at, UTC).isoformat(timespec='seconds')}"


class Certificates:
    """Those of one router. `clock`: Unix seconds, which is what certificates go by."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.time) -> None:
        self._files, self._clock = files, clock
        self._seen: object = None
        """Which versions of the files are served."""
        self._found: object = None
        """Which versions were there at the last look."""
        self.current = Certified(ssl.PROTOCOL_TLS_SERVER)
        """What is served."""
        self.outdated = False
        """What is on disk is something else."""

    def begin(self) -> Certified:
        """The first ones, whatever their dates: there are no better ones. TlsError."""
        seen = stamp_of(self._files)  # before they are read: what comes later is read again
        self.current = context_of(self._files)
        self._seen = self._found = seen
        return self.current

    async def follow(self, apply: Callable[[Certified], Awaitable[None]], failed: Callable[[str], None]) -> None:
        """`apply` every new version, `failed` with every problem, the same one again each time; the last good one stays."""
        while True:
            await asyncio.sleep(POLL_S)
            await self._look(apply, failed)

    async def _look(self, apply: Callable[[Certified], Awaitable[None]], failed: Callable[[str], None]) -> None:
        stamp, before = stamp_of(self._files), self._found
        self._found = stamp
        self.outdated = stamp != self._seen
        if not self.outdated or stamp != before:
            return  # who is still writing is waited for: half of a chain may look like a whole one
        try:
            found = context_of(self._files)
            self._refuse_untimely(found)
            await apply(found)
        except TlsError as error:
            failed(f"tls: {error}")  # a key that is written after its certificate: looked at again
        except OSError as error:
            failed(f"tls: new certificates cannot be served: {error.strerror or type(error).__name__}")
        else:
            self.current, self._seen, self.outdated = found, stamp, False

    def _refuse_untimely(self, found: Certified) -> None:
        """Unless what is served is no good either."""
        now = self._clock()
        if (why := untimely(found, self._files, now)) and not untimely(self.current, self._files, now):
            raise TlsError(f"{why}; the last good ones are served")

    def lines(self) -> Iterable[str]:
        """Prometheus text."""
        yield from self.current.lines()
        yield "# TYPE fleet_router_certificate_outdated gauge"
        yield f"fleet_router_certificate_outdated {int(self.outdated)}"


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
