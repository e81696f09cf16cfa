"""The gateway's server certificate. It is renewed when a third of its life is left; gRPC asks for the one in force at
every handshake, so that nothing is restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc

from k8e.identity import anonymous
from k8e.identity.authority import Authority, ServerCertificate


class ServerCredentials:
    """The certificate in force. gRPC asks for it from its own threads."""

    def __init__(self, authority: Authority, names: Sequence[str]) -> None:
        self._authority = authority
        self._names = names
        self._lock = threading.Lock()
        self._current = authority.issue_server(names, time.time())
        self._used = self._current  # by gRPC

    def make(self) -> grpc.ServerCredentials:
        first = self._configure(self._current)
        fetch: Any = self._fetch  # the stubs do not know that it may return None
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)

    def renew(self) -> None:
        """Takes effect with the next handshake."""
        with self._lock:
            self._current = self._authority.issue_server(self._names, time.time())

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None: the certificate has not changed."""
        if self._current.is_worn(time.time()):
            self.renew()
        with self._lock:
            if self._used is self._current:
                return None
            self._used = self._current
            return self._configure(self._current)

    def _configure(self, certificate: ServerCertificate) -> grpc.ServerCertificateConfiguration:
        roots = self._authority.certificate + anonymous.CERTIFICATE.encode()
        return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.chain)], roots)
