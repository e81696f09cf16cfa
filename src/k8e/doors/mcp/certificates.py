"""The server's TLS certificate: issued by the daemon's own authority, or supplied by the caller that listens.

A key is never written to a disk: OpenSSL reads files only, so it gets a file without a name.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from cryptography import x509

from k8e.doors.errors import invalid
from k8e.identity.authority import SERVER_LIFE, Authority

_FOREVER: Final = float("inf")


class TlsCertificate(Protocol):
    names: Sequence[str]

    def make_context(self) -> ssl.SSLContext: ...
    def renew(self, context: ssl.SSLContext) -> None:
        """From the next handshake on."""

    @property
    def renew_at(self) -> float:
        """Unix time."""


class IssuedCertificate:
    def __init__(self, authority: Authority, names: Sequence[str]) -> None:
        self.names = names
        self._authority = authority
        self._current = authority.issue_server(names, time.time())

    def make_context(self) -> ssl.SSLContext:
        return _make_context(self._current.chain, self._current.key)

    def renew(self, context: ssl.SSLContext) -> None:
        self._current = self._authority.issue_server(self.names, time.time())
        _load(context, self._current.chain, self._current.key)

    @property
    def renew_at(self) -> float:
        return self._current.expires - SERVER_LIFE / 3


class SuppliedCertificate:
    """Raises Fault for files that are no certificate with its key."""

    renew_at: float = _FOREVER

    def __init__(self, chain: str, key: str) -> None:
        self._chain, self._key = chain.encode(), key.encode()
        try:
            self.names: Sequence[str] = list_subject_names(x509.load_pem_x509_certificates(self._chain)[0])
            self.make_context()
        except (ValueError, ssl.SSLError, x509.ExtensionNotFound) as error:
            hint = "PEM files: --tls-cert with the certificate for this host and those it is signed by, --tls-key."
            raise invalid("certificate", "this is no certificate for a server with its key", hint=hint) from error

    def make_context(self) -> ssl.SSLContext:
        return _make_context(self._chain, self._key)

    def renew(self, context: ssl.SSLContext) -> None:
        """The caller supplies another one when it listens again."""


def list_subject_names(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(ip) for ip in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def _make_context(chain: bytes, key: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    _load(context, chain, key)
    return context


def _load(context: ssl.SSLContext, chain: bytes, key: bytes) -> None:
    with _nameless(chain) as chain_file, _nameless(key) as key_file:
        context.load_cert_chain(chain_file, key_file, password=lambda: b"")  # never asks at a terminal


@contextmanager
def _nameless(content: bytes) -> Iterator[str]:
    descriptor = os.memfd_create("k8e-tls", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
