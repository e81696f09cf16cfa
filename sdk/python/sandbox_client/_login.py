"""Gets a client's certificate: from the daemon of this machine, which knows its users, or with an API key.

Nothing secret is ever sent. The key in an API key signs a request for a certificate; its fingerprint tells whether
the server at the other end is the gateway it was made for, before anything is asked of it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import socket
import ssl
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from sandbox_client import sandbox_pb2 as pb
from sandbox_client._errors import Effect, InvalidArgument, ServerNotTrusted, Unavailable, translate
from sandbox_client._hints import find_hint

PREFIX: Final = "k8e_"
_PURPOSE: Final = b"k8e-login-v1\0"
SECONDS: Final = 20.0

# The anonymous certificate, which every client has: gRPC requires one before a client can ask for its own.
NOBODY_CERTIFICATE: Final = b"""\
-----BEGIN CERTIFICATE-----
MIIBPjCB5qADAgECAgEBMAoGCCqGSM49BAMCMBUxEzARBgNVBAMMCms4ZSBub2Jv
ZHkwIBcNMjAwMTAxMDAwMDAwWhgPOTk5OTEyMzEyMzU5NTlaMBUxEzARBgNVBAMM
Cms4ZSBub2JvZHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAQzjk1c1Duxelb3
l77bFsjtKWpsd3lrFBdEJWRmEL6jAgR4dyno48Z8+sVtwCb7a9QI6VtKStEPs8bf
0Se5a2NjoyUwIzAMBgNVHRMBAf8EAjAAMBMGA1UdJQQMMAoGCCsGAQUFBwMCMAoG
CCqGSM49BAMCA0cAMEQCIC/NfbBtdz/41tKckGHOJxWb+d2Ha8BptCCoqoztQMEd
AiBXewdvxdGnsW4wOLDW5iZearjouaP/OGGDNtqw+G61Ng==
-----END CERTIFICATE-----
"""
NOBODY_KEY: Final = b"""\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgrHASSgmZw/WqHUbY
dRjQ7dluc+ZU2dAFaL9uyHm7a4KhRANCAAQzjk1c1Duxelb3l77bFsjtKWpsd3lr
FBdEJWRmEL6jAgR4dyno48Z8+sVtwCb7a9QI6VtKStEPs8bf0Se5a2Nj
-----END PRIVATE KEY-----
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """A client certificate with its key, and the CA that the gateway's own must come from. All PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes
    expires: float
    endpoint: str = ""  # where the gateway is, if it said so
    daemon: str = ""  # the process that issued it, of this machine


@dataclass(frozen=True, slots=True)
class ApiKey:
    key_id: bytes
    fingerprint: bytes  # SHA-256 of the gateway's CA certificate
    secret: bytes = field(repr=False)  # Ed25519; never leaves this process

    @classmethod
    def parse(cls, text: str) -> ApiKey:
        encoded = text.strip().removeprefix(PREFIX)
        try:
            content = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            content = b""
        body, checksum = content[:-4], content[-4:]
        if len(body) != 72 or hashlib.sha256(body).digest()[:4] != checksum or not text.strip().startswith(PREFIX):
            error, code = "this is not an API key, or not all of it", "bad_apikey"
            raise InvalidArgument(error, code=code, field="api_key", hint=find_hint(code))
        return cls(body[:8], body[8:40], body[40:])

    def sign_login(self, request: bytes) -> bytes:
        statement = _PURPOSE + self.fingerprint + self.key_id + hashlib.sha256(request).digest()
        return Ed25519PrivateKey.from_private_bytes(self.secret).sign(statement)


def make_request() -> tuple[bytes, x509.CertificateSigningRequest]:
    """A new key (PEM), and the request for a certificate for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "k8e client")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption()), request


def write_request(request: x509.CertificateSigningRequest) -> str:
    return request.public_bytes(serialization.Encoding.PEM).decode("ascii")


