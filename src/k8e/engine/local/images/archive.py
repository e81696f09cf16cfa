"""Images out of a file: what `docker save` writes, and OCI layouts in a tar.

The file is not trusted. It is only ever read, at places that its own table of contents gives and that are checked to
lie in it; a part of it is used when its digest is right.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from k8e.engine import EngineError
from k8e.engine.images import Image
from k8e.engine.local.images import manifest as manifests
from k8e.engine.local.images.layers import Cancelled, Decompressed, decompressor, refused, unpack, unpack_file
from k8e.engine.local.images.limits import ImageLimits
from k8e.engine.local.images.manifest import Configuration, Descriptor
from k8e.engine.local.images.store import Store
from k8e.engine.local.images.unpacker import Header, Refused

_PIECE = 1 << 20
_HINT = "`docker save`, `podman save` and `skopeo copy ... oci-archive:FILE` write what can be imported."


@dataclass(frozen=True, slots=True)
class Part:
    """A file in the archive."""

    offset: int
    size: int


class Slice:
    """A part of a file, read as if it were one."""

    def __init__(self, file: IO[bytes], part: Part) -> None:
        file.seek(part.offset)
        self._file = file
        self._left = part.size

    def read(self, size: int, /) -> bytes:
        piece = self._file.read(min(size, self._left))
        self._left -= len(piece)
        return piece


def no_image(cause: str) -> EngineError:
    return EngineError("image", cause, _HINT, "refused")


class Archive:
    def __init__(self, file: IO[bytes], limits: ImageLimits) -> None:
        self._file = file
        self._limits = limits
        self._parts: dict[str, Part] = {}
        self._links: dict[str, str] = {}
        try:
            self._list()
        except (tarfile.TarError, Refused, EOFError, ValueError, RecursionError, OverflowError) as error:
            raise no_image(f"the file is no archive of an image: {error}") from error

    def _list(self) -> None:
        with tarfile.open(fileobj=self._file, mode="r:", tarinfo=Header, errors="surrogateescape") as archive:
            count = 0
            while (member := archive.next()) is not None:
                count += 1
                if count > self._limits.archive_entries:
                    raise no_image(f"the archive has more than {self._limits.archive_entries} entries")
                name = posixpath.normpath(member.name)
                if member.isreg() and not member.issparse():
                    self._parts[name] = Part(member.offset_data, member.size)
                elif member.issym():  # docker names a layer that it has already written like this
                    self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
                elif member.islnk():
                    self._links[name] = posixpath.normpath(member.linkname)
                archive.members.clear()  # type: ignore[attr-defined] # it would keep them all

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def part(self, name: object) -> Part:
        if not isinstance(name, str):
            raise no_image("the archive refers to something that has no name")
        name = posixpath.normpath(name)
        found = self._parts.get(self._links.get(name, name))
        if found is None:
            raise no_image(f"the archive has no {name[:200]!r}")
        return found

    def read(self, name: object) -> bytes:
        """Something that is parsed."""
        part = self.part(name)
        if part.size > self._limits.manifest:
            raise no_image(f"{str(name)[:200]!r} has more than {self._limits.manifest} bytes")
        content = Slice(self._file, part).read(part.size)
        if len(content) != part.size:
            raise no_image("the archive ends too early")
        return content

    def read_blob(self, descriptor: Descriptor) -> bytes:
        content = self.read(blob_name(descriptor.digest))
        if manifests.digest_of(content) != descriptor.digest:
            raise refused(f"what the archive calls {descriptor.digest} is something else")
        return content

    def open(self, part: Part) -> Slice:
        return Slice(self._file, part)

    def head(self, part: Part) -> bytes:
        return Slice(self._file, part).read(4)


def blob_name(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    return f"blobs/{algorithm}/{value}"


@dataclass(frozen=True, slots=True)
class Found:
    """An image in an archive."""

    digest: str
    configuration: Configuration
    layers: tuple[tuple[Part, str], ...]  # each with its digest as it is there; empty: not known
    names: tuple[str, ...]


def find_image(archive: Archive, machine: str, limits: ImageLimits) -> Found:
    """`docker save` of today writes both forms; the OCI one says more of what it holds."""
    if "index.json" in archive and "oci-layout" in archive:
        return find_in_layout(archive, machine, limits)
    if "manifest.json" in archive:
        return find_in_docker(archive, machine, limits)
    raise no_image("the archive has neither an index.json nor a manifest.json")


def find_in_layout(archive: Archive, machine: str, limits: ImageLimits) -> Found:
    value = manifests.parse_object(archive.read("index.json"), "index", limits)
    names: list[str] = []
    digest = ""
    for _ in range(4):  # an index in an index, and what it points to
        entries = value.get("manifests")
        if manifests.find_type(value) in manifests.MANIFEST_TYPES:
            break
        chosen = manifests.choose_platform(value, machine)
        names += [name for name in names_of(entries, chosen.digest) if name not in names]
        digest = chosen.digest
        value = manifests.parse_object(archive.read_blob(chosen), "manifest", limits)
    manifest = manifests.read_manifest(digest, value, limits)
    if not digest:
        raise no_image("the archive's index is no index")
    configuration = manifests.read_configuration(archive.read_blob(manifest.config), machine, limits)
    if len(configuration.diff_ids) != len(manifest.layers):
        raise refused("the manifest and the configuration do not agree about the layers")
    layers = tuple((archive.part(blob_name(layer.digest)), layer.digest) for layer in manifest.layers)
    return Found(digest, configuration, layers, tuple(names))


def names_of(entries: object, digest: str) -> list[str]:
    """The image's names in the archive, as the various tools write them."""
    names = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or entry.get("digest") != digest:
            continue
        notes = entry.get("annotations")
        for key in ("io.containerd.image.name", "org.opencontainers.image.ref.name"):
            if isinstance(notes, dict) and isinstance(notes.get(key), str):
                names.append(notes[key])
    return names


