"""The removal of a sandbox, in whatever state it is: the counterpart of launcher.py.

Each kind of trace is looked for instead of remembered, so that this is right after a crash at any step. The caller
keeps the sandbox's link closed meanwhile (`Links.ended`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from k8e.damage import Damages
from k8e.engine import EngineError
from k8e.engine.local.disk import fsck
from k8e.engine.local.disk.cleanup import remove_mount_points, remove_tree, unmount_below
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.mounts.placeholders import remove_placeholders
from k8e.engine.local.network.network import Network
from k8e.engine.local.record import IdRanges, Records, all_sandboxes
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.engine.local.runtime.runtime import forget_sandbox, known_sandboxes
from k8e.engine.tasks import do_both, finish_in_thread


class Removal:
    def __init__(
        self,
        layout: Layout,
        cgroups: Cgroups,
        network: Network,
        *,
        records: Records,
        ids: IdRanges,
        damages: Damages,
    ) -> None:
        self._layout = layout
        self._cgroups = cgroups
        self._network = network
        self._records = records
        self._ids = ids
        self._damages = damages

    def traces(self) -> set[str]:
        """Every sandbox of which there is one."""
        named = {paths.top.name for paths in all_sandboxes(self._layout)}
        return named | self._cgroups.sandboxes() | known_sandboxes(self._layout) | self._network.sandboxes()

    async def stop(self, sandbox: str) -> None:
        """The directory with the record, which keeps the range of ids, and the disk's image stay."""
        await self._halt(sandbox)
        try:
            await finish_in_thread(_remove_start_files, self._layout.sandbox(sandbox))
        except FileNotFoundError:
            raise EngineError("sandbox", f"{sandbox} does not exist") from None
        except OSError as error:
            raise EngineError("disk", str(error)) from error

    async def destroy(self, sandbox: str) -> None:
        id_range = self._records.find_id_range(sandbox)
        await self._halt(sandbox, last=remove_tree)
        self._ids.release(id_range)

    async def set_aside(self, sandbox: str) -> str:
        """Returns where its files are; empty when it had no disk."""
        paths = self._layout.sandbox(sandbox)
        id_range = self._records.find_id_range(sandbox)
        await self._halt(sandbox)
        if not paths.disk_image.is_file():
            await asyncio.to_thread(remove_tree, paths.top)
            return ""
        kept = self._layout.kept / sandbox
        try:
            await finish_in_thread(_remove_start_files, paths)
            kept.parent.mkdir(mode=0o700, exist_ok=True)
            os.rename(paths.top, kept)
        except OSError as error:
            raise EngineError("disk", f"{paths.top} cannot be kept: {error}") from error
        self._ids.release(id_range)
        return os.fspath(kept)

    async def _halt(self, sandbox: str, *, last: Callable[[Path], None] | None = None) -> None:
        """Everything but its directory goes. `last`: what is to become of that, when nothing else is left of it on the
        disk. Its wire is removed meanwhile, because the kernel takes its time for that."""
        await finish_in_thread(self._kill, sandbox)
        marks = await self._network.detach(sandbox)  # from here on nothing of ours writes into the directory
        await do_both(self._network.remove_wires(sandbox, marks), self._clear(sandbox, last))

    def _kill(self, sandbox: str) -> None:
        self._cgroups.kill(sandbox)
        forget_sandbox(self._layout, sandbox)

    async def _clear(self, sandbox: str, last: Callable[[Path], None] | None) -> None:
        top = self._layout.sandbox(sandbox).top
        await unmount_below(top)

        def remove() -> None:
            try:
                remove_placeholders(SandboxPaths(top), self._damages)
            except OSError as error:
                raise EngineError("mounts", f"what was made for them cannot be removed now: {error}") from error
            self._cgroups.remove(sandbox)
            if last is not None:
                last(top)

        await finish_in_thread(remove)


def _remove_start_files(paths: SandboxPaths) -> None:
    """Removes what was made for one start only. No process of the sandbox could write to any of it."""
    fsck.sync_disk(paths.disk_image, paths.record)
    for folder in (paths.mounts, paths.slots):
        remove_mount_points(folder)
    for path in (paths.bundle, paths.veils):
        remove_tree(path)  # which looks once more whether anything is mounted there
    paths.egress.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        paths.disk.rmdir()
