"""Gateways that the command line knows, in files below ~/.k8e/sandbox. They contain private keys: only their user can
read them.

profiles.yaml              gateways that have a name (`k8e connect`)
certificates/HASH@HOST     the certificate for which the API key with this hash, from the environment, or the profile's
                           certificate with this hash was exchanged

A file in certificates/ is replaced as a whole, so that clients which renew at the same time need no lock. The SDKs read
and write the same files.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k8e.cli.portable import NOFOLLOW, find_user, lock_folder
from k8e.cli.process import Failure


@dataclass(frozen=True, slots=True)
class Credentials:
    endpoint: str
    ca_certificate: str
    certificate: str
    key: str = field(repr=False)
    issued_at: float
    expires_at: float

    def is_worn(self, now: float) -> bool:
        """Whether less than a third of its life is left."""
        return now > self.expires_at - (self.expires_at - self.issued_at) / 3


def folder() -> Path:
    return Path(os.path.expanduser("~")) / ".k8e" / "sandbox"


def unusable(path: Path, cause: object, hint: str = "") -> Failure:
    return Failure("profile_unusable", f"{path} cannot be used", detail=str(cause), hint=hint or "k8e connect makes it")


def read_private(path: Path) -> bytes | None:
    """None if there is no file. A key that other users could read is refused."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if (user := find_user()) >= 0 and (found.st_uid != user or stat.S_IMODE(found.st_mode) & 0o077):
                raise unusable(path, "others could read or change it", f"chmod 600 {path}, or connect anew")
            return file.read(1 << 20)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error) from error


def write_private(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        for directory in reversed([path.parent, *path.parent.parents][:3]):
            directory.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        draft.replace(path)
    except OSError as error:
        raise unusable(path, error) from error


@contextmanager
def locked() -> Iterator[None]:
    """Holds the lock without which no process changes these files."""
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = lock_folder(str(folder()))
    except OSError as error:
        raise unusable(folder(), error) from error
    try:
        yield
    finally:
        os.close(descriptor)


def read_credentials(path: Path, fields: object) -> Credentials:
    try:
        assert isinstance(fields, Mapping)
        values = {name: str(fields[name]) for name in ("endpoint", "ca_certificate", "certificate", "key")}
        return Credentials(**values, issued_at=float(fields["issued_at"]), expires_at=float(fields["expires_at"]))
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise unusable(path, f"it is not as we wrote it: {error!r}") from error


class Profiles:
    """Gateways by name, and the current one, which is used if none is named and this machine has no daemon."""

    def __init__(self) -> None:
        self.path = folder() / "profiles.yaml"
        import yaml  # takes a while, and most commands have no use for it

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
            raise Failure(
                "no_such_profile", f"there is no profile {name}", detail=f"there are: {known}", hint="k8e connect"
            )
        return read_credentials(self.path, self._profiles[name])

    def for_endpoint(self, endpoint: str) -> str:
        """The name of the first profile for it; empty if there is none."""
        for name, fields in self._profiles.items():
            if isinstance(fields, dict) and fields.get("endpoint") == endpoint:
                return str(name)
        return ""

    @staticmethod
    def save(name: str, credentials: Credentials, *, make_current: bool) -> None:
        import yaml

        with locked():
            latest = Profiles()
            content = {
                "current": name if make_current else latest.current or name,
                "profiles": {**latest._profiles, name: asdict(credentials)},
            }
            write_private(latest.path, yaml.safe_dump(content, sort_keys=False).encode())


class Cache:
    """The certificate for which an API key, or an older certificate, was exchanged."""

    def __init__(self, digest: str, endpoint: str) -> None:
        plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.-"
        place = "".join(letter if letter in plain else "_" for letter in endpoint)
        self._path = folder() / "certificates" / f"{digest}@{place}"

    def read(self) -> Credentials | None:
        content = read_private(self._path)
        if content is None:
            return None
        try:
            return read_credentials(self._path, json.loads(content))
        except (ValueError, Failure):
            return None  # then it is made anew

    def save(self, credentials: Credentials) -> None:
        write_private(self._path, json.dumps(asdict(credentials)).encode())
