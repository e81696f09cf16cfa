"""The images of tests: the agent's, and one with a shell, coreutils and Python, from this machine's own files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Final

from tests.engine.toolbox_image import toolbox_layer
from tests.images.builder import Built, build, entry, make_tar

AGENT: Final = "k8e.local/agent:test"
TOOLS: Final = "k8e.local/tools:test"
_BUILT: Final = Path(__file__).resolve().parents[3] / "build" / "agent"


@cache
def agent_image() -> bytes:
    programs = [entry(name, (_BUILT / name).read_bytes(), mode=0o755) for name in ("k8e-agent-pod", "k8e-loader.so")]
    return _archive(AGENT, build(make_tar(*programs), how="plain"))


@cache
def tools_image() -> bytes:
    return _archive(TOOLS, build(toolbox_layer(), how="plain"))


def _archive(name: str, image: Built) -> bytes:
    """As `ctr images import` takes it."""
    described = {
        "mediaType": image.media_type,
        "digest": image.digest,
        "size": len(image.manifest),
        "annotations": {"io.containerd.image.name": name},
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [described]}).encode(),
        **{f"blobs/sha256/{digest.removeprefix('sha256:')}": blob for digest, blob in image.blobs.items()},
    }
    return make_tar(*(entry(path, content) for path, content in files.items()))
