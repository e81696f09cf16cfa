"""The read-only disks of virtual machines: one for the image `host`, made with the guest, and one for each OCI image,
made when the first machine needs it and shared by all."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k8e.engine import EngineError
from k8e.engine.local.layout import Layout
from k8e.engine.local.roots.roots import HOST, LayerStore
from k8e.engine.local.system.tool import find_tool, run_tool
from k8e.engine.local.vm.guest import Guest
from k8e.engine.tasks import Once

_DEADLINE: Final = 1800.0
_UUID: Final = "6b386567-7565-7374-0000-000000000001"
# As in guest_builder.py: what is mounted ends with the tool. Layers are named relative to their directory, so that no
# character of its path means anything to the kernel; the empty layer is there because one alone is no overlay.
_MAKE_DISK: Final = """set -e
image=$1 layers=$2
mount -t tmpfs tmpfs /mnt
mkdir /mnt/empty /mnt/root /mnt/layers
mount --bind . /mnt/layers
cd /mnt/layers
mount -t overlay k8e -o "ro,lowerdir=$layers:/mnt/empty" /mnt/root
exec mkfs.erofs -T0 -U "$3" "$image" /mnt/root
"""


@dataclass(frozen=True, slots=True)
class Base:
    image: Path
    targets: tuple[str, ...]  # where what it has is seen; none: it is the whole root, below the sandbox's own layer


class Bases:
    def __init__(self, layout: Layout, store: LayerStore) -> None:
        self._folder = layout.state / "bases"
        self._layers = layout.layers
        self._store = store
        self._made: Once[str, Path] = Once()

    async def of(self, image: str, guest: Guest) -> Base:
        if image == HOST:
            return Base(guest.host_disk, guest.host_targets)
        return Base(await self._made.get(image, lambda: self._make(image)), ())

    async def _make(self, digest: str) -> Path:
        target = self._folder / f"{digest.removeprefix('sha256:')}.erofs"
        try:
            layers = await asyncio.to_thread(self._store.layers_of, digest)
        except KeyError:
            raise EngineError(f"image {digest[:19]}", "it is not on this machine", "pull it again") from None
        if await asyncio.to_thread(self._clear, target):
            return target
        if find_tool("mkfs.erofs") is None:
            raise EngineError("image disk", "mkfs.erofs is not installed", "apt-get install erofs-utils")
        partial = target.with_suffix(".new")
        try:
            await run_tool(
                *("env", "-C", self._layers, "unshare", "--mount", "--propagation", "private"),
                *("/bin/sh", "-c", _MAKE_DISK, "make-disk", partial, self._describe(layers), _UUID),
                deadline=_DEADLINE,
            )
            partial.chmod(0o644)
            partial.rename(target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()
        return target

    def _describe(self, layers: Sequence[Path]) -> str:
        """The uppermost first, as the kernel wants them."""
        return ":".join(os.fspath(layer.relative_to(self._layers)) for layer in reversed(layers))

    def _clear(self, wanted: Path) -> bool:
        """Removes the disks of images that are gone. Returns whether the wanted one is there."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._folder.iterdir():
            if path != wanted and self._store.find(f"sha256:{path.stem}") is None:
                path.unlink()
        return wanted.exists()

    async def close(self) -> None:
        await self._made.close()
