"""Reads the parts of a request that mean the same at every door. Whether a value is allowed is for core to decide."""

from __future__ import annotations

from typing import Final

from k8e.core.model import REMOTE, HostsChange, ManifestEntry, ManifestRepo, Meant
from k8e.doors.errors import invalid

LONGEST_TENANT: Final = 200  # a name, and the name of a part


def read_mode(text: str) -> bool:
    """Whether a file is appended to."""
    if text not in ("w", "a"):
        raise invalid("mode", f"{text[:64]!r} is no way to write", hint="w replaces, a appends")
    return text == "a"


def read_flag(field: str, text: str) -> bool:
    """A flag of a query."""
    if text not in ("0", "1"):
        raise invalid(field, f"{text[:64]!r} is neither yes nor no", hint="1 or 0")
    return text == "1"


def read_all(field: str, text: str, usual: str, things: str) -> bool:
    """Whether a list has all things, or the usual ones only."""
    if text not in (usual, "all"):
        raise invalid(field, f"{text[:64]!r} is no choice of {things}", hint=f"{usual} or all")
    return text == "all"


def read_meant(tenant: str, owner: str) -> Meant:
    """The tenant and the owner whose sessions a request is about."""
    if len(tenant) > LONGEST_TENANT:
        raise invalid("tenant_id", "this is no tenant's name")
    if owner in ("", "gateway"):
        return Meant(REMOTE if owner else None, tenant)
    try:
        return Meant(int(owner), tenant)
    except ValueError:
        raise invalid("owner", f"{owner[:64]!r} is no owner", hint="a user id, or gateway") from None


def read_hosts_change(change: HostsChange, *, clear: bool) -> HostsChange:
    if clear and change != HostsChange():
        raise invalid("clear", "clear leaves nothing on the list and cannot be given together with anything else")
    return HostsChange(hosts=()) if clear else change


def read_manifest(text: str, repo: str, ref: str) -> tuple[ManifestEntry, ...]:
    """Reads the manifest, and the repository that is named beside it."""
    if ref and not repo:
        raise invalid("git_ref", "git_ref is given without git_repo")
    entries: tuple[ManifestEntry, ...] = ()
    if text:
        from k8e.core.sandbox.manifest import parse_manifest  # imports a YAML parser

        entries = parse_manifest(text)
    return (*entries, ManifestRepo(name_clone(repo), repo, ref)) if repo else entries


def name_clone(repo: str) -> str:
    """The directory that `git clone` would choose."""
    name = repo.rstrip("/").replace(":", "/").rpartition("/")[2].removesuffix(".git")
    if not name:
        raise invalid("git_repo", "git_repo does not name a repository")
    return name
