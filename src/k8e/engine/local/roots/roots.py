"""The two kinds of roots, as the engine sees them: a template of its disk, and how it is mounted on that disk.

The image `host` is on the disk itself; the layers of an OCI image are mounted below it. A new sandbox and one that was
stopped both mount it; only the first prepares it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from k8e.engine import EngineError, Limits, Place, Shape
from k8e.engine.images import Image
from k8e.engine.local.disk import disk
from k8e.engine.local.layout import SandboxPaths
from k8e.engine.local.record import Record
from k8e.engine.local.roots import host_image
from k8e.engine.local.roots.image_root import (
    WORKSPACE,
    RootSpec,
    load_place,
    place_mount_points,
    prepare_root,
    save_place,
)
from k8e.engine.local.roots.overlay import mount_layers
from k8e.engine.local.roots.templates import Templates
from k8e.engine.local.runtime.bundle import HostPath
from k8e.engine.local.toolchain.registries import Registries
from k8e.engine.tasks import finish_in_thread

HOST = "host"


class LayerStore(Protocol):
    """Synchronous, for threads."""

    def find(self, digest: str) -> Image | None: ...

    def layers_of(self, digest: str) -> tuple[Path, ...]:
        """The lowest first. KeyError: there is no such image."""


class Root(Protocol):
    async def template(self, limits: Limits, *, journal: bool = False) -> disk.Template:
        """Returns the template of its disk."""

    async def edition(self) -> Sequence[object]:
        """Returns what it is made of."""

    async def make(self, paths: SandboxPaths, record: Record, shape: Shape) -> None:
        """Mounts and prepares it on a new disk, which is mounted."""

    async def mount_again(self, paths: SandboxPaths, record: Record) -> None:
        """Mounts it on a disk that was used before and is mounted again."""

    def host_paths(self) -> Sequence[HostPath]:
        """Lists what of the machine is seen in it."""

    async def hidden(self) -> Sequence[str]:
        """Lists what of that is hidden."""

    async def place(self, paths: SandboxPaths) -> Place: ...


class HostRoot:
    def __init__(self, templates: Templates, tools: Path) -> None:
        self._templates = templates
        self._tools = tools

    async def template(self, limits: Limits, *, journal: bool = False) -> disk.Template:
        return await self._templates.disk_for(limits, journal=journal)

    async def edition(self) -> Sequence[object]:
        host_paths = await asyncio.to_thread(self.host_paths)
        return (await self._templates.content()).name, host_paths, sorted(await self.hidden())

    async def make(self, paths: SandboxPaths, record: Record, shape: Shape) -> None:
        """It is on the disk already."""

    async def mount_again(self, paths: SandboxPaths, record: Record) -> None:
        await finish_in_thread(place_mount_points, paths, record.first_id)

    def host_paths(self) -> Sequence[HostPath]:
        return host_image.host_paths(self._tools)

    async def hidden(self) -> Sequence[str]:
        return (await self._templates.registries()).hidden

    async def place(self, paths: SandboxPaths) -> Place:
        return host_image.host_place((await self._templates.registries()).env)


class ImageRoot:
    def __init__(self, digest: str, templates: Templates, store: LayerStore) -> None:
        self._digest = digest
        self._templates = templates
        self._store = store

    async def template(self, limits: Limits, *, journal: bool = False) -> disk.Template:
        await asyncio.to_thread(self._find)  # before anything is made
        return await self._templates.blank_for(limits, journal=journal)

    async def edition(self) -> Sequence[object]:
        image = await asyncio.to_thread(self._find)
        registries = await self._templates.registries()
        return image.digest, registries.files, registries.env

    async def make(self, paths: SandboxPaths, record: Record, shape: Shape) -> None:
        registries = await self._templates.registries()
        await finish_in_thread(self._make, paths, record, registries, shape)

    def _make(self, paths: SandboxPaths, record: Record, registries: Registries, shape: Shape) -> None:
        self._mount(paths, record.first_id)
        own = WORKSPACE not in shape.unbound.slots
        given = RootSpec(self._find(), registries, record.hostname, own_workspace=own)
        place = prepare_root(paths, given, record.first_id)
        save_place(paths.place, replace(place, capable=place.capable and not shape.powerless))

    async def mount_again(self, paths: SandboxPaths, record: Record) -> None:
        await finish_in_thread(self._mount_again, paths, record.first_id)

    def _mount_again(self, paths: SandboxPaths, first_id: int | None) -> None:
        self._mount(paths, first_id)
        place_mount_points(paths, first_id)

    def _mount(self, paths: SandboxPaths, first_id: int | None) -> None:
        """The sandbox's record names the image by now, so the layers that are found here are not removed."""
        try:
            layers = self._store.layers_of(self._digest)
        except KeyError:
            raise self._unknown() from None
        mount_layers(layers, paths.upper, paths.work, paths.root, first_id=first_id, aside=paths.aside)

    def _find(self) -> Image:
        image = self._store.find(self._digest)
        if image is None:
            raise self._unknown()
        return image

    def _unknown(self) -> EngineError:
        return EngineError(f"image {self._digest[:19]}", "it is not on this machine", "pull it again")

    def host_paths(self) -> Sequence[HostPath]:
        return ()

    async def hidden(self) -> Sequence[str]:
        return ()

    async def place(self, paths: SandboxPaths) -> Place:
        return await asyncio.to_thread(load_place, paths.place)


class Roots:
    def __init__(self, templates: Templates, tools: Path, store: LayerStore) -> None:
        self._host = HostRoot(templates, tools)
        self._templates = templates
        self._store = store

    def of(self, image: str) -> Root:
        if image == HOST:
            return self._host
        return ImageRoot(image, self._templates, self._store)
