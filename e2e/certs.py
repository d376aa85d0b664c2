"""Certificates for tests: a CA, and leaves for servers and clients."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOUR = datetime.timedelta(hours=1)
NOW = datetime.timedelta()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _write(path: Path, data: bytes) -> Path:
    """As a kubelet does it: nobody reads half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    return fresh.rename(path)


class Authority:
    """A CA whose files are in `folder`."""

    def __init__(self, folder: Path, name: str, later: datetime.timedelta = NOW) -> None:
        self.folder, self._key, self._name = folder, ec.generate_private_key(ec.SECP256R1()), _name(name)
        self._ski = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        self._cert = (
            self._builder(self._name, self._key.public_key(), later)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._ski, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.file = _write(folder / f"{name}.ca.pem", self.pem)

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return self._cert.public_bytes(serialization.Encoding.PEM)

    def revoked(self) -> bytes:
        """A list of revoked certificates, which is empty."""
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateRevocationListBuilder().issuer_name(self._name).last_update(now).next_update(now + HOUR)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, later: datetime.timedelta = NOW
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC) + later
        return (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
            .serial_number(x509.random_serial_number()).not_valid_before(now - HOUR).not_valid_after(now + HOUR)
        )  # fmt: skip

    def leaf(self, name: str, *addresses: str, to: str = "", later: datetime.timedelta = NOW) -> tuple[Path, Path]:
        """(certificate, key) files for IP addresses and DNS names; `to`: another file name than `name`; `later`: than now."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_general(address) for address in addresses])
        builder = self._builder(_name(name), key.public_key(), later).add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._ski), critical=False
        )
        cert = (builder.add_extension(names, critical=False) if addresses else builder).sign(self._key, hashes.SHA256())
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )  # fmt: skip
        file = self.folder / (to or name)
        return (
            _write(file.with_suffix(".crt"), cert.public_bytes(serialization.Encoding.PEM)),
            _write(file.with_suffix(".key"), secret),
        )
