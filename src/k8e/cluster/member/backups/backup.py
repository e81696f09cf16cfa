"""Backups of a cluster: a file with a snapshot of etcd, and with the keys without which it is of no use.

    k8e-backup-20260101T000000Z.tar     0600
        manifest.json                   when, by whom, and the SHA-256 of each file
        etcd.db
        keys/NAME                       as in key_files.py

Who has the file can be every user of the cluster: it is as secret as a server's disk.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from k8e.cluster.api import Api
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.backups.snapshot import check_snapshot, take_snapshot
from k8e.cluster.member.layout import Layout
from k8e.cluster.member.servers.key_files import list_key_files, read_keys

KEPT: Final = 6
EVERY: Final = 12 * 3600.0
_FORMAT: Final = 1
_NAME: Final = re.compile(r"k8e-backup-(\d{8}T\d{6}Z)\.tar")
_SNAPSHOT: Final = "etcd.db"
_MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class Backup:
    path: Path
    taken: str
    node: str
    revision: int
    keys: int  # objects in etcd
    size: int

    @classmethod
    def read(cls, path: Path, manifest: Mapping[str, Any]) -> Self:
        numbers = int(manifest["revision"]), int(manifest["keys"])
        return cls(path, str(manifest["taken"]), str(manifest["node"]), *numbers, path.stat().st_size)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "taken": self.taken,
            "node": self.node,
            "revision": self.revision,
            "keys": self.keys,
            "size": self.size,
        }


def make_backup(layout: Layout, etcd: Api, etcdutl: Path, node: str, target: Path | None = None) -> Backup:
    """Makes a backup, checks it, and puts it in its place, whole. Blocking, for a thread."""
    now = time.gmtime()
    folder = layout.backups if target is None else target.parent
    if target is None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = target or folder / f"k8e-backup-{time.strftime('%Y%m%dT%H%M%SZ', now)}.tar"
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=folder) as temporary:
        snapshot = Path(temporary, _SNAPSHOT)
        take_snapshot(etcd, snapshot)
        content = check_snapshot(etcdutl, snapshot)
        manifest = {
            "format": _FORMAT,
            "k8e": importlib.metadata.version("k8e"),
            "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
            "node": node,
            "revision": content.revision,
            "keys": content.keys,
        }
        draft = Path(temporary, "draft.tar")
        _pack(draft, snapshot, read_keys(layout), manifest)
        check_backup(draft, etcdutl)
        draft.replace(path)
    return Backup.read(path, manifest)


def check_backup(path: Path, etcdutl: Path) -> Backup:
    """Checks a backup: every hash in it, and its snapshot by opening it."""
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=path.parent) as temporary:
        return unpack_backup(path, Path(temporary), etcdutl)[0]


def unpack_backup(path: Path, folder: Path, etcdutl: Path) -> tuple[Backup, Path, dict[str, bytes]]:
    """Returns what is in a checked backup: its snapshot, in this folder, and its keys."""
    try:
        with tarfile.open(path) as archive:
            manifest: dict[str, Any] = json.loads(_read(archive, _MANIFEST))
            if manifest["format"] != _FORMAT:
                raise _damaged(path, f"its form is {manifest['format']}, and this version knows {_FORMAT}")
            hashes: dict[str, str] = manifest["files"]
            if set(hashes) != set(archive.getnames()) - {_MANIFEST}:
                raise _damaged(path, "its list does not name the files that are in it")
            snapshot = folder / _SNAPSHOT
            with open(snapshot, "xb") as file:
                shutil.copyfileobj(_open(archive, _SNAPSHOT), file)
            keys = {name.removeprefix("keys/"): _read(archive, name) for name in hashes if name != _SNAPSHOT}
        backup = Backup.read(path, manifest)
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, str(error)) from error
    found = {f"keys/{name}": hashlib.sha256(content).hexdigest() for name, content in keys.items()}
    if {**found, _SNAPSHOT: _hash_file(snapshot)} != hashes:
        raise _damaged(path, "a file in it does not have the hash that its list says")
    check_snapshot(etcdutl, snapshot)
    return backup, snapshot, keys


def list_backups(layout: Layout) -> list[Path]:
    """Returns the backups that this server has made by itself, the oldest first."""
    if not layout.backups.is_dir():
        return []
    return sorted(path for path in layout.backups.iterdir() if _NAME.fullmatch(path.name))


def remove_old(layout: Layout, kept: int = KEPT) -> list[Path]:
    old = list_backups(layout)[:-kept]
    for path in old:
        path.unlink(missing_ok=True)
    return old


def is_due(layout: Layout, now: float, every: float = EVERY) -> bool:
    """Also when the newest one is of the future: the clock was set back."""
    backups = list_backups(layout)
    return not backups or not 0 <= now - backups[-1].stat().st_mtime < every


def _pack(path: Path, snapshot: Path, keys: Mapping[str, bytes], manifest: dict[str, Any]) -> None:
    files = {f"keys/{name}": hashlib.sha256(content).hexdigest() for name, content in keys.items()}
    manifest["files"] = {**files, _SNAPSHOT: _hash_file(snapshot)}
    with open(path, "xb") as file:
        os.fchmod(file.fileno(), 0o600)
        with tarfile.open(fileobj=file, mode="w") as archive:
            _add(archive, _MANIFEST, json.dumps(manifest, indent=1).encode())
            for name in list_keys(keys):
                _add(archive, f"keys/{name}", keys[name])
            archive.add(snapshot, _SNAPSHOT, filter=_plain)
        file.flush()
        os.fsync(file.fileno())


def list_keys(keys: Mapping[str, bytes]) -> list[str]:
    """In the order in which they are written to a disk."""
    known = list(list_key_files(Layout()))
    return sorted(keys, key=known.index)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    archive.addfile(member, io.BytesIO(content))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o600
    return member


def _open(archive: tarfile.TarFile, name: str) -> Any:
    found = archive.extractfile(name)
    if found is None:
        raise ValueError(f"{name} is no file")
    return found


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    content: bytes = _open(archive, name).read()
    return content


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, detail: str) -> ClusterError:
    hint = "use another one; `k8e cluster backup --check FILE` checks a backup"
    return ClusterError("backup_damaged", f"{path} is no whole backup", detail=detail, hint=hint)
