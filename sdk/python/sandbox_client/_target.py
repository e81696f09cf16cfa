"""Finds the gateway and the identity, in this order:

1. an endpoint: the argument, K8E_SANDBOX_ENDPOINT, or that of a profile (argument, K8E_SANDBOX_PROFILE). Its identity:
   an API key (argument, K8E_SANDBOX_APIKEY); the files K8E_SANDBOX_CERT and K8E_SANDBOX_KEY; a profile for the same
   endpoint; the daemon of this machine, where the endpoint is its own; else none, with a CA to check the server by
2. the daemon of this machine, through its unix socket; root starts it when it is not there
3. 127.0.0.1:50051, as in 1

The CA to check a server by is the one that came with the identity; else that of the server's own files, of the
kubeconfig, or one of the system's.
"""

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

from sandbox_client._errors import InvalidArgument, Unavailable
from sandbox_client._login import NOBODY_CERTIFICATE, NOBODY_KEY, Identity, login_local, login_with_key
from sandbox_client._requests import MESSAGE

DEFAULT: Final = "127.0.0.1:50051"
PORT: Final = 50051
OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MESSAGE + (1 << 20)),
    ("grpc.max_send_message_length", MESSAGE + (1 << 20)),
    ("grpc.enable_retries", 0),  # a command is run once
    # A gateway that hangs is noticed, however long a command is silent.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # what newer versions go by
    ("grpc.http2.max_pings_without_data", 0),
)
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    address: str
    authority: bytes | None  # the CAs that its certificate may come from; None: those of the system
    certificate: bytes
    key: bytes
    renew_at: float  # from then on it should be looked for anew

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def find_target(endpoint: str | None, api_key: str | None, profile: str | None) -> Target:
    wanted = endpoint or os.environ.get("K8E_SANDBOX_ENDPOINT")
    profile = profile or os.environ.get("K8E_SANDBOX_PROFILE")
    profiles = read_profiles()
    if profile is not None and profile not in profiles:
        hint = "`k8e connect` makes one"
        raise InvalidArgument(f"there is no profile {profile}", code="profile_not_found", field="profile", hint=hint)
    if not wanted and profile is not None:
        wanted = str(profiles[profile]["endpoint"])
    if wanted:
        return _choose_identity(read_address(wanted), api_key, profile, profiles)
    local = _log_in_here()
    if local is not None:
        return _belong(read_address(local.endpoint), local)
    return _choose_identity(DEFAULT, api_key, profile, profiles)


def _choose_identity(address: str, api_key: str | None, profile: str | None, profiles: dict[str, Any]) -> Target:
    api_key = api_key or os.environ.get("K8E_SANDBOX_APIKEY")
    if api_key:
        return _belong(address, login_with_key(address, api_key))
    certificate_file, key_file = os.environ.get("K8E_SANDBOX_CERT"), os.environ.get("K8E_SANDBOX_KEY")
    if certificate_file and key_file:
        own, *authorities = _CERTIFICATE.findall(read_file(certificate_file, "K8E_SANDBOX_CERT")) or [b""]
        roots = b"".join(authorities) or find_roots()
        return Target(address, roots, own, read_file(key_file, "K8E_SANDBOX_KEY"), float("inf"))
    for name in [profile] if profile is not None else profiles:
        found = profiles[name]
        if read_address(str(found["endpoint"])) == address:
            own, key, authority = (str(found[part]).encode() for part in ("certificate", "key", "ca_certificate"))
            return Target(address, authority, own, key, float("inf"))
    if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
        local = _log_in_here(start=False)
        if local is not None and local.endpoint.rpartition(":")[2] == address.rpartition(":")[2]:
            return _belong(address, local)
    roots = read_file(certificate_file, "K8E_SANDBOX_CERT") if certificate_file else find_roots()
    # Anonymously, so that the gateway's answer says what is missing.
    return Target(address, roots, NOBODY_CERTIFICATE, NOBODY_KEY, float("inf"))


def _belong(address: str, identity: Identity) -> Target:
    """Looked for anew when a third of the certificate's life is left."""
    renew_at = identity.expires - (identity.expires - time.time()) / 3
    return Target(address, identity.authority, identity.certificate, identity.key, renew_at)


def _log_in_here(*, start: bool = True) -> Identity | None:
    """Logs in as the user of this process at the daemon of this machine; None where there is no daemon."""
    path = (os.environ.get("K8E_RUN_DIR") or "/run/k8e") + "/k8e.sock"
    try:
        return login_local(path)
    except (FileNotFoundError, ConnectionRefusedError):
        if not start or os.geteuid() != 0 or not start_daemon():
            return None
    except PermissionError as error:
        hint = "join the group `k8e`, or use an API key"
        raise Unavailable(f"{path} is not open for you", code="not_allowed", detail=str(error), hint=hint) from error
    except OSError as error:
        raise Unavailable(
            "the daemon of this machine does not answer", code="unreachable", detail=str(error)
        ) from error
    try:
        return login_local(path)
    except OSError as error:
        raise Unavailable(
            "the daemon of this machine does not answer", code="unreachable", detail=str(error)
        ) from error


def start_daemon() -> bool:
    """Starts the daemon: asks the command line for the status, which needs one."""
    command = shutil.which("k8e")
    if command is None:
        return False
    done = subprocess.run(
        [command, "sandbox", "status"], stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
    )
    if done.returncode == 2:
        detail = done.stdout.decode("utf-8", "replace").strip()
        raise Unavailable("the daemon of this machine could not be started", code="unreachable", detail=detail)
    return True


def read_address(text: str) -> str:
    """host:port, as gRPC takes it."""
    bare = text.strip().removeprefix("https://").rstrip("/")
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(?::(\d{1,5}))?", bare)
    if match is None:
        hint = "write host:port, such as 10.0.0.1:50051"
        raise InvalidArgument(f"{text!r} is no endpoint", code="invalid_argument", field="endpoint", hint=hint)
    return f"{match[1]}:{match[2] or PORT}"


def read_profiles() -> dict[str, Any]:
    path = Path.home() / ".k8e" / "sandbox" / "profiles.yaml"
    if not path.exists():
        return {}
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
        profiles = dict(found["profiles"])
        for profile in profiles.values():
            profile["endpoint"], profile["certificate"], profile["key"], profile["ca_certificate"]
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        hint = "`k8e connect` writes it anew"
        raise InvalidArgument(
            f"{path} cannot be read", code="invalid_profiles", detail=str(error), hint=hint
        ) from error
    return profiles


def read_file(path: str, variable: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{variable} cannot be read", code="invalid_argument", detail=str(error)) from error


def find_roots() -> bytes | None:
    """The server's own CA, if we are where it runs; else the cluster's; else None: the system's."""
    state = os.environ.get("K8E_STATE_DIR") or "/var/lib/k8e"
    try:
        return Path(state, "identity", "ca.crt").read_bytes()
    except OSError:
        pass
    for path in (os.environ.get("KUBECONFIG"), "/etc/k8e/k8e.yaml"):
        if path and os.path.exists(path):
            return read_cluster_authority(Path(path))
    return None


def read_cluster_authority(path: Path) -> bytes | None:
    import yaml

    try:
        config = yaml.safe_load(path.read_text())
        context = next(item["context"] for item in config["contexts"] if item["name"] == config["current-context"])
        cluster = next(item["cluster"] for item in config["clusters"] if item["name"] == context["cluster"])
        return base64.b64decode(cluster["certificate-authority-data"])
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, StopIteration):
        return None  # a kubeconfig without what we look for is no reason to fail