def find_in_docker(archive: Archive, machine: str, limits: ImageLimits) -> Found:
    import json

    try:
        value: Any = json.loads(archive.read("manifest.json"))
    except (ValueError, RecursionError) as error:
        raise no_image(f"the archive's manifest.json is not JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value) or not value:
        raise no_image("the archive's manifest.json lists no image")
    if len(value) > 1:
        raise no_image(f"the archive has {len(value)} images, and one is imported at a time")
    (entry,) = value
    config = archive.read(entry.get("Config"))
    configuration = manifests.read_configuration(config, machine, limits)
    layers = entry.get("Layers")
    if not isinstance(layers, list) or len(layers) != len(configuration.diff_ids):
        raise refused("the manifest and the configuration do not agree about the layers")
    digest, _ = manifests.write_manifest(config, configuration.diff_ids)
    tags = entry.get("RepoTags") or []
    names = tuple(name for name in tags if isinstance(name, str)) if isinstance(tags, list) else ()
    return Found(digest, configuration, tuple((archive.part(layer), "") for layer in layers), names)


def import_archive(
    path: Path, store: Store, machine: str, limits: ImageLimits, stop: threading.Event, tell: Callable[[int, int], None]
) -> Image:
    """For a thread. `tell`: bytes done, and of how many."""
    with store.scratch() as scratch, path.open("rb") as file:
        if decompressor(os.pread(file.fileno(), 4, 0)) is None:
            return _import(file, store, scratch, machine, limits, stop, tell)
        with (scratch / "archive").open("w+b") as plain:
            decompress(file, path.stat().st_size, plain, limits, stop)
            return _import(plain, store, scratch, machine, limits, stop, tell)


def decompress(file: IO[bytes], packed: int, target: IO[bytes], limits: ImageLimits, stop: threading.Event) -> None:
    """`docker save | gzip`."""
    stream, total = Decompressed(file), 0
    try:
        while piece := stream.read(_PIECE):
            total += len(piece)
            if stop.is_set():
                raise Cancelled
            if total > limits.bytes or (total > limits.ratio_from and total > packed * limits.ratio):
                raise refused("the archive unpacks to more than is taken")
            target.write(piece)
    finally:
        stream.close()
    target.seek(0)


def _import(
    file: IO[bytes],
    store: Store,
    scratch: Path,
    machine: str,
    limits: ImageLimits,
    stop: threading.Event,
    tell: Callable[[int, int], None],
) -> Image:
    archive = Archive(file, limits)
    found = find_image(archive, machine, limits)
    total = sum(part.size for part, _ in found.layers)
    done = 0
    with store.wanting(found.configuration.diff_ids):
        for (part, digest), diff_id in zip(found.layers, found.configuration.diff_ids, strict=True):
            if not store.has_layer(diff_id):
                take_layer(archive, part, digest, diff_id, store, scratch, limits, stop)
            done += part.size
            tell(done, total)
        return store.keep_image(found.digest, found.configuration, found.names)


def take_layer(
    archive: Archive,
    part: Part,
    digest: str,
    diff_id: str,
    store: Store,
    scratch: Path,
    limits: ImageLimits,
    stop: threading.Event,
) -> None:
    with store.new_layer() as target:
        if decompressor(archive.head(part)) is None:
            made = unpack(archive.open(part), part.size, target, limits, stop, lambda _: None)
            packed = f"sha256:{made.diff_id}"
        else:
            # Decompressors read files to their end, and this one ends before the archive does.
            with (scratch / "layer").open("w+b") as copy:
                packed = copy_out(archive.open(part), copy, stop)
                made = unpack_file(copy, part.size, target, limits, stop, lambda _: None)
        if (digest and packed != digest) or made.diff_id != diff_id:
            raise refused(f"the layer {digest or diff_id} is not what its digest says")
        store.keep_layer(target, made)


def copy_out(source: Slice, target: IO[bytes], stop: threading.Event) -> str:
    total = hashlib.sha256()
    while piece := source.read(_PIECE):
        if stop.is_set():
            raise Cancelled
        total.update(piece)
        target.write(piece)
    target.flush()
    return f"sha256:{total.hexdigest()}"
