"""The files below ~/.k8e/sandbox that `k8e connect` writes and all clients of a user share. They contain private keys:
a file that other users could read or change is refused.

    profiles.yaml              gateways that have a name
    certificates/HASH@HOST     the certificate that the one with this hash was exchanged for, when it was renewed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandbox_client._errors import InvalidArgument
from sandbox_client._hints import find_hint


@dataclass(frozen=True, slots=True)
class Credentials:
    """A gateway, a client's certificate for it, and the CA that the gateway's own comes from. PEM."""

    endpoint: str
    ca_certificate: str
    certificate: str
    key: str = field(repr=False)
    issued_at: float
    expires_at: float

    def is_worn(self, now: float) -> bool:
        """Whether less than a third of its life is left."""
        return now > self.expires_at - (self.expires_at - self.issued_at) / 3


def find_folder() -> Path:
    return Path(os.path.expanduser("~")) / ".k8e" / "sandbox"


def unusable(path: Path, cause: object) -> InvalidArgument:
    code = "profile_unusable"
    return InvalidArgument(f"{path} cannot be used", code=code, detail=str(cause), hint=find_hint(code))


def read_private(path: Path) -> bytes | None:
    """None if there is no file."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise unusable(path, "others could read or change it")
            return file.read(1 << 20)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error) from error


def read_credentials(path: Path, fields: object) -> Credentials:
    try:
        assert isinstance(fields, Mapping)
        values = {name: str(fields[name]) for name in ("endpoint", "ca_certificate", "certificate", "key")}
        return Credentials(**values, issued_at=float(fields["issued_at"]), expires_at=float(fields["expires_at"]))
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise unusable(path, f"it is not as k8e connect wrote it: {error!r}") from error


class Profiles:
    """Gateways by name, and the current one, which is used if none is named and this machine has no daemon."""

    def __init__(self) -> None:
        self.path = find_folder() / "profiles.yaml"
        import yaml  # takes a while, and most clients have no use for it

        try:
            content = yaml.safe_load(read_private(self.path) or b"") or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise unusable(self.path, error) from error
        profiles = content.get("profiles") if isinstance(content, dict) else None
        if content and not isinstance(profiles, dict):
            raise unusable(self.path, "it has no profiles")
        self._content: dict[str, Any] = content
        self._profiles: dict[str, Any] = profiles or {}

    @property
    def current(self) -> str:
        name = self._content.get("current")
        return name if isinstance(name, str) and name in self._profiles else ""

    def find(self, name: str) -> Credentials:
        if name not in self._profiles:
            known = ", ".join(sorted(map(str, self._profiles))) or "none"
            code, error, detail = "no_such_profile", f"there is no profile {name}", f"there are: {known}"
            raise InvalidArgument(error, code=code, detail=detail, field="profile", hint=find_hint(code))
        return read_credentials(self.path, self._profiles[name])

    def for_endpoint(self, endpoint: str) -> str:
        """The name of the first profile for it; empty if there is none."""
        for name, fields in self._profiles.items():
            if isinstance(fields, dict) and fields.get("endpoint") == endpoint:
                return str(name)
        return ""


class RenewedCertificate:
    """The certificate for which a profile's was exchanged. A file of its own, which is replaced as a whole: clients
    that renew at the same time need no lock, and profiles.yaml is `k8e connect`'s alone."""

    def __init__(self, stored: Credentials) -> None:
        digest = hashlib.sha256(stored.certificate.encode()).hexdigest()[:16]
        plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-"
        place = "".join(letter if letter in plain else "_" for letter in stored.endpoint)
        self._path = find_folder() / "certificates" / f"{digest}@{place}"
        self._stored = stored

    def read(self) -> Credentials:
        """The newest: the renewed one, else the profile's own."""
        content = read_private(self._path)
        if content is None:
            return self._stored
        try:
            renewed = read_credentials(self._path, json.loads(content))
        except (ValueError, InvalidArgument):
            return self._stored  # it is renewed anew
        return renewed if renewed.expires_at > self._stored.expires_at else self._stored

    def save(self, renewed: Credentials) -> None:
        """A home that cannot be written is no error: this process has the certificate, the next one renews anew."""
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(json.dumps(asdict(renewed)).encode())
            draft.replace(self._path)
