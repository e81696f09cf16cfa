"""Pods as an API server answers them, for tests of what is read from them."""

from __future__ import annotations

from typing import Any

import msgspec
from lightkube.resources.core_v1 import Pod


def make_pod(name: str = "k8e-one", uid: str = "u1", version: int = 1, **status: Any) -> Pod:
    metadata = {"name": name, "uid": uid, "resourceVersion": str(version)}
    return msgspec.convert({"metadata": metadata, "status": status}, type=Pod)


def container(name: str = "sandbox", **state: Any) -> dict[str, Any]:
    return {"name": name, "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}
