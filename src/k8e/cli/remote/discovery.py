"""Finds the gateway that is meant, and the credentials for it. docs/gateway.md has the order; sdk/discovery.json has
the cases that the SDKs are tested with, too. A credential that is given is used or refused, and never replaced.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k8e.cli import client
from k8e.cli.client import LOCAL, LocalClient, run_dir
from k8e.cli.process import Failure, ServiceError
from k8e.cli.remote import connection
from k8e.cli.remote.login_keys import make_request
from k8e.cli.remote.profiles import Cache, Credentials, Profiles
from k8e.cli.remote.retry import repeat
from k8e.cli.remote.token import TokenChannel, read_token
from k8e.identity import anonymous

LOOPBACK = ("127.0.0.1", "::1", "localhost")
AT_SOCKET = "renewed_at_socket"


@dataclass(frozen=True, slots=True)
class Target:
    endpoint: str
    roots: bytes | None  # None: the system's
    certificate: bytes
    key: bytes = field(repr=False)
    token_file: str = ""  # of the token that each call is sent with
    known: bool = False  # the gateway has answered this user before: the credentials are from there

    def open_channel(self) -> Any:
        channel = connection.open_channel(self.endpoint, self.roots, self.key, self.certificate)
        return TokenChannel(channel, self.token_file) if self.token_file else channel

    @property
    def place(self) -> str:
        """The directory for files about it."""
        return "@" + "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in self.endpoint)


def find_target(profile: str = "") -> Target:
    """Reads the environment, in which options are noted too (commands.py). Raises Failure."""
    profile = profile or os.environ.get("K8E_SANDBOX_PROFILE", "")
    given = os.environ.get("K8E_SANDBOX_ENDPOINT", "")
    apikey = os.environ.get("K8E_SANDBOX_APIKEY", "")
    check_combination(given, apikey, profile)
    if profile:
        endpoint = Profiles().find(profile).endpoint
        if given and connection.read_endpoint(given) != endpoint:
            raise ambiguous(f"the profile {profile} is for {endpoint}, and the endpoint says {given}")
        return of(use_key(endpoint, apikey) if apikey else use_profile(profile))
    endpoint = connection.read_endpoint(given) if given else find_own_gateway()
    if apikey:
        return of(use_key(endpoint, apikey))
    return (
        use_files(endpoint)
        or use_profile_of(endpoint)
        or use_local_daemon(endpoint)
        or Target(endpoint, find_roots(), anonymous.CERTIFICATE.encode(), anonymous.KEY.encode())
    )


def check_combination(given: str, apikey: str, profile: str) -> None:
    certificate, key = os.environ.get("K8E_SANDBOX_CERT"), os.environ.get("K8E_SANDBOX_KEY")
    if os.environ.get("K8E_SANDBOX_TOKEN_FILE"):
        if key or apikey or profile or given == LOCAL:
            raise ambiguous("K8E_SANDBOX_TOKEN_FILE is set, and another credential or `local` is given")
        if not certificate:  # the token is sent as it is, so it goes to a gateway of the given CA only
            error, hint = "K8E_SANDBOX_TOKEN_FILE is set, and K8E_SANDBOX_CERT is not", "CERT names the gateway's CA"
            raise Failure("credential_incomplete", error, hint=hint)
    if key and not certificate:
        error, hint = "K8E_SANDBOX_KEY is set, and K8E_SANDBOX_CERT is not", "set both, or neither"
        raise Failure("credential_incomplete", error, hint=hint)
    if key and (apikey or profile):
        other = "an API key" if apikey else f"the profile {profile}"
        raise ambiguous(f"K8E_SANDBOX_CERT and K8E_SANDBOX_KEY are set, and {other} is given")
    if given == LOCAL:
        raise ambiguous("the socket of this machine's daemon takes no credential, and one is given")


def ambiguous(error: str) -> Failure:
    return Failure("target_ambiguous", error, hint="give one of them")


def find_own_gateway() -> str:
    """Where the gateway of this machine listens: its daemon writes that into its run directory."""
    try:
        return connection.read_endpoint(Path(run_dir(), "gateway").read_text())
    except OSError:
        return f"127.0.0.1:{connection.PORT}"


def of(credentials: Credentials) -> Target:
    roots, certificate = credentials.ca_certificate.encode(), credentials.certificate.encode()
    return Target(credentials.endpoint, roots, certificate, credentials.key.encode(), known=True)


def use_key(endpoint: str, text: str) -> Credentials:
    cache = Cache(hashlib.sha256(text.strip().encode()).hexdigest()[:16], endpoint)
    credentials = cache.read()
    if credentials is not None and not credentials.is_worn(time.time()):
        return credentials
    key = connection.read_key(text)
    credentials = repeat(lambda: connection.log_in(endpoint, key), known=credentials is not None)
    cache.save(credentials)
    return credentials


def use_profile(name: str) -> Credentials:
    stored = Profiles().find(name)
    return refresh(find_newest(stored), find_renewed(stored).save)


def find_renewed(stored: Credentials) -> Cache:
    """The file with the renewed certificate of a profile: profiles.yaml is `k8e connect`'s alone."""
    return Cache(hashlib.sha256(stored.certificate.encode()).hexdigest()[:16], stored.endpoint)


