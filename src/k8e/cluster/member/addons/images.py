"""The images of the add-ons: each has one or two static programs, and nothing else. A name has the hash of its content,
so that an old and a new one are both there while a cluster is upgraded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k8e.cluster.build import Components
from k8e.cluster.image import make_image

_PROGRAMS: Final = {
    "agent-sandbox-controller": ("agent-sandbox-controller",),
    "coredns": ("coredns",),
    "local-path-provisioner": ("local-path-provisioner", "local-path-helper"),
    "metrics-server": ("metrics-server",),
}


ADDONS: Final = tuple(_PROGRAMS)


@dataclass(frozen=True, slots=True)
class AddonImage:
    name: str
    make: Callable[[], bytes]  # the archive; only when a node does not have it


def find_addon_images(components: Components) -> dict[str, AddonImage]:
    """Returns the images of those add-ons whose programs are there, by the name of the add-on; reads the programs."""
    found = {}
    for addon, names in _PROGRAMS.items():
        if not components.has(addon):
            continue
        programs = [components.program(name) for name in names]
        name = f"k8e.local/{addon}:{_hash(programs)[:12]}"
        found[addon] = AddonImage(name, lambda name=name, programs=programs: _make(name, programs))  # type: ignore[misc]
    return found


def _make(name: str, programs: Sequence[Path]) -> bytes:
    return make_image(name, {path.name: path.read_bytes() for path in programs}, [f"/{programs[0].name}"])


def _hash(programs: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in programs:
        with open(path, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
