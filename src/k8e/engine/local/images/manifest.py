"""Manifests, indexes and configurations of images, parsed strictly. Pure: bytes in, plain data out.

Docker's and OCI's forms of the same things. What is not understood is refused, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from k8e.engine import EngineError
from k8e.engine.images import Image
from k8e.engine.local.images.limits import USUAL, ImageLimits

INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_LAYER: Final = re.compile(
    r"application/vnd\.(oci\.image\.layer\.(nondistributable\.)?v1\.tar|docker\.image\.rootfs\.(foreign\.)?diff\.tar)"
    r"([+.](gzip|zstd))?",
    re.ASCII,
)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_WORDS: Final = 1 << 20  # characters of an environment, or of a command


@dataclass(frozen=True, slots=True)
class Descriptor:
    digest: str
    size: int
    media_type: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    digest: str
    config: Descriptor
    layers: tuple[Descriptor, ...]  # lowest first


@dataclass(frozen=True, slots=True)
class Configuration:
    """Of which layers a root is made, and how its command is started."""

    diff_ids: tuple[str, ...]  # hex, lowest first
    env: tuple[tuple[str, str], ...] = ()
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def image(self, digest: str, size: int, names: tuple[str, ...] = ()) -> Image:
        return Image(digest, size, self.env, self.user, self.workdir, self.entrypoint, self.command, names)


def wrong(cause: str) -> EngineError:
    return EngineError("image", cause, "The registry or the maker of the image has to put it right.", "refused")


def check_digest(value: object) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise wrong(f"{str(value)[:100]!r} is no sha256 digest")
    return value


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def parse_object(content: bytes, what: str, limits: ImageLimits = USUAL) -> dict[str, Any]:
    if len(content) > limits.manifest:
        raise wrong(f"the {what} has more than {limits.manifest} bytes")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise wrong(f"the {what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise wrong(f"the {what} is no JSON object")
    return value


def find_type(value: Mapping[str, Any], announced: str = "") -> str:
    """By its own word where it has one. One that says neither is told by its parts."""
    media_type = value.get("mediaType") or announced
    if media_type in (*INDEX_TYPES, *MANIFEST_TYPES):
        return str(media_type)
    if isinstance(value.get("manifests"), list) and "layers" not in value:
        return INDEX_TYPES[0]
    if isinstance(value.get("layers"), list) and "manifests" not in value:
        return MANIFEST_TYPES[0]
    if value.get("schemaVersion") == 1:
        raise wrong("the image has the form of 2015 (schema 1), which tools do not make any more")
    raise wrong(f"{str(media_type)[:100]!r} is not the manifest of an image")


def choose_platform(index: Mapping[str, Any], machine: str) -> Descriptor:
    """Of an index, the image for this machine. One that says nothing of platforms and has one image means that one."""
    wanted = _ARCHITECTURES.get(machine, machine)
    entries = [entry for entry in _list(index, "manifests", "index") if isinstance(entry, dict)]
    images = [entry for entry in entries if entry.get("mediaType") in (None, "", *INDEX_TYPES, *MANIFEST_TYPES)]
    offered = []
    for entry in images:
        platform = entry.get("platform")
        if not isinstance(platform, dict):
            if len(images) == 1:
                return read_descriptor(entry)
            continue
        system, architecture = platform.get("os"), platform.get("architecture")
        if (system, architecture) == ("linux", wanted):
            return read_descriptor(entry)
        if system != "unknown":
            offered.append(f"{system}/{architecture}")
    raise EngineError(
        "image",
        f"there is no image for linux/{wanted}" + (f", only for {', '.join(offered)[:300]}" if offered else ""),
        "Use another tag or image that is built for this machine.",
        "no_platform",
    )


def read_descriptor(value: object) -> Descriptor:
    if not isinstance(value, dict):
        raise wrong("a descriptor is no JSON object")
    size = value.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise wrong("a descriptor has no size")
    return Descriptor(check_digest(value.get("digest")), size, str(value.get("mediaType") or ""))


def read_manifest(digest: str, value: Mapping[str, Any], limits: ImageLimits = USUAL) -> Manifest:
    layers = tuple(read_descriptor(layer) for layer in _list(value, "layers", "manifest"))
    if len(layers) > limits.layers:
        raise wrong(f"the image has {len(layers)} layers, the limit is {limits.layers}")
    for layer in layers:
        if not _LAYER.fullmatch(layer.media_type):
            raise wrong(f"a layer is of the type {layer.media_type[:100]!r}, which is not known here")
        if layer.size > limits.bytes:
            raise wrong(f"a layer has {layer.size} bytes, the limit is {limits.bytes}")
    config = read_descriptor(value.get("config"))
    if config.size > limits.manifest:
        raise wrong(f"the configuration has more than {limits.manifest} bytes")
    return Manifest(digest, config, layers)


def read_configuration(content: bytes, machine: str, limits: ImageLimits = USUAL) -> Configuration:
    value = parse_object(content, "configuration", limits)
    wanted = _ARCHITECTURES.get(machine, machine)
    system, architecture = value.get("os"), value.get("architecture")
    if system != "linux" or architecture != wanted:
        cause = f"it is an image for {str(system)[:32]}/{str(architecture)[:32]}, and this machine is linux/{wanted}"
        raise EngineError("image", cause, "Use another tag or image that is built for this machine.", "no_platform")
    rootfs = value.get("rootfs")
    if not isinstance(rootfs, dict) or rootfs.get("type") != "layers":
        raise wrong("the configuration does not say which layers there are")
    diff_ids = tuple(check_digest(each)[7:] for each in _list(rootfs, "diff_ids", "configuration"))
    if len(diff_ids) > limits.layers:
        raise wrong(f"the image has {len(diff_ids)} layers, the limit is {limits.layers}")
    settings = value.get("config") or {}
    if not isinstance(settings, dict):
        raise wrong("the configuration's `config` is no JSON object")
    return Configuration(
        diff_ids,
        env=_read_env(settings),
        user=_word(settings, "User"),
        workdir=_word(settings, "WorkingDir"),
        entrypoint=_words(settings, "Entrypoint"),
        command=_words(settings, "Cmd"),
    )


def write_manifest(config: bytes, layers: Sequence[str]) -> tuple[str, bytes]:
    """For an image that came without one: the digest by which it is known here, and what it is the digest of."""
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPES[0],
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest_of(config),
            "size": len(config),
        },
        "layers": [
            {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": f"sha256:{one}"} for one in layers
        ],
    }
    content = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    return digest_of(content), content


def _list(value: Mapping[str, Any], key: str, what: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list):
        raise wrong(f"the {what} has no list of {key}")
    return found


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or "\0" in value or len(value) > _WORDS:
        raise wrong(f"the configuration's {key} is not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise wrong(f"the configuration's {key} is not text") from None
    return value


def _word(settings: Mapping[str, Any], key: str) -> str:
    return _text(settings.get(key) or "", key)


def _words(settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = settings.get(key) or []
    if not isinstance(value, list) or len(value) > 4096:
        raise wrong(f"the configuration's {key} is no list of words")
    return tuple(_text(each, key) for each in value)


def _read_env(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The last of several counts. A name that no shell could set is refused."""
    variables: dict[str, str] = {}
    for text in _words(settings, "Env"):
        name, equals, value = text.partition("=")
        if equals and _NAME.fullmatch(name):
            variables[name] = value
    if sum(len(name) + len(value) + 2 for name, value in variables.items()) > _WORDS // 8:
        raise wrong("the configuration's Env is too long")
    return tuple(variables.items())
