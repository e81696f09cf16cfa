"""The image of sandboxes that name none, for a cluster without a registry: made of the packages that this machine's own
sources offer, or of a tar archive, and put beside the programs. Its name has its hash: two nodes with different files
never have them under one name.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from k8e.cluster.errors import BuildFailed, StartFailed
from k8e.cluster.image import Image, make_archive
from k8e.cluster.programs import SANDBOX_IMAGE

Say = Callable[[str], None]
REPOSITORY: Final = "k8e.local/sandbox"
_NAME: Final = "io.containerd.image.name"
_EPOCH: Final = "1700000000"
_LAST: Final = 2000


def write_sandbox_image(folder: Path, root: Path | None, say: Say) -> Path:
    """Writes the archive; `root` is a tar archive of its files. One that is there stays, unless `root` is given."""
    target = folder / SANDBOX_IMAGE
    if root is None and target.exists():
        return target
    if root is None:
        with tempfile.TemporaryDirectory(prefix="k8e-sandbox-image-") as scratch:
            say("the image of sandboxes, from this machine's package sources")
            layer = _fetch(Path(scratch)).read_bytes()
    else:
        layer = _read(root)
    name = f"{REPOSITORY}:{hashlib.sha256(layer).hexdigest()[:12]}"
    archive = make_archive(name, [Image(platform.machine(), [layer], ["/bin/sh"])], compress=True)
    target.parent.mkdir(mode=0o755, exist_ok=True)
    draft = target.with_name(f".{target.name}")
    draft.write_bytes(archive)
    os.chmod(draft, 0o644)
    draft.replace(target)
    return target


def read_name(archive: Path) -> str:
    """Returns the name of the image in an archive, which is near its beginning."""
    try:
        with tarfile.open(archive) as content:
            index = content.extractfile("index.json")
            assert index is not None
            return str(json.load(index)["manifests"][0]["annotations"][_NAME])
    except (OSError, tarfile.TarError, KeyError, IndexError, ValueError) as error:
        hint = "remove it, and let `k8e cluster build` make it anew"
        raise StartFailed("images_missing", f"{archive} has no image", detail=str(error), hint=hint) from error


def _read(root: Path) -> bytes:
    try:
        return root.read_bytes()
    except OSError as error:
        hint = "--sandbox-root names a tar archive of the files that sandboxes have"
        raise BuildFailed("sandbox_root_unusable", f"{root} cannot be read", detail=str(error), hint=hint) from error


def _fetch(scratch: Path) -> Path:
    """As `k8e image build-base` does on one machine: the same packages, from the same sources."""
    from k8e.engine.local.images.base import PACKAGES, choose_options, choose_sources, read_release

    if shutil.which("mmdebstrap") is None:
        hint = "apt-get install mmdebstrap; or --sandbox-root FILE, or --without-sandboxes"
        raise BuildFailed("mmdebstrap_missing", "the image of sandboxes is made with mmdebstrap", hint=hint)
    listing = "$(ORIGIN)|$(CODENAME)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)|$(SOURCESENTRY)"
    codename = read_release(Path("/etc/os-release").read_text()).get("VERSION_CODENAME", "")
    known = _run("apt-get", "indextargets", "--format", listing, "Created-By: Packages")
    sources = choose_sources(known, codename, lambda name: Path(name).read_text())
    if not sources:
        raise _failure("apt knows no packages of this distribution")
    (scratch / "sources.list").write_text("".join(f"{source.line}\n" for source in sources))
    target = scratch / "root.tar"
    _run(
        *("mmdebstrap", f"--mode={'root' if os.geteuid() == 0 else 'unshare'}", "--variant=minbase", "--format=tar"),
        f"--include={','.join(PACKAGES)}",
        "--skip=output/dev",
        *(f"--aptopt={option}" for option in choose_options(_run("apt-config", "dump", "Acquire"))),
        '--aptopt=APT::Sandbox::User "root"',
        '--customize-hook=rm -f "$1"/etc/resolv.conf "$1"/etc/hostname',
        *(codename, str(target), str(scratch / "sources.list")),
        environment={"SOURCE_DATE_EPOCH": _EPOCH, "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8"},
    )
    return target


def _run(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise _failure((done.stdout + done.stderr)[-_LAST:])
    return done.stdout


def _failure(detail: str) -> BuildFailed:
    hint = "does `apt-get update` work? It uses the same sources; or --sandbox-root FILE"
    return BuildFailed("sandbox_image_not_built", "the image of sandboxes cannot be made", detail=detail, hint=hint)
