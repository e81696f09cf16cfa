"""Connections to a gateway: its identity, the exchange of an API key for a certificate, channels, and their errors.

No secret is ever sent. A first handshake, which verifies nothing and sends nothing, shows the gateway's CA, which must
have the fingerprint in the key. A second connection, which trusts this CA alone, carries a request for a certificate,
signed with the key.
"""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

import grpc

from k8e.cli.client import find_patience
from k8e.cli.process import FAILED, UNREACHABLE, Failure, ServiceError
from k8e.cli.remote.login_keys import make_request, sign_login
from k8e.cli.remote.profiles import Credentials
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import ERROR_KEY, MAX_MESSAGE, MESSAGE_ROOM, METHODS
from k8e.identity import anonymous
from k8e.identity.chain import list_chain

if TYPE_CHECKING:
    from k8e.identity.api_key import ApiKey

PORT = 50051
LOG = "a command that was running may still be: `k8e sandbox log SESSION` lists them"
PATIENCE = 20.0
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(?::([0-9]{1,5}))?")
_BARE_IPV6 = re.compile(r"[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*")

# gRPC has one status for a connection that was never made and for one that broke; these texts mean the first. Any other
# text counts as broken, so that a command that may have run is never reported as one that did not.
NEVER_SENT = ("failed to connect", "connections to all backends failing", "dns resolution failed")


def list_options() -> list[tuple[str, int]]:
    """Pings notice a gateway that hangs, however silent a command is. To connect may take 20 seconds, as in gRPC."""
    patience = int(find_patience() * 1000)
    return [
        ("grpc.enable_retries", 0),  # what is sent again is decided in retry.py
        ("grpc.initial_reconnect_backoff_ms", 100),  # which waits itself between two attempts
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_receive_message_length", MAX_MESSAGE + MESSAGE_ROOM),
        ("grpc.max_send_message_length", MAX_MESSAGE + MESSAGE_ROOM),
        ("grpc.keepalive_time_ms", patience),
        ("grpc.keepalive_timeout_ms", patience * 2 // 3),
        ("grpc.http2.ping_timeout_ms", patience * 2 // 3),  # what newer versions go by
        ("grpc.http2.max_pings_without_data", 0),
    ]


def read_endpoint(text: str) -> str:
    """Returns host:port. People also write `https://` in front, or no port."""
    address = text.strip().removeprefix("https://").removeprefix("grpcs://").rstrip("/")
    if _BARE_IPV6.fullmatch(address):
        return f"[{address}]:{PORT}"
    match = _ENDPOINT.fullmatch(address)
    if match is None or not 0 < int(match[2] or PORT) < 65_536:
        raise Failure("bad_endpoint", f"{text!r} is no endpoint", hint="HOST:PORT; it is always TLS")
    return f"{match[1]}:{match[2] or PORT}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def unreachable(endpoint: str, cause: object) -> Failure:
    return Failure(
        "unreachable",
        f"the gateway at {endpoint} cannot be reached",
        detail=str(cause),
        hint="Is it the right address, is the gateway running there, and does it listen to other machines?",
        status=UNREACHABLE,
    )


def read_key(text: str) -> ApiKey:
    from k8e.identity.api_key import ApiKey, BadKey  # cryptography takes a while, and is needed to log in only

    try:
        return ApiKey.parse(text)
    except BadKey as error:
        raise Failure(
            "bad_apikey", f"the API key {error}", hint="It begins with k8e_ and has 106 characters."
        ) from None


def find_authority(endpoint: str, fingerprint: bytes) -> bytes:
    """Returns the CA (PEM) that the key names, if it is the gateway's. All of it is public, and nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, port = split_endpoint(endpoint)
    try:
        with socket.create_connection((host, port), PATIENCE) as plain, context.wrap_socket(plain) as connection:
            chain = list_chain(connection)
    except (OSError, ValueError) as error:
        raise unreachable(endpoint, error) from error
    for certificate in chain:
        if hashlib.sha256(certificate).digest() == fingerprint:
            return ssl.DER_cert_to_PEM_cert(certificate).encode()
    raise Failure(
        "wrong_gateway",
        f"{endpoint} is not the gateway that this API key is for",
        detail=f"its CA is not the one with the fingerprint {fingerprint.hex()}",
        hint="Nothing was sent. Is the address right? Another machine may be in between.",
    )


def open_channel(endpoint: str, roots: bytes | None, key: bytes, certificate: bytes) -> grpc.Channel:
    return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(roots, key, certificate), list_options())


def log_in(endpoint: str, key: ApiKey) -> Credentials:
    authority = find_authority(endpoint, key.fingerprint)
    with open_channel(endpoint, authority, anonymous.KEY.encode(), anonymous.CERTIFICATE.encode()) as channel:
        private, request = make_request()
        signature = sign_login(key, request)
        message = pb.LoginRequest(key_id=key.key_id.hex(), csr=request, signature=signature)
        return _exchange(channel, endpoint, private, message)


def renew(credentials: Credentials) -> Credentials:
    """Exchanges the certificate for a new one."""
    roots, key = credentials.ca_certificate.encode(), credentials.key.encode()
    with open_channel(credentials.endpoint, roots, key, credentials.certificate.encode()) as channel:
        private, request = make_request()
        return _exchange(channel, credentials.endpoint, private, pb.LoginRequest(csr=request))


def _exchange(channel: grpc.Channel, endpoint: str, private: bytes, message: pb.LoginRequest) -> Credentials:
    method = METHODS["Login"]
    call = channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)
    now = time.time()
    try:
        answer: Any = call(message, timeout=PATIENCE)
    except grpc.RpcError as error:
        raise explain(endpoint, error) from error
    return Credentials(
        endpoint=endpoint,
        ca_certificate=answer.ca_certificate,
        certificate=answer.certificate,
        key=private.decode(),
        issued_at=now,
        expires_at=answer.expires_at,
    )


def read_detail(error: grpc.RpcError) -> pb.ErrorDetail | None:
    """The gateway's own description of the error; None when gRPC failed."""
    for name, value in getattr(error, "trailing_metadata", lambda: ())() or ():
        if name == ERROR_KEY and isinstance(value, bytes):
            return pb.ErrorDetail.FromString(value)
    return None


def read_error(detail: pb.ErrorDetail) -> ServiceError:
    """With the members that the HTTP door gives it."""
    more: dict[str, Any] = {}
    if detail.field:
        more["field"] = detail.field
    if detail.retry_after:
        more["retry_after"] = detail.retry_after
    if detail.run_id:
        more["run_id"] = detail.run_id
    if detail.denied:
        from k8e.cli.remote.messages import read_denials
        from k8e.doors.http.answers import show_denials

        more |= show_denials(read_denials(detail.denied, detail.denied_more))
    return ServiceError(detail.code, detail.error, detail=detail.detail, hint=detail.hint, more=more)


def explain(endpoint: str, error: Any, *, harmless: bool = True) -> Failure:
    """`harmless`: the call changes nothing, so that it may be repeated."""
    detail = read_detail(error)
    if detail is not None:
        return read_error(detail)
    code, text = error.code(), error.details()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Failure("message_too_large", "a message has more than 64 MiB", detail=text, hint="send it in parts")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        status = UNREACHABLE if harmless else FAILED
        return Failure("deadline_exceeded", f"{endpoint} did not answer in time", detail=text, hint=LOG, status=status)
    if not harmless and not any(words in str(text).lower() for words in NEVER_SENT):
        return Failure("connection_lost", f"{endpoint} went away before it had answered", detail=text, hint=LOG)
    return unreachable(endpoint, text)
