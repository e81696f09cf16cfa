"""Turns the choice of a gateway into a connection's credentials: logs in, renews, finds the CA to trust."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from sandbox_client._discovery import LOCAL, LOOPBACK, Choice, choose, find_run_dir, read_address
from sandbox_client._errors import InvalidArgument, SandboxError, Unavailable
from sandbox_client._hints import find_hint
from sandbox_client._login import (
    NOBODY_CERTIFICATE,
    NOBODY_KEY,
    Identity,
    find_process,
    login_local,
    login_with_certificate,
    login_with_key,
)
from sandbox_client._profiles import Credentials, Profiles, RenewedCertificate
from sandbox_client._requests import MESSAGE
from sandbox_client._token import add_token, read_token

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MESSAGE + (1 << 20)),
    ("grpc.max_send_message_length", MESSAGE + (1 << 20)),
    ("grpc.enable_retries", 0),  # a command is run once
    ("grpc.use_local_subchannel_pool", 1),  # the next daemon is not made to wait for the failures of the last
    # A gateway that hangs is noticed, however long a command is silent.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # what newer versions go by
    ("grpc.http2.max_pings_without_data", 0),
)
AGAIN: Final = 60.0  # seconds after which a renewal that failed is tried again
AT_SOCKET: Final = "renewed_at_socket"
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway, and what a connection to it is made with."""

    address: str
    authority: bytes | None  # the CAs that its certificate may come from; None: those of the system
    certificate: bytes
    key: bytes
    renew_at: float = float("inf")  # from then on it should be looked for anew
    local: bool = False  # the daemon of this machine: it is started when it does not run
    daemon: str = ""  # its process, if it can be seen from here
    token_file: str = ""  # of the token that each call is sent with

    @property
    def is_gone(self) -> bool:
        """Whether the daemon has ended. gRPC learns of that by and by, and would send a call that is lost."""
        return bool(self.daemon) and find_process(int(self.daemon.partition("@")[0])) != self.daemon

    def credentials(self) -> grpc.ChannelCredentials:
        found = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        return add_token(found, self.token_file) if self.token_file else found


def find_target(endpoint: str | None, api_key: str | None, profile: str | None) -> Target:
    choice = choose(endpoint, api_key, profile)
    if not choice.endpoint:
        identity = _log_in_here()
        return _belong(read_address(identity.endpoint), identity, local=True)
    if choice.api_key is not None:
        return _belong(choice.endpoint, login_with_key(choice.endpoint, choice.api_key))
    if choice.certificate_file:
        return _use_files(choice)
    if choice.profile:
        return _use_profile(choice.profile)
    identity_here = _find_identity_here(choice.endpoint)
    if identity_here is not None:
        return _belong(choice.endpoint, identity_here)
    # Anonymously, so that the gateway's answer says what is missing.
    return Target(choice.endpoint, find_roots(), NOBODY_CERTIFICATE, NOBODY_KEY)


def _belong(address: str, identity: Identity, *, local: bool = False) -> Target:
    """Looked for anew when a third of the certificate's life is left."""
    renew_at = identity.expires - (identity.expires - time.time()) / 3
    process = identity.daemon if local else ""
    return Target(address, identity.authority, identity.certificate, identity.key, renew_at, local, process)


def _use_files(choice: Choice) -> Target:
    certificates = read_file(choice.certificate_file)
    if not choice.key_file:
        if choice.token_file:
            read_token(choice.token_file)  # so that a wrong name is an error of its own
        return Target(choice.endpoint, certificates, NOBODY_CERTIFICATE, NOBODY_KEY, token_file=choice.token_file)
    own, *authorities = _CERTIFICATE.findall(certificates) or [b""]
    return Target(choice.endpoint, b"".join(authorities) or find_roots(), own, read_file(choice.key_file))


def read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        code = "certificate_unreadable"
        message = "K8E_SANDBOX_CERT or K8E_SANDBOX_KEY cannot be read"
        raise InvalidArgument(message, code=code, detail=str(error), hint=find_hint(code)) from error


# Profiles


def _use_profile(name: str) -> Target:
    """Renews the certificate when a third of its life is left. While it is valid, a renewal that fails is no error."""
    kept = RenewedCertificate(Profiles().find(name))
    credentials, now = kept.read(), time.time()
    tried = 0.0
    if credentials.is_worn(now):
        try:
            credentials = _renew(credentials)
            kept.save(credentials)
        except SandboxError:
            if now >= credentials.expires_at:
                raise
            tried = now
    life = credentials.expires_at - credentials.issued_at
    return Target(
        read_address(credentials.endpoint),
        credentials.ca_certificate.encode(),
        credentials.certificate.encode(),
        credentials.key.encode(),
        max(credentials.expires_at - life / 3, tried + AGAIN),
    )


