"""Images that every node of a cluster with sandboxes has, without a registry: the agent's, of this installation, and
that of sandboxes, beside the programs. A name has a hash of the content, so that an old and a new one are both there
while a cluster is upgraded."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k8e.cluster.errors import StartFailed
from k8e.cluster.image import Image, make_archive, pack
from k8e.cluster.programs import SANDBOX_IMAGE
from k8e.cluster.sandbox_image import read_name

_AGENT: Final = "k8e.local/k8e-agent"
_USER: Final = "10001:10001"
_PACKAGE: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class NodeImages:
    agent: str  # the name
    agent_archive: bytes
    sandbox: str
    sandbox_archive: Path


def find_images(programs: Path) -> NodeImages:
    """Returns the images of this installation."""
    archive = programs / SANDBOX_IMAGE
    if not archive.is_file():
        hint = (
            "`k8e cluster build` makes it; a cluster without sandboxes: `k8e server --cluster --disable-sandbox-matrix`"
        )
        raise StartFailed("images_missing", f"there is no image of sandboxes: {archive}", hint=hint)
    files = {name: (path.read_bytes(), 0o755) for name, path in _find_agent().items()}
    layer = pack(files, {})
    name = f"{_AGENT}:{hashlib.sha256(layer).hexdigest()[:12]}"
    image = Image(platform.machine(), [layer], ["/k8e-agent-pod"], env=(), user=_USER)
    return NodeImages(name, make_archive(name, [image]), read_name(archive), archive)


def _find_agent() -> dict[str, Path]:
    """The agent's programs are beside the code in a wheel, and below build/ in a checkout."""
    machine = platform.machine()
    released, built = _PACKAGE / "_agent", _PACKAGE.parents[1] / "build" / "agent"
    for found in (
        {
            "k8e-agent-pod": released / f"k8e-agent-pod-{machine}",
            "k8e-loader.so": released / f"k8e-loader-{machine}.so",
        },
        {"k8e-agent-pod": built / "k8e-agent-pod", "k8e-loader.so": built / "k8e-loader.so"},
    ):
        if all(path.is_file() for path in found.values()):
            return found
    hint = "install k8e again; in a checkout: make agent"
    raise StartFailed("images_missing", f"this installation has no agent for {machine}", hint=hint)