def login_local(path: str) -> Identity:
    """From the daemon of this machine, through its socket. Raises OSError where none answers."""
    key, request = make_request()
    body = json.dumps({"csr": write_request(request)}).encode()
    head = "POST /v1/login HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(path)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    if not answer:
        raise ConnectionResetError(f"{path}: the daemon went away before it had answered")
    status, _, content = answer.partition(b"\r\n\r\n")
    try:
        found: dict[str, Any] = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError) as error:
        raise Unavailable(
            "what answers at the daemon's socket is no daemon",
            code="answer_unusable",
            detail=f"{path}: {error}",
            hint="Is this client of the same version as the daemon?",
        ) from error
    if not status.startswith(b"HTTP/1.1 20"):
        raise Unavailable(
            str(found.get("error", "")),
            code=str(found.get("code", "")),
            detail=str(found.get("detail", "")),
            hint=find_hint(str(found.get("code", "")), str(found.get("hint", ""))),
        )
    return Identity(
        certificate=found["certificate"].encode(),
        key=key,
        authority=found["ca_certificate"].encode(),
        expires=float(found["expires_at"]),
        endpoint=found["endpoint"],
        daemon=find_process(found.get("pid", 0)),
    )


def find_process(pid: int) -> str:
    """A process of this machine, told apart from a later one with its id; empty when it has ended, or cannot be seen
    from here."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if state in b"ZX" else f"{pid}@{fields[18].decode()}"  # the time at which it was started


def login_with_key(address: str, text: str) -> Identity:
    key = ApiKey.parse(text)
    authority = find_authority(address, key.fingerprint)
    private, request = make_request()
    message = pb.LoginRequest(
        key_id=key.key_id.hex(),
        csr=write_request(request),
        signature=key.sign_login(request.public_bytes(serialization.Encoding.DER)),
    )
    return exchange(address, authority, private, message, NOBODY_CERTIFICATE, NOBODY_KEY)


def login_with_certificate(address: str, authority: bytes, certificate: bytes, key: bytes) -> Identity:
    """Exchanges a certificate that is valid for a new one."""
    private, request = make_request()
    return exchange(address, authority, private, pb.LoginRequest(csr=write_request(request)), certificate, key)


def exchange(
    address: str, authority: bytes, private: bytes, message: pb.LoginRequest, certificate: bytes, key: bytes
) -> Identity:
    """Sends the request for a certificate on a connection that is made with `certificate` and `key`."""
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    with grpc.secure_channel(address, credentials, options=[("grpc.enable_retries", 0)]) as channel:
        method = channel.unary_unary(
            "/sandbox.v1.SandboxService/Login",
            request_serializer=pb.LoginRequest.SerializeToString,
            response_deserializer=pb.LoginResponse.FromString,
        )
        try:
            response = method(message, timeout=SECONDS)
        except grpc.RpcError as error:
            raise translate(error, Effect.ASKS) from error  # a certificate that is not fetched has no effect
    return Identity(response.certificate.encode(), private, authority, response.expires_at)


def find_authority(address: str, fingerprint: bytes) -> bytes:
    """The CA certificate (PEM) that a server sends along, if it is the one that we were told to trust.

    Nothing is believed yet and nothing is asked: this only fetches the certificate that has that fingerprint. The
    connection that counts is then made with it as the only CA.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        connection = socket.create_connection((host, int(port)), timeout=SECONDS)
        with connection, context.wrap_socket(connection, server_hostname=host) as secure:
            chain = read_chain(secure)
    except (OSError, ValueError) as error:
        hint = find_hint("unreachable")
        raise Unavailable(f"{address} cannot be reached", code="unreachable", detail=str(error), hint=hint) from error
    for certificate in chain:
        if hashlib.sha256(certificate).digest() == fingerprint:
            return ssl.DER_cert_to_PEM_cert(certificate).encode()
    wrong = f"{address} is not the gateway that this key was made for"
    raise ServerNotTrusted(wrong, code="wrong_gateway", hint=find_hint("wrong_gateway"))


def read_chain(secure: ssl.SSLSocket) -> list[bytes]:
    """Everything that the server sent, DER. Public from Python 3.13 on."""
    if hasattr(secure, "get_unverified_chain"):
        return list(secure.get_unverified_chain())
    import _ssl

    inner: Any = secure._sslobj  # type: ignore[attr-defined]  # noqa: SLF001
    return [certificate.public_bytes(_ssl.ENCODING_DER) for certificate in inner.get_unverified_chain()]
