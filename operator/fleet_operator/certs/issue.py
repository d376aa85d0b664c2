"""Certificates made and read with `cryptography`: ECDSA P-256, as small and as plain as TLS allows."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleet_operator.certs.plan import BACKDATED_S, Certificate, Lifetimes, Stock, Work

AUTHORITY = "inferencefleet webhook CA"


@dataclass(frozen=True, slots=True)
class Material:
    """PEM of everything. The authorities' bundle is oldest first; `authority_key` belongs to the last one."""

    bundle: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Material(***)"


class UnusableError(ValueError):
    """The stored material is no set of certificates with their keys."""


def read(material: Material) -> Stock:
    """The stock; UnusableError when certificates or keys do not parse or do not belong together."""
    try:
        authorities = x509.load_pem_x509_certificates(material.bundle)
        serving = x509.load_pem_x509_certificate(material.certificate)
        signer, own = (serialization.load_pem_private_key(pem, None) for pem in (material.authority_key, material.key))
        if _identity(signer.public_key()) != _identity(authorities[-1].public_key()):
            raise UnusableError("the authority's key is another one's")
        if not isinstance(signer, ec.EllipticCurvePrivateKey):
            raise UnusableError("the authority's key is not ours")
        if _identity(own.public_key()) != _identity(serving.public_key()):
            raise UnusableError("the serving key is another one's")
        known = {_identity(authority.public_key()): authority for authority in authorities}
        return Stock(tuple(_summary(one, known) for one in authorities), _summary(serving, known))
    except UnusableError:
        raise
    except Exception as error:  # whatever a parser says about bytes that anybody may have put there
        raise UnusableError(str(error) or type(error).__name__) from error


def carry_out(work: Work, material: Material | None, names: frozenset[str], now: float, life: Lifetimes) -> Material:
    """The material after one step."""
    if work.step == "everything" or material is None:
        authority, signer = _authority(now, life)
        certificate, key = _serving(authority, signer, names, now, life)
        return Material(_pem([authority]), _key_pem(signer), _pem([certificate]), _key_pem(key))
    authorities = x509.load_pem_x509_certificates(material.bundle)
    if work.step == "authority":
        authority, signer = _authority(now, life)
        return Material(_pem([*authorities[-1:], authority]), _key_pem(signer), material.certificate, material.key)
    if work.step == "prune":
        return Material(_pem(authorities[-1:]), material.authority_key, material.certificate, material.key)
    signing_key = serialization.load_pem_private_key(material.authority_key, None)
    if not isinstance(signing_key, ec.EllipticCurvePrivateKey):
        raise UnusableError("the authority's key is not ours")
    certificate, key = _serving(authorities[-1], signing_key, names, now, life)
    return Material(material.bundle, material.authority_key, _pem([certificate]), _key_pem(key))


def _summary(certificate: x509.Certificate, known: dict[str, x509.Certificate]) -> Certificate:
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = {str(name.value) for name in alternatives}
    except x509.ExtensionNotFound:
        names = set()
    return Certificate(
        key=_identity(certificate.public_key()),
        issuer=next((key for key, authority in known.items() if _signed(certificate, authority)), ""),
        not_before=certificate.not_valid_before_utc.timestamp(),
        not_after=certificate.not_valid_after_utc.timestamp(),
        names=frozenset(names),
    )


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # the library raises one of several for "no"
        return False
    return True


def _authority(now: float, life: Lifetimes) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # its own name each time: two authorities with one name and two keys confuse those who verify
    unique = _identity(key.public_key())[:12]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{AUTHORITY} {unique}")])
    builder = _builder(name, name, key, now, life.authority_s)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return builder.sign(key, hashes.SHA256()), key


def _serving(
    authority: x509.Certificate, signer: ec.EllipticCurvePrivateKey, names: frozenset[str], now: float, life: Lifetimes
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "inferencefleet webhook")])
    builder = _builder(subject, authority.subject, key, now, life.serving_s)
    builder = builder.add_extension(x509.SubjectAlternativeName([_name(name) for name in sorted(names)]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return builder.add_extension(issuer_key, critical=False).sign(signer, hashes.SHA256()), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: float, life_s: float
) -> x509.CertificateBuilder:
    made = datetime.fromtimestamp(now, UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(made - timedelta(seconds=BACKDATED_S))
        .not_valid_after(made + timedelta(seconds=life_s))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _identity(key: object) -> str:
    raw = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return hashlib.sha256(raw).hexdigest()


def _pem(certificates: Iterable[x509.Certificate]) -> bytes:
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
