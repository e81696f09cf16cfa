"""Snapshots of etcd, by its own means: the maintenance interface writes one, `etcdutl` opens it, counts what is in it,
and makes a member's data of it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k8e.cluster.api import Api
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.servers.etcd_members import name_peer

_HASH: Final = 32  # bytes at a snapshot's end: the SHA-256 of all in front of them
_SILENCE: Final = 60.0
_WORK: Final = 600.0
# Above all that programs have seen: they notice that the past has changed, and read everything again.
_BUMP: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SnapshotContent:
    revision: int
    keys: int


def take_snapshot(etcd: Api, path: Path) -> None:
    """Writes a snapshot, which etcd sends as lines of JSON, and checks that it has come whole."""
    digest, last = hashlib.sha256(), b""
    try:
        with open(path, "xb", opener=_private) as file:
            for line in etcd.read_lines("POST", "/v3/maintenance/snapshot", {}, _SILENCE):
                data = last + base64.b64decode(json.loads(line)["result"]["blob"], validate=True)
                file.write(data[len(last) :])
                digest.update(data[:-_HASH])
                last = data[-_HASH:]
            os.fsync(file.fileno())
    except (OSError, http.client.HTTPException, KeyError, TypeError, ValueError, binascii.Error) as error:
        hint = "does etcd run? Is there room on the disk? Its log is in /var/lib/k8e/logs"
        raise ClusterError("snapshot_failed", "etcd sends no whole snapshot", detail=str(error), hint=hint) from error
    if digest.digest() != last:
        raise _damaged(path, "its own hash, at its end, is that of other content")


def check_snapshot(etcdutl: Path, path: Path) -> SnapshotContent:
    """Checks a snapshot: by its own hash, and by opening it and reading every key."""
    size = path.stat().st_size - _HASH
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for position in range(0, max(size, 0), 1 << 20):
            digest.update(file.read(min(1 << 20, size - position)))
        if size <= 0 or file.read() != digest.digest():
            raise _damaged(path, "its own hash, at its end, is that of other content")
    found = _run(etcdutl, path, "snapshot", "status", str(path), "--write-out=json")
    try:
        body: dict[str, Any] = json.loads(found)
        return SnapshotContent(int(body["revision"]), int(body["totalKey"]))
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, found[-500:]) from error


def make_data(etcdutl: Path, snapshot: Path, target: Path, node: str, address: object, name: str) -> None:
    """Makes the data of the first member of a new etcd. With a `name` of its own it is no other etcd's: members of the
    earlier one, which may still run somewhere, cannot take this one for theirs."""
    peer = name_peer(address)
    _run(
        etcdutl,
        snapshot,
        *("snapshot", "restore", str(snapshot), f"--data-dir={target}", f"--name={node}"),
        *(f"--initial-cluster={node}={peer}", f"--initial-advertise-peer-urls={peer}"),
        *(f"--initial-cluster-token={name}", f"--bump-revision={_BUMP}", "--mark-compacted"),
    )


def _run(etcdutl: Path, snapshot: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [str(etcdutl), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_WORK
        )
    except subprocess.TimeoutExpired as error:
        hint = "is the disk very busy? Try again"
        text = f"etcdutl has not read {snapshot.name} in {_WORK:.0f} s"
        raise ClusterError("snapshot_failed", text, hint=hint) from error
    if done.returncode != 0:
        raise _damaged(snapshot, (done.stdout + done.stderr)[-1000:].strip())
    return done.stdout


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _damaged(path: Path, detail: str) -> ClusterError:
    hint = "use another backup; this one is of no use"
    return ClusterError("backup_damaged", f"the snapshot {path.name} is damaged", detail=detail, hint=hint)
