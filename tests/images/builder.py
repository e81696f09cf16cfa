"""Images as tests need them: layers byte by byte, put together in the forms that tools write."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
OTHER = "riscv64"
OCI, DOCKER = "application/vnd.oci.image.", "application/vnd.docker.distribution."


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def entry(name: str, content: bytes | None = None, **settings: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A file with content, a directory without, and anything else by its `type`."""
    info = tarfile.TarInfo(name)
    info.type = settings.pop("type", tarfile.DIRTYPE if content is None else tarfile.REGTYPE)
    info.mode = settings.pop("mode", 0o755 if content is None else 0o644)
    info.mtime = settings.pop("mtime", 1_600_000_000)
    for key, value in settings.items():
        setattr(info, key, value)
    data = content or b""
    info.size = settings.get("size", len(data))
    return info, data


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, None, type=kind, linkname=target, mode=0o777)


def make_tar(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data) if data else None)
    return buffer.getvalue()


def compress(content: bytes, how: str) -> bytes:
    if how == "gzip":
        return gzip.compress(content, mtime=0)
    if how == "zstd":
        return subprocess.run(["zstd", "-qc"], input=content, capture_output=True, check=True).stdout
    return content


@dataclass(frozen=True)
class Built:
    """An image with all its blobs, by digest."""

    digest: str
    media_type: str
    blobs: Mapping[str, bytes]
    diff_ids: Sequence[str] = ()
    layers: Sequence[str] = ()

    @property
    def manifest(self) -> bytes:
        return self.blobs[self.digest]


def build(
    *layers: bytes,
    how: str | Sequence[str] = "gzip",
    config: Mapping[str, Any] | None = None,
    architecture: str = ARCHITECTURE,
    family: str = OCI,
) -> Built:
    ways = [how] * len(layers) if isinstance(how, str) else how
    packed = [compress(layer, way) for layer, way in zip(layers, ways, strict=True)]
    diff_ids = [digest_of(layer) for layer in layers]
    settings = {
        "architecture": architecture,
        "os": "linux",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    text = json.dumps(settings).encode()
    docker = family == DOCKER
    manifest_type = f"{DOCKER}manifest.v2+json" if docker else f"{OCI}manifest.v1+json"
    config_type = "application/vnd.docker.container.image.v1+json" if docker else f"{OCI}config.v1+json"
    layer_type = "application/vnd.docker.image.rootfs.diff.tar" if docker else f"{OCI}layer.v1.tar"
    endings = {"gzip": ".gzip" if docker else "+gzip", "zstd": "+zstd", "plain": ""}
    manifest = {
        "schemaVersion": 2,
        "mediaType": manifest_type,
        "config": {"mediaType": config_type, "digest": digest_of(text), "size": len(text)},
        "layers": [
            {"mediaType": layer_type + endings[way], "digest": digest_of(blob), "size": len(blob)}
            for way, blob in zip(ways, packed, strict=True)
        ],
    }
    body = json.dumps(manifest).encode()
    blobs = {digest_of(text): text, digest_of(body): body, **{digest_of(blob): blob for blob in packed}}
    return Built(digest_of(body), manifest_type, blobs, [one[7:] for one in diff_ids], [digest_of(b) for b in packed])


def make_index(*images: tuple[str, Built], family: str = OCI, annotations: Mapping[str, str] | None = None) -> Built:
    """Of (architecture, image)."""
    media_type = f"{OCI}index.v1+json" if family == OCI else f"{DOCKER}manifest.list.v2+json"
    manifests = [
        {
            "mediaType": image.media_type,
            "digest": image.digest,
            "size": len(image.manifest),
            **({"platform": {"architecture": architecture, "os": "linux"}} if architecture else {}),
            **({"annotations": dict(annotations)} if annotations else {}),
        }
        for architecture, image in images
    ]
    body = json.dumps({"schemaVersion": 2, "mediaType": media_type, "manifests": manifests}).encode()
    blobs = {digest: blob for _, image in images for digest, blob in image.blobs.items()}
    return Built(digest_of(body), media_type, {**blobs, digest_of(body): body})


def write_layout(path: Path, image: Built, name: str = "") -> Path:
    """As `skopeo copy ... oci-archive:` has it."""
    notes = {"org.opencontainers.image.ref.name": name} if name else {}
    entry_ = {"mediaType": image.media_type, "digest": image.digest, "size": len(image.manifest), "annotations": notes}
    index = json.dumps({"schemaVersion": 2, "manifests": [entry_]}).encode()
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": index}
    files |= {f"blobs/sha256/{digest[7:]}": blob for digest, blob in image.blobs.items()}
    path.write_bytes(make_tar(*(entry(name, content) for name, content in files.items())))
    return path


@dataclass
class Docker:
    """As older versions of `docker save` write it; a layer that occurs twice is a link the second time."""

    layers: Sequence[bytes]
    config: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ("demo:1",)

    def write(self, path: Path) -> Path:
        diff_ids = [digest_of(layer) for layer in self.layers]
        settings = {"architecture": ARCHITECTURE, "os": "linux", "config": dict(self.config)}
        settings["rootfs"] = {"type": "layers", "diff_ids": diff_ids}
        text = json.dumps(settings).encode()
        name = f"{hashlib.sha256(text).hexdigest()}.json"
        entries, names = [entry(name, text)], []
        seen: dict[bytes, str] = {}
        for number, layer in enumerate(self.layers):
            folder = hashlib.sha256(b"%d" % number).hexdigest()
            place = f"{folder}/layer.tar"
            if layer in seen:
                entries.append(link(place, f"../{seen[layer]}"))
            else:
                entries.append(entry(place, layer))
                seen[layer] = place
            names.append(place)
        manifest = [{"Config": name, "RepoTags": list(self.tags), "Layers": names}]
        entries.append(entry("manifest.json", json.dumps(manifest).encode()))
        path.write_bytes(make_tar(*entries))
        return path
