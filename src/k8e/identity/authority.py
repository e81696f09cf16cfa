"""The daemon's certificate authority: P-256, made when it is first needed, kept in two files.

    ca.crt   public: API keys contain its fingerprint
    ca.key   readable for the daemon alone

Server certificates are kept in memory and valid for a month. A client certificate names one identity, `k8e:key:ID` or
`k8e:uid:N`, as a URI, and is valid for clients only.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from k8e.damage import read_own

CA_LIFE: Final = 20 * 365 * 86_400.0
SERVER_LIFE: Final = 30 * 86_400.0
_SKEW: Final = 300.0  # for clients whose clock is behind
_MAX_REQUEST: Final = 16 << 10


class BadRequest(ValueError):
    """The certificate request cannot be used."""


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    key: bytes = field(repr=False)  # PEM
    chain: bytes  # PEM, the CA included: a client that has only its fingerprint finds it here
    expires: float

    def is_worn(self, now: float) -> bool:
        """Whether less than a third of its life is left."""
        return now > self.expires - SERVER_LIFE / 3


@dataclass(frozen=True, slots=True)
class Peer:
    """The identity in a certificate that this authority issued."""

    identity: str
    expires: float


class Authority:
    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)
        self.fingerprint = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()
        # Every call brings one of the same few certificates.
        self.identify = functools.lru_cache(maxsize=4096)(self._identify)

    @classmethod
    def open(cls, directory: Path, now: float) -> Self:
        """Opens the authority; makes it the first time. OSError and ValueError when the files cannot be used."""
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        directory.chmod(0o711)
        certificate_file, key_file = directory / "ca.crt", directory / "ca.key"
        # The key is written last: without it there is no authority yet.
        if not os.path.lexists(key_file):
            certificate, key = _found(now)
            replace_file(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
            replace_file(key_file, _write_key(key), 0o600)
        key_found = serialization.load_pem_private_key(read_own(key_file), None)
        certificate = x509.load_pem_x509_certificate(read_own(certificate_file))
        if not isinstance(key_found, ec.EllipticCurvePrivateKey) or key_found.public_key() != certificate.public_key():
            raise ValueError(f"{certificate_file} and {key_file} do not belong together")
        return cls(certificate, key_found)

    def issue_server(self, names: Iterable[str], now: float) -> ServerCertificate:
        key = ec.generate_private_key(ec.SECP256R1())
        expires = now + SERVER_LIFE
        builder = _begin("k8e gateway", key.public_key(), now, expires)
        builder = builder.add_extension(x509.SubjectAlternativeName([_read_name(name) for name in names]), False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        return ServerCertificate(_write_key(key), self._sign(builder) + self.certificate, expires)

    def issue_client(self, request: str, identity: str, now: float, expires: float) -> bytes:
        """Returns a certificate (PEM). Only the public key is taken from the request; the caller names the identity."""
        builder = _begin(identity, read_request(request).public_key(), now, expires)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)]), False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False)
        return self._sign(builder)

    def _sign(self, builder: x509.CertificateBuilder) -> bytes:
        builder = builder.issuer_name(self._certificate.subject)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = builder.add_extension(issuer, False).sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def _identify(self, certificate: bytes) -> Peer | None:
        """Returns the identity in a certificate (PEM), if this authority issued it for a client. TLS has shown that the
        peer has its key.

        The signature is checked once more, because the handshake accepts more than this authority issued (`anonymous`).
        """
        try:
            peer = x509.load_pem_x509_certificate(certificate)
            peer.verify_directly_issued_by(self._certificate)
            usage = peer.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            names = peer.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound, x509.DuplicateExtension):
            return None
        identities = names.get_values_for_type(x509.UniformResourceIdentifier)
        if list(usage) != [ExtendedKeyUsageOID.CLIENT_AUTH] or len(identities) != 1:
            return None
        return Peer(identities[0], peer.not_valid_after_utc.timestamp())


def read_request(text: str) -> x509.CertificateSigningRequest:
    """Reads a PKCS#10 request in PEM, signed with the P-256 key for which it asks a certificate."""
    if len(text) > _MAX_REQUEST:
        raise BadRequest("is too long")
    try:
        request = x509.load_pem_x509_csr(text.encode())
        key = request.public_key()
        usual = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
        whole = usual and request.is_signature_valid
    except Exception as error:  # untrusted bytes: any error of the library
        raise BadRequest("is not a PKCS#10 request in PEM") from error
    if not whole:
        raise BadRequest("is not signed by a P-256 key")
    return request


def make_request() -> tuple[bytes, str]:
    """Makes, for a client, a new key (PEM) and the request for its certificate (PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name("k8e client"))
    request = builder.sign(key, hashes.SHA256())
    return _write_key(key), request.public_bytes(serialization.Encoding.PEM).decode("ascii")


def request_content(text: str) -> bytes:
    """Returns the request as DER, over which a login is signed."""
    return read_request(text).public_bytes(serialization.Encoding.DER)


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file atomically, also when the power fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _found(now: float) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _begin("k8e CA", key.public_key(), now, now + CA_LIFE, authority=True).issuer_name(_name("k8e CA"))
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return builder.add_extension(usage, True).sign(key, hashes.SHA256()), key


def _begin(
    common_name: str, key: CertificatePublicKeyTypes, now: float, expires: float, *, authority: bool = False
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(common_name))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now - _SKEW))
        .not_valid_after(_time(expires))
        .add_extension(x509.BasicConstraints(authority, 0 if authority else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _read_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