def find_newest(stored: Credentials) -> Credentials:
    renewed = find_renewed(stored).read()
    return renewed if renewed is not None and renewed.expires_at > stored.expires_at else stored


def use_profile_of(endpoint: str) -> Target | None:
    name = Profiles().for_endpoint(endpoint)
    return of(use_profile(name)) if name else None


def refresh(credentials: Credentials, save: Callable[[Credentials], None]) -> Credentials:
    """Renews the certificate when a third of its life is left. While it is valid, a renewal that fails is no error."""
    now = time.time()
    if not credentials.is_worn(now):
        return credentials
    try:
        renewed = renew(credentials)
    except Failure:
        if now >= credentials.expires_at:
            raise
        return credentials
    with contextlib.suppress(Failure):  # the next command renews it anew
        save(renewed)
    return renewed


def renew(credentials: Credentials) -> Credentials:
    """Renews by the certificate itself; for a user of this machine at the unix socket. If the socket is closed to the
    user, the gateway's own refusal says what to do."""
    try:
        return connection.renew(credentials)
    except Failure as failure:
        found = log_in_here(credentials.endpoint) if failure.code == AT_SOCKET else None
        if found is None:
            raise
        return found


def use_files(endpoint: str) -> Target | None:
    """K8E_SANDBOX_CERT is our certificate, followed by the CAs to trust, if K8E_SANDBOX_KEY has its key. CERT alone has
    the CAs."""
    certificate_path, key_path = os.environ.get("K8E_SANDBOX_CERT"), os.environ.get("K8E_SANDBOX_KEY")
    if not certificate_path:
        return None
    try:
        certificates = Path(certificate_path).read_bytes()
        key = Path(key_path).read_bytes() if key_path else None
    except OSError as error:
        hint = "both name PEM files that you can read; unset them to use a connection profile"
        problem = "K8E_SANDBOX_CERT or _KEY cannot be read"
        raise Failure("certificate_unreadable", problem, detail=str(error), hint=hint) from error
    if key is None:
        token_file = os.environ.get("K8E_SANDBOX_TOKEN_FILE", "")
        if token_file:
            read_token(token_file)
        published = (anonymous.CERTIFICATE.encode(), anonymous.KEY.encode())
        return Target(endpoint, certificates, *published, token_file)
    end = b"-----END CERTIFICATE-----"
    own, found, rest = certificates.partition(end)
    return Target(endpoint, rest.strip() or find_roots(), own + found + b"\n", key)


def use_local_daemon(endpoint: str) -> Target | None:
    credentials = log_in_here(endpoint)
    return of(credentials) if credentials else None


def log_in_here(endpoint: str) -> Credentials | None:
    """A user of this machine needs no key for its own gateway. None: it is another machine's, or closed to the user."""
    host, port = connection.split_endpoint(endpoint)
    if not client.has_daemon or host not in LOOPBACK or not os.access(f"{run_dir()}/k8e.sock", os.W_OK):
        return None
    private, request = make_request()
    try:
        login = LocalClient().log_in(request).parse()
    except ServiceError:
        return None
    if connection.split_endpoint(login["endpoint"])[1] != port:
        return None
    return Credentials(
        endpoint=endpoint,
        ca_certificate=login["ca_certificate"],
        certificate=login["certificate"],
        key=private.decode(),
        issued_at=time.time(),
        expires_at=login["expires_at"],
    )


def find_roots() -> bytes | None:
    """The CA from the gateway's own files, else the cluster's; None: the system's CAs."""
    own = Path(os.environ.get("K8E_STATE_DIR") or "/var/lib/k8e") / "identity" / "ca.crt"
    try:
        return own.read_bytes()
    except OSError:
        return read_kubeconfig(Path(os.environ.get("KUBECONFIG") or "/etc/k8e/k8e.yaml"))


def read_kubeconfig(path: Path) -> bytes | None:
    """The CA of the current cluster; None if it cannot be found."""
    import yaml

    try:
        content: Any = yaml.safe_load(path.read_bytes())
        current = content.get("current-context")
        contexts = {one["name"]: one["context"]["cluster"] for one in content.get("contexts") or ()}
        clusters = {one["name"]: one["cluster"] for one in content.get("clusters") or ()}
        cluster = clusters[contexts[current]] if current else next(iter(clusters.values()))
        if "certificate-authority-data" in cluster:
            return base64.b64decode(cluster["certificate-authority-data"])
        return Path(path.parent, str(cluster["certificate-authority"])).read_bytes()
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError, StopIteration):
        return None
