"""The paths of all files of a sandbox and of the engine. Those of a sandbox are derived from its id."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SandboxPaths:
    top: Path

    @property
    def record(self) -> Path:
        return self.top / "sandbox.json"

    @property
    def egress(self) -> Path:
        return self.top / "egress.json"

    @property
    def disk_image(self) -> Path:
        return self.top / "disk.img"

    @property
    def disk(self) -> Path:
        """Mount point of the image; its `root` is the sandbox's root."""
        return self.top / "disk"

    @property
    def root(self) -> Path:
        return self.disk / "root"

    @property
    def workspace(self) -> Path:
        """Beside the root and not in it: what is mounted at /workspace, here and perhaps in other sandboxes, is a
        directory that no process inside can move or replace."""
        return self.disk / "workspace"

    @property
    def mounts(self) -> Path:
        """Mount points on the machine of what the sandbox sees besides its disk."""
        return self.top / "mounts"

    @property
    def slots(self) -> Path:
        """Mount points of its slots, until they are filled (mounts/slots.py)."""
        return self.top / "slots"

    @property
    def upper(self) -> Path:
        """The sandbox's own layer, above those of an image."""
        return self.disk / "upper"

    @property
    def work(self) -> Path:
        """The kernel's working directory, beside that layer."""
        return self.disk / "work"

    @property
    def aside(self) -> Path:
        """Mount point of the lower layers for a moment, while the root is mounted."""
        return self.top / "layers"

    @property
    def place(self) -> Path:
        """The user, environment and directory of commands, where the image decides on them."""
        return self.top / "place.json"

    @property
    def veils(self) -> Path:
        """Upper layers of the overlays that hide names (mounts/veil.py)."""
        return self.top / "veils"

    @property
    def private(self) -> Path:
        """On the sandbox's disk: upper layers of its copies of directories (mounts/private_parts.py)."""
        return self.disk / "private"

    @property
    def placeholders(self) -> Path:
        """The record of what was made in directories of the machine and has to be removed there."""
        return self.top / "placeholders.json"

    @property
    def bundle(self) -> Path:
        return self.top / "bundle"

    @property
    def runtime_log(self) -> Path:
        """On the sandbox's disk: gVisor's processes keep it open, and could fill the machine's with it."""
        return self.disk / "runtime.log"

    @property
    def link(self) -> Path:
        """Where the agent makes its socket: on the sandbox's own disk, because its root can write there."""
        return self.disk / "link"

    @property
    def socket(self) -> Path:
        return self.link / "agent.sock"


@dataclass(frozen=True, slots=True)
class Layout:
    state: Path
    run: Path

    @property
    def sandboxes(self) -> Path:
        return self.state / "sandboxes"

    @property
    def kept(self) -> Path:
        """Directories of sandboxes that have no record, with their disks, for people who want the files."""
        return self.state / "kept"

    @property
    def images(self) -> Path:
        return self.state / "images"

    @property
    def layers(self) -> Path:
        """Unpacked layers of OCI images: each a lower directory of overlayfs, under the hex sha256 of its archive."""
        return self.state / "layers"

    @property
    def oci(self) -> Path:
        """The records of OCI images, and what is under way (images/store.py)."""
        return self.state / "oci"

    @property
    def agents(self) -> Path:
        return self.state / "agents"

    def sandbox(self, name: str) -> SandboxPaths:
        return SandboxPaths(self.sandboxes / name)

    def runtime_root(self, runtime: str) -> Path:
        return self.run / runtime

    @property
    def tag(self) -> str:
        """Makes names on the machine (tables, groups) unique: two daemons, a test beside a product, never meet."""
        return hashlib.sha256(bytes(self.state)).hexdigest()[:8]

    @property
    def cgroup(self) -> str:
        return f"k8e-{self.tag}"
