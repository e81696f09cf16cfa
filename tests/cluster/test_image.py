"""Images without docker: what a registry and a runtime read from the archive."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from typing import Any

from k8e.cluster.image import Image, make_archive, make_image, pack


def open_archive(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {each.name: archive.extractfile(each).read() for each in archive if each.isreg()}  # type: ignore[union-attr]


def follow(files: dict[str, bytes], described: dict[str, Any]) -> bytes:
    """The blob of a descriptor, which has its size and its digest."""
    algorithm, _, digest = described["digest"].partition(":")
    blob = files[f"blobs/{algorithm}/{digest}"]
    assert (hashlib.sha256(blob).hexdigest(), len(blob)) == (digest, described["size"])
    return blob


def test_an_image_of_two_architectures_has_one_name() -> None:
    layers = {machine: pack({"program": (machine.encode(), 0o755)}, {}) for machine in ("x86_64", "aarch64")}
    images = [Image(machine, [layer], ["/program"], user="7:7") for machine, layer in layers.items()]
    files = open_archive(make_archive("example.com/name:1.2", images, compress=True))
    (top,) = json.loads(files["index.json"])["manifests"]
    assert top["annotations"]["io.containerd.image.name"] == "example.com/name:1.2"
    listed = json.loads(follow(files, top))["manifests"]
    assert [one["platform"]["architecture"] for one in listed] == ["amd64", "arm64"]
    for one, layer in zip(listed, layers.values(), strict=True):
        manifest = json.loads(follow(files, one))
        config = json.loads(follow(files, manifest["config"]))
        (stored,) = manifest["layers"]
        assert stored["mediaType"].endswith("tar+gzip")
        assert gzip.decompress(follow(files, stored)) == layer
        assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
        assert (config["config"]["User"], config["config"]["Entrypoint"]) == ("7:7", ["/program"])


def test_the_same_content_is_the_same_image() -> None:
    made = [make_image("name:1", {"bin/a": b"a"}, ["/bin/a"], {"bin/b": "a"}) for _ in range(2)]
    assert made[0] == made[1]
    assert made[0] != make_image("name:1", {"bin/a": b"b"}, ["/bin/a"], {"bin/b": "a"})