def _renew(credentials: Credentials) -> Credentials:
    """By the certificate itself; that of a user of this machine at the socket. Where the socket is closed to the user,
    the gateway's refusal says what to do."""
    now = time.time()
    address = read_address(credentials.endpoint)
    parts = (part.encode() for part in (credentials.ca_certificate, credentials.certificate, credentials.key))
    try:
        identity = login_with_certificate(address, *parts)
    except SandboxError as error:
        found = _find_identity_here(address) if error.code == AT_SOCKET else None
        if found is None:
            raise
        identity = found
    return Credentials(
        endpoint=credentials.endpoint,
        ca_certificate=identity.authority.decode(),
        certificate=identity.certificate.decode(),
        key=identity.key.decode(),
        issued_at=now,
        expires_at=identity.expires,
    )


# The daemon of this machine


def _find_identity_here(address: str) -> Identity | None:
    """A user of this machine needs no key for its own gateway. None: it is another machine's, or closed to the user."""
    host, _, port = address.rpartition(":")
    path = f"{find_run_dir()}/k8e.sock"
    if host not in LOOPBACK or not os.access(path, os.W_OK):
        return None
    try:
        identity = login_local(path)
    except (OSError, Unavailable):
        return None
    return identity if identity.endpoint.rpartition(":")[2] == port else None


def _log_in_here() -> Identity:
    """Logs in as the user of this process. A daemon that was killed takes connections until its last thread has ended,
    so one that goes away without an answer is asked once more: it is the next daemon that answers then."""
    path = f"{find_run_dir()}/k8e.sock"
    for last in (False, False, True):
        try:
            return login_local(path)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if last:
                raise _fail("daemon_unreachable", "the daemon of this machine does not answer", error) from error
            start_daemon(path)
        except PermissionError as error:
            raise _fail("daemon_not_allowed", "you may not use the daemon of this machine", error) from error
        except OSError as error:
            if last or isinstance(error, TimeoutError):
                raise _fail("daemon_unreachable", "the daemon of this machine does not answer", error) from error
    raise AssertionError


def _fail(code: str, error: str, cause: object) -> Unavailable:
    return Unavailable(error, code=code, detail=str(cause), hint=find_hint(code))


def start_daemon(path: str) -> None:
    """Starts the daemon: asks the command line for the status, which needs one."""
    if os.geteuid() != 0:
        raise _fail("daemon_not_running", "the daemon does not run, and only root can start it", path)
    command = shutil.which("k8e")
    if command is None:
        raise _fail("daemon_not_started", "the daemon does not run, and there is no k8e to start it", path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("K8E_SANDBOX_")}
    environment["K8E_SANDBOX_ENDPOINT"] = LOCAL
    done = subprocess.run(
        [command, "sandbox", "status"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
        env=environment,
    )
    if done.returncode == 2:
        detail = done.stdout.decode("utf-8", "replace").strip()
        raise _fail("daemon_not_started", "the daemon of this machine could not be started", detail)


# The CA to trust


def find_roots() -> bytes | None:
    """The server's own CA, if we are where it runs; else the cluster's; else None: the system's."""
    state = os.environ.get("K8E_STATE_DIR") or "/var/lib/k8e"
    try:
        return Path(state, "identity", "ca.crt").read_bytes()
    except OSError:
        return read_cluster_authority(Path(os.environ.get("KUBECONFIG") or "/etc/k8e/k8e.yaml"))


def read_cluster_authority(path: Path) -> bytes | None:
    """The CA of the current cluster; None for a kubeconfig without what we look for, which is no reason to fail."""
    if not path.exists():
        return None
    import yaml

    try:
        config: Any = yaml.safe_load(path.read_bytes())
        current = config.get("current-context")
        contexts = {one["name"]: one["context"]["cluster"] for one in config.get("contexts") or ()}
        clusters = {one["name"]: one["cluster"] for one in config.get("clusters") or ()}
        cluster = clusters[contexts[current]] if current else next(iter(clusters.values()))
        if "certificate-authority-data" in cluster:
            return base64.b64decode(cluster["certificate-authority-data"])
        return Path(path.parent, str(cluster["certificate-authority"])).read_bytes()
    except (OSError, yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, StopIteration):
        return None
