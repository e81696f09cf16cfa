"""What lies between a record of a sandbox and its agent: the disk with its root, the wire, what is mounted, the bundle.

The same for one that is new and for one that was stopped; they differ in how the disk comes to be there and in what is
put on it. Whoever calls clears up when something fails on the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from k8e.engine import Place, SandboxSpec, Shape
from k8e.engine.local.disk import disk, kept_disk
from k8e.engine.local.disk.renewal import empty_folder
from k8e.engine.local.dns import resolv_conf_for_sandbox
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.mounts.mounts import attach_mounts
from k8e.engine.local.mounts.shared_workspace import load_parent, share_workspace
from k8e.engine.local.mounts.slots import cut_slots
from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.network import Network
from k8e.engine.local.record import Record
from k8e.engine.local.roots.inside import Inside
from k8e.engine.local.roots.roots import Root, Roots
from k8e.engine.local.runtime.bundle import Bind, BundleSpec, build_config
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.engine.local.runtime.runtime import OciRuntime
from k8e.engine.local.runtime.seccomp import build_profile
from k8e.engine.local.system.tool import do_both, finish_in_thread
from k8e.link.binary import agent_binary, loader_library
from k8e.link.model import Identity

_START_DEADLINE = 60.0
_NOTHING = "nothing"

Furnish = Callable[[SandboxPaths, Record, Wire], None]


class Construction:
    def __init__(self, layout: Layout, cgroups: Cgroups, roots: Roots, network: Network) -> None:
        self._layout = layout
        self._cgroups = cgroups
        self._roots = roots
        self._network = network

    async def make_root(self, template: disk.Template, paths: SandboxPaths, record: Record, shape: Shape) -> None:
        await finish_in_thread(disk.mount_copy, template, paths.disk_image, paths.disk, record.first_id)
        await self._roots.of(record.image).make(paths, record, shape)

    async def present_root(self, paths: SandboxPaths, record: Record) -> None:
        await kept_disk.mount_kept(paths.disk_image, paths.disk)
        await self._roots.of(record.image).present(paths, record)

    async def bring_up(
        self,
        sandbox: str,
        spec: SandboxSpec,
        runtime: OciRuntime,
        record: Record,
        mounting: Coroutine[Any, Any, None],
        furnish: Furnish,
    ) -> None:
        """From a directory with a record to a runtime that has started the agent, on a disk that is new or not."""
        paths, root = self._layout.sandbox(sandbox), self._roots.of(record.image)
        try:
            (wire, namespace), _ = await do_both(self._network.open(sandbox, spec.egress, spec.hostname), mounting)
            place = await root.place(paths)
            binds = await finish_in_thread(self._bind, spec, record, paths, place.user)
            config = self._bundle(sandbox, spec, runtime, record, namespace, root, await root.hidden(), binds, place)
            await finish_in_thread(furnish, paths, record, wire)
            await finish_in_thread(write_bundle, paths, build_config(config))
            await runtime.start(self._layout, sandbox, paths, _START_DEADLINE, set_ids=may_set_ids(spec.shape))
        finally:
            self._network.let_go(sandbox)

    def _bind(self, spec: SandboxSpec, record: Record, paths: SandboxPaths, user: Identity) -> Sequence[Bind]:
        """Mounts what the sandbox sees besides its root. Nothing runs there yet."""
        known = record.sources
        if spec.shape.mounts and spec.shares:
            known = load_parent(self._layout.sandbox(spec.shares)).sources
        binds, sources = attach_mounts(spec.shape.mounts, self._layout, paths, record.first_id, user, known)
        if (sources, spec.shape.slots) != (record.sources, record.slots):
            replace(record, sources=sources, slots=spec.shape.slots).save(paths.record)
        if spec.shape.slots:
            return cut_slots(paths, spec.shape, native=record.first_id is not None)
        if any(bind.target == "/workspace" for bind in binds):
            return binds  # whoever shares that has the same mount
        workspace = paths.workspace
        if spec.shares:
            workspace = share_workspace(self._layout.sandbox(spec.shares), paths, record.first_id)
        return [Bind(os.fspath(workspace), "/workspace", writable=not spec.shape.read_only), *binds]

    def _bundle(
        self,
        sandbox: str,
        spec: SandboxSpec,
        runtime: OciRuntime,
        record: Record,
        namespace: str,
        root: Root,
        hidden: Sequence[str],
        binds: Sequence[Bind],
        place: Place,
    ) -> BundleSpec:
        paths = self._layout.sandbox(sandbox)
        _, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        mounting = bool(spec.shape.slots) and not runtime.native
        return BundleSpec(
            root=os.fspath(paths.root),
            agent=os.fspath(self._layout.agents / agent_binary().sha256),
            loader=os.fspath(self._layout.agents / loader_library().sha256),
            link=os.fspath(paths.link),
            instance=bytes.fromhex(record.instance),
            hostname=spec.hostname,
            cgroup=self._cgroups.path_of(sandbox),
            limits=spec.limits,
            overlays=root.overlays(),
            first_id=record.first_id,
            seccomp=build_profile(
                platform.machine(),
                runtime.native,
                set_ids=may_set_ids(spec.shape),
                mounting=mounting,
            ),
            hard_files=hard_files,
            network=namespace,
            binds=binds,
            hidden=hidden,
            nothing=os.fspath(paths.bundle / _NOTHING),
            read_only=spec.shape.read_only,
            powerless=spec.shape.powerless,
            mounting=mounting,
        )


def may_set_ids(shape: Shape) -> bool:
    """Not where a directory of the machine can be written to: its files are a user's of the machine, and out there that
    bit would let another user act as that one. That costs package managers in there some packages."""
    return not (shape.slots or any(mount.writable for mount in shape.mounts))


def lay_out(paths: SandboxPaths, record: Record, wire: Wire) -> None:
    """Puts down what a sandbox starts with, beside what is on every disk. Nothing runs there yet."""
    paths.link.mkdir(mode=0o700)
    with Inside(paths.root, record.first_id) as inside:
        inside.write("/etc/resolv.conf", resolv_conf_for_sandbox(wire.host_addresses).encode())
    if record.first_id is not None:
        os.chown(paths.link, record.first_id, record.first_id, follow_symlinks=False)
        # The runtime enters as root of the sandbox; other users of the machine have no business here.
        paths.disk.chmod(0o700)


def lay_out_again(paths: SandboxPaths, record: Record, wire: Wire) -> None:
    """The same on a disk that was the sandbox's before. Where the names' file cannot be one any more it is missed by
    nobody: questions are answered whomever they are sent to."""
    empty_folder(paths.link, record.first_id or 0)
    with Inside(paths.root, record.first_id) as inside, contextlib.suppress(OSError):
        inside.write("/etc/resolv.conf", resolv_conf_for_sandbox(wire.host_addresses).encode())


def write_bundle(paths: SandboxPaths, config: dict[str, Any]) -> None:
    paths.bundle.mkdir(mode=0o700)
    (paths.bundle / "config.json").write_text(json.dumps(config))
    (paths.bundle / _NOTHING).touch(mode=0o444)


def put_down(paths: SandboxPaths) -> None:
    """What was made for one start only. Nothing of it was ever in the sandbox's hands, but the disk, which is none."""
    kept_disk.sync_kept(paths.disk_image, paths.record)
    for folder in (paths.mounts, paths.slots):
        disk.remove_mount_points(folder)
    for path in (paths.bundle, paths.veils):
        disk.remove_tree(path)  # which looks once more whether anything is mounted there
    paths.egress.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        paths.disk.rmdir()
