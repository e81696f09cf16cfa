"""Images without docker: OCI archives, as `ctr images import` and `skopeo copy oci-archive:` take them. The same
content has the same digest."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

PAUSE: Final = "k8e.local/pause:1"
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}

_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True, slots=True)
class Image:
    """An image for one architecture, as `uname -m` names it. Layers are tar archives, the lowest first."""

    machine: str
    layers: Sequence[bytes]
    entrypoint: Sequence[str]
    command: Sequence[str] = ()
    env: Sequence[str] = (_PATH,)
    user: str = ""  # empty: root
    labels: Mapping[str, str] | None = None

    @property
    def platform(self) -> dict[str, str]:
        return {"architecture": ARCHITECTURES.get(self.machine, self.machine), "os": "linux"}


def make_image(
    name: str, programs: Mapping[str, bytes], argv: Sequence[str], links: Mapping[str, str] | None = None
) -> bytes:
    """Makes an image for this machine of executable files and symbolic links, both by their path without the leading
    slash."""
    layer = pack({path: (content, 0o755) for path, content in programs.items()}, links or {})
    return make_archive(name, [Image(platform.machine(), [layer], argv)])


def make_archive(name: str, images: Sequence[Image], *, compress: bool = False) -> bytes:
    """Makes an archive of one image, for one or several architectures, under one name."""
    blobs: dict[str, bytes] = {}
    described = [_add_image(image, blobs, compress) for image in images]
    if len(described) == 1:
        top = described[0]
    else:
        top = _add(blobs, _INDEX, _encode({"schemaVersion": 2, "mediaType": _INDEX, "manifests": described}))
    _, _, tag = name.rpartition(":")
    top = {**top, "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag}}
    files = {
        "oci-layout": _encode({"imageLayoutVersion": "1.0.0"}),
        "index.json": _encode({"schemaVersion": 2, "manifests": [top]}),
        **{f"blobs/sha256/{digest.removeprefix('sha256:')}": blob for digest, blob in blobs.items()},
    }
    return pack({path: (content, 0o644) for path, content in files.items()}, {})


def _add_image(image: Image, blobs: dict[str, bytes], compress: bool) -> dict[str, Any]:
    kind = f"{_LAYER}+gzip" if compress else _LAYER
    stored = [gzip.compress(layer, 6, mtime=0) if compress else layer for layer in image.layers]
    config = {
        **image.platform,
        "config": {
            "Entrypoint": list(image.entrypoint),
            "Env": list(image.env),
            **({"Cmd": list(image.command)} if image.command else {}),
            **({"User": image.user} if image.user else {}),
            **({"Labels": dict(image.labels)} if image.labels else {}),
        },
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in image.layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _add(blobs, _CONFIG, _encode(config)),
        "layers": [_add(blobs, kind, layer) for layer in stored],
    }
    return {**_add(blobs, _MANIFEST, _encode(manifest)), "platform": image.platform}


def pack(files: Mapping[str, tuple[bytes, int]], links: Mapping[str, str]) -> bytes:
    """Packs files, with their modes, and symbolic links into a tar archive; all are root's, and as old as the clock
    allows."""
    result = io.BytesIO()
    with tarfile.open(fileobj=result, mode="w") as archive:
        folders = {str(parent) for path in (*files, *links) for parent in _parents(path)}
        for folder in sorted(folders):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for path, (content, mode) in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
        for path, target in links.items():
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return result.getvalue()


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: end + 1]) for end in range(len(parts))]


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _add(blobs: dict[str, bytes], kind: str, content: bytes) -> dict[str, Any]:
    digest = _digest(content)
    blobs[digest] = content
    return {"mediaType": kind, "digest": digest, "size": len(content)}


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
