"""Launches a sandbox, from its record to its agent: the disk with its root, the wire, the mounts, the bundle.

The same for a new sandbox and for one that was stopped; they differ in where the disk comes from and in what is written
to it. The caller clears up when something fails on the way.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import replace

from k8e.engine import Place, SandboxSpec, Shape
from k8e.engine.local.disk import disk, fsck
from k8e.engine.local.disk.cleanup import empty_folder
from k8e.engine.local.dns.resolv_conf import resolv_conf_for_sandbox
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.mounts.mounts import attach_mounts, load_parent, share_workspace
from k8e.engine.local.mounts.slots import cut_slots
from k8e.engine.local.network.addresses import Wire
from k8e.engine.local.network.network import Network
from k8e.engine.local.record import Record
from k8e.engine.local.roots.root_files import RootFiles
from k8e.engine.local.roots.roots import Root, Roots
from k8e.engine.local.runtime.bundle import NOTHING, Bind, BundleSpec, build_config, write_bundle
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.engine.local.runtime.runtime import OciRuntime
from k8e.engine.local.runtime.seccomp import build_profile
from k8e.engine.tasks import do_both, finish_in_thread
from k8e.link.binary import agent_binary, loader_library
from k8e.link.model import Identity

_START_DEADLINE = 60.0


class Launcher:
    def __init__(self, layout: Layout, cgroups: Cgroups, roots: Roots, network: Network) -> None:
        self._layout = layout
        self._cgroups = cgroups
        self._roots = roots
        self._network = network

    @functools.cached_property
    def _programs(self) -> tuple[str, str]:
        """The agent and its loader, as this daemon's templates have placed them."""
        found = (agent_binary().sha256, loader_library().sha256)
        return os.fspath(self._layout.agents / found[0]), os.fspath(self._layout.agents / found[1])

    async def launch(
        self, sandbox: str, spec: SandboxSpec, runtime: OciRuntime, record: Record, template: disk.Template | None
    ) -> Place:
        """Returns when the runtime has started the agent. `template`: what a new sandbox's disk is copied from; None
        mounts the disk that a stopped sandbox has."""
        paths, root = self._layout.sandbox(sandbox), self._roots.of(record.image)
        mounting = self._mount_root(paths, root, record, spec.shape, template)
        try:
            (wire, namespace), _ = await do_both(self._network.open(sandbox, spec.egress, spec.hostname), mounting)
            place, hidden = await root.place(paths), await root.hidden()

            def prepare() -> None:
                binds = self._bind(spec, record, paths, place.user)
                write_start_files(paths, record, wire, again=template is None)
                config = self._bundle(sandbox, spec, runtime, record, namespace, root, hidden, binds)
                write_bundle(paths, build_config(config))

            await finish_in_thread(prepare)
            await runtime.start(self._layout, sandbox, paths, _START_DEADLINE, set_ids=may_set_ids(spec.shape))
            self._cgroups.allow_bursts(sandbox)  # a few words to the kernel: not worth a thread
            return place
        finally:
            self._network.let_go(sandbox)

    async def _mount_root(
        self, paths: SandboxPaths, root: Root, record: Record, shape: Shape, template: disk.Template | None
    ) -> None:
        if template is None:
            await fsck.mount_checked(paths.disk_image, paths.disk)
            await root.mount_again(paths, record)
        else:
            await finish_in_thread(disk.mount_copy, template, paths.disk_image, paths.disk, record.first_id)
            await root.make(paths, record, shape)

    def _bind(self, spec: SandboxSpec, record: Record, paths: SandboxPaths, user: Identity) -> Sequence[Bind]:
        """Mounts what the sandbox sees besides its root. Nothing runs there yet."""
        known = record.sources
        if spec.shape.mounts and spec.shares:
            known = load_parent(self._layout.sandbox(spec.shares)).sources
        binds, sources = attach_mounts(
            spec.shape.mounts, self._layout, paths, record.first_id, user, known, empty=bool(spec.shares)
        )
        if (sources, spec.shape.slots) != (record.sources, record.slots):
            replace(record, sources=sources, slots=spec.shape.slots).save(paths.record)
        if spec.shape.slots:
            return cut_slots(paths, spec.shape, native=record.first_id is not None)
        if any(bind.target == "/workspace" for bind in binds):
            return binds  # a child that shares the workspace has the same mount
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
    ) -> BundleSpec:
        paths = self._layout.sandbox(sandbox)
        _, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        mounting = bool(spec.shape.slots) and not runtime.native
        return BundleSpec(
            sandbox=spec,
            root=os.fspath(paths.root),
            agent=self._programs[0],
            loader=self._programs[1],
            link=os.fspath(paths.link),
            instance=bytes.fromhex(record.instance),
            cgroup=self._cgroups.path_of(sandbox),
            host_paths=root.host_paths(),
            first_id=record.first_id,
            seccomp=build_profile(
                platform.machine(), runtime.native, set_ids=may_set_ids(spec.shape), mounting=mounting
            ),
            hard_files=hard_files,
            network=namespace,
            binds=binds,
            hidden=hidden,
            nothing=os.fspath(paths.bundle / NOTHING),
            mounting=mounting,
        )


def may_set_ids(shape: Shape) -> bool:
    """Whether files may be given set-user-id bits. Not where a directory of the machine can be written to: its files
    belong to a user of the machine, and such a bit would let another user act as that one. It costs package managers in
    the sandbox some packages."""
    return not (shape.slots or any(mount.writable for mount in shape.mounts))


def write_start_files(paths: SandboxPaths, record: Record, wire: Wire, *, again: bool) -> None:
    """Writes what a sandbox starts with, beside what is on every disk. Nothing runs there yet. `again`: on a disk that
    a sandbox has had; where its /etc/resolv.conf cannot be a file any more it does without, as queries are answered
    whatever address they are sent to."""
    with RootFiles(paths.root, record.first_id) as files, contextlib.suppress(*([OSError] if again else [])):
        files.write("/etc/resolv.conf", resolv_conf_for_sandbox(wire.host_addresses).encode())
    if again:
        empty_folder(paths.link, record.first_id or 0)
        return
    paths.link.mkdir(mode=0o700)
    if record.first_id is not None:
        os.chown(paths.link, record.first_id, record.first_id, follow_symlinks=False)
        # The runtime enters as root of the sandbox; other users of the machine have no business here.
        paths.disk.chmod(0o700)
