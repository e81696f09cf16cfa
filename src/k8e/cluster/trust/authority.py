"""A certificate authority of a cluster, and the certificates that it issues: P-256, made when it is first opened.

    ca.crt   public
    ca.key   root's alone; written last: without it there is no authority yet

A cluster has several, because each is believed in one place only. What etcd believes is not what a node has: a node's
certificate opens no etcd, and one that it serves with cannot pretend to be the API server.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from k8e.cluster.errors import ClusterError
from k8e.damage import Damaged, read_own
from k8e.identity.authority import replace_file

DAY: Final = 86_400.0
AUTHORITY_LIFE: Final = 20 * 365 * DAY
LEAF_LIFE: Final = 30 * DAY
_SKEW: Final = 300.0  # for programs whose clock is behind


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate as a program needs it. Kubernetes takes the user and groups from it; one with hosts is for a
    server, too."""

    user: str
    groups: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def subject(self) -> x509.Name:
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in self.groups]
        return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, self.user)])

    @property
    def names(self) -> list[x509.GeneralName]:
        return [_read_host(host) for host in self.hosts]


class Authority:
    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)
        # Of the whole certificate: a token contains it, and a machine that joins believes no other.
        self.fingerprint = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()

    @property
    def key(self) -> bytes:
        return write_key(self._key)

    @classmethod
    def make(cls, name: str, now: float) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = Leaf(name).subject
        builder = _begin(subject, key.public_key(), now, now + AUTHORITY_LIFE, authority=True).issuer_name(subject)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def open(cls, folder: Path, name: str, now: float) -> Self:
        """Opens the authority in a folder; makes it the first time."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        certificate_file, key_file = folder / "ca.crt", folder / "ca.key"
        if not os.path.lexists(key_file):
            made = cls.make(name, now)
            replace_file(certificate_file, made.certificate, 0o644)
            replace_file(key_file, made.key, 0o600)
        try:
            key = serialization.load_pem_private_key(read_own(key_file), None)
            certificate = x509.load_pem_x509_certificate(read_own(certificate_file))
        except (Damaged, ValueError, TypeError, OSError) as error:
            raise _unusable(folder, str(error)) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise _unusable(folder, f"{certificate_file} and {key_file} do not belong together")
        return cls(certificate, key)

    def issue(self, leaf: Leaf, now: float, life: float = LEAF_LIFE) -> bytes:
        """Returns a certificate with its key (PEM); a server's has the authority behind it, so that a client that knows
        only the fingerprint finds it there."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _begin(leaf.subject, key.public_key(), now, now + life).issuer_name(self._certificate.subject)
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if leaf.hosts:
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
            builder = builder.add_extension(x509.SubjectAlternativeName(leaf.names), False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = builder.add_extension(issuer, False).sign(self._key, hashes.SHA256())
        chain = signed.public_bytes(serialization.Encoding.PEM) + (self.certificate if leaf.hosts else b"")
        return chain + write_key(key)

    def is_good(self, content: bytes, leaf: Leaf, now: float) -> bool:
        """Whether a certificate with its key is this leaf's, from this authority, and has a third of its life left."""
        try:
            found = x509.load_pem_x509_certificate(content)
            found.verify_directly_issued_by(self._certificate)
            key = serialization.load_pem_private_key(content, None)
            extensions = [each.value for each in found.extensions]
        except Exception:  # noqa: BLE001 - damaged in whatever way: it is made again
            return False
        begin, end = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
        mine = isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == found.public_key()
        names = [name for value in extensions if isinstance(value, x509.SubjectAlternativeName) for name in value]
        same = found.subject == leaf.subject and names == leaf.names
        # Also when the clock was set back, in front of the certificate's beginning.
        return mine and same and begin <= now < end - (end - begin) / 3


def write_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """PEM, in the form that every component reads."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _begin(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, now: float, end: float, *, authority: bool = False
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now - _SKEW))
        .not_valid_after(_time(end))
        .add_extension(x509.BasicConstraints(authority, 0 if authority else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
        .add_extension(usage, True)
    )


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _read_host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _unusable(folder: Path, detail: str) -> ClusterError:
    hint = "restore the folder from a backup; a new authority would be another cluster"
    return ClusterError(
        "authority_unusable", f"the cluster's authority in {folder} is damaged", detail=detail, hint=hint
    )
