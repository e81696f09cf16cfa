"""Images on a cluster: the kubelet of each node pulls them, by the reference that a session names. So there is nothing
to pull, import or remove here, and every request for that says so."""

from __future__ import annotations

from collections.abc import AsyncIterable, Collection, Sequence
from pathlib import Path
from typing import Final, NoReturn

from k8e.engine import EngineError
from k8e.engine.images import Credentials, Image, Report

ANY: Final = "*"
HOST_IMAGE: Final = "host"  # what a session has that names no image: the administrator's choice for all


class ClusterImages:
    """Implements `engine.images.Images`."""

    def __init__(self, allowed: Collection[str]) -> None:
        """By the administrator: references, and beginnings of references that end with a slash, or ANY."""
        self._allowed = tuple(allowed)

    def refer(self, reference: str) -> str:
        if not any(_matches(entry, reference) for entry in self._allowed):
            known = ", ".join(self._allowed) or "none"
            hint = f"the administrator lists what sessions may name in [kubernetes] images; there is: {known}"
            raise EngineError("image", f"{reference} may not be named here", hint, "invalid")
        return reference

    async def pull(self, reference: str, credentials: Credentials | None, report: Report) -> Image:
        _refuse(f"{reference} is not pulled here")

    async def add(self, archive: Path, report: Report) -> Image:
        _refuse("an archive cannot be imported")

    async def take(self, pieces: AsyncIterable[bytes], report: Report) -> Image:
        _refuse("an archive cannot be imported")

    async def build_base(self, report: Report) -> Image:
        _refuse("no image is built here")

    async def find(self, digest: str) -> Image | None:
        return None

    async def retain(self, digests: Collection[str]) -> int:
        return 0

    async def list(self) -> Sequence[Image]:
        return ()


def _refuse(cause: str) -> NoReturn:
    hint = "name its reference when you create a session (--image); a registry must have it that the nodes can reach"
    raise EngineError("image", f"{cause}: the nodes of the cluster pull images by themselves", hint)


def _matches(entry: str, reference: str) -> bool:
    return entry in (ANY, reference) or (entry.endswith("/") and reference.startswith(entry))
