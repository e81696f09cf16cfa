"""The certificates of a cluster for tests: one authority for all, in one folder, that lives as long as the cluster."""

from __future__ import annotations

import time
from pathlib import Path

from k8e.cluster.trust.authority import Authority, Leaf
from k8e.cluster.trust.leaves import (
    Leaves,
    contain_file,
    describe_kubeconfig,
    make_signing_key,
    read_public_key,
    write_file,
)


class Secrets:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = Authority.open(folder, "k8e cluster", time.time())
        self._leaves = Leaves(folder)

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def key(self) -> Path:
        return self.folder / "ca.key"

    def issue(self, name: str, leaf: Leaf) -> Path:
        """Writes a certificate with its key."""
        return self._leaves.write(name, self._authority, leaf)

    def write_kubeconfig(self, path: Path, server: str, leaf: Leaf) -> Path:
        """Writes a kubeconfig with a certificate of its own."""
        user = contain_file(self.issue(path.stem, leaf).read_bytes())
        return write_file(path, describe_kubeconfig(server, self._authority.certificate, user))

    def make_key(self, name: str) -> tuple[Path, Path]:
        """Makes a key that signs tokens; returns the files of the public and the private half."""
        private = make_signing_key(self.folder / f"{name}.key")
        return write_file(self.folder / f"{name}.pub", read_public_key(private)), private
