"""Files of certificates, each with its key in the same file: a reader never sees one without the other. They are
renewed in place, when a third of their life is left; components read a changed file by themselves.
"""

from __future__ import annotations

import json
import os
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from k8e.cluster.trust.authority import Authority, Leaf, write_key
from k8e.damage import Damaged, read_own
from k8e.identity.authority import replace_file


class Leaves:
    """The certificates below one folder. `renew` looks at all that were asked for."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self._known: dict[Path, tuple[Authority, Leaf, int]] = {}

    def write(self, name: str, authority: Authority, leaf: Leaf, owner: int = 0) -> Path:
        """Returns the file, which only its owner can read; makes it if it is missing, damaged, another's or old."""
        path = self.folder / f"{name}.pem"
        self._known[path] = (authority, leaf, owner)
        self._refresh(path)
        return path

    def renew(self) -> list[str]:
        """Renews what has to be, and returns its names."""
        return [path.stem for path in list(self._known) if self._refresh(path)]

    def _refresh(self, path: Path) -> bool:
        authority, leaf, owner = self._known[path]
        content = read_if_there(path, owner)
        if content is not None and authority.is_good(content, leaf, self._clock()):
            return False
        write_file(path, authority.issue(leaf, self._clock()), owner)
        return True


def make_signing_key(path: Path) -> Path:
    """Makes the key that signs tokens of service accounts, once. It has no certificate: all servers have the same."""
    if not path.exists():
        write_file(path, write_key(ec.generate_private_key(ec.SECP256R1())))
    return path


def read_public_key(path: Path) -> bytes:
    """Returns the public half of a private key's file (PEM)."""
    key = serialization.load_pem_private_key(read_own(path), None)
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def write_file(path: Path, content: bytes, owner: int = 0, mode: int = 0o600) -> Path:
    """Replaces a file, in a folder of root's through which its owner can pass."""
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    if owner == os.geteuid():
        replace_file(path, content, mode)
        return path
    # Given away under another name: it is never in its place with a wrong owner.
    draft = path.with_name(f".{path.name}.given")
    replace_file(draft, content, mode)
    os.chown(draft, owner, owner)
    draft.replace(path)
    return path


def read_if_there(path: Path, owner: int = 0) -> bytes | None:
    """Returns a file's content; None when it is missing or is not the owner's."""
    try:
        if owner == os.geteuid():
            return read_own(path)
        found = path.lstat()
        return path.read_bytes() if found.st_uid == owner and not path.is_symlink() else None
    except (FileNotFoundError, NotADirectoryError, Damaged):
        return None


def describe_kubeconfig(server: str, authority: bytes, user: Mapping[str, str]) -> bytes:
    """Returns a kubeconfig with one cluster and one user, by its members ("client-certificate", "token", ...). JSON is
    YAML."""
    data = b64encode(authority).decode("ascii")
    content: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "k8e", "cluster": {"server": server, "certificate-authority-data": data}}],
        "users": [{"name": "k8e", "user": dict(user)}],
        "contexts": [{"name": "k8e", "context": {"cluster": "k8e", "user": "k8e"}}],
        "current-context": "k8e",
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def name_file(path: Path) -> dict[str, str]:
    """A kubeconfig's user, by a file that is renewed in its place."""
    return {"client-certificate": str(path), "client-key": str(path)}


def contain_file(content: bytes) -> dict[str, str]:
    """A kubeconfig's user, with the certificate and its key inside: it can be copied to another machine."""
    data = b64encode(content).decode("ascii")
    return {"client-certificate-data": data, "client-key-data": data}
