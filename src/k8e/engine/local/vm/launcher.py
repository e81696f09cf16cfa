"""Launches a virtual machine, from its record to its agent: the counterpart of the launcher of OCI bundles.

The machine's kernel mounts the sandbox's disk only until the guest has it: what a guest wrote is a filesystem that an
attacker may have made. From then on only a guest mounts it, and replays its journal; the machine keeps the bytes.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from k8e.engine import EngineError, MountRefused, Place, Runtime, SandboxSpec, Shape, SharingRefused
from k8e.engine.local.disk import disk
from k8e.engine.local.disk.cleanup import unmount_below
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.network.network import Network
from k8e.engine.local.network.wires import open_bridged_tap, open_tap
from k8e.engine.local.record import Record
from k8e.engine.local.roots.roots import LayerStore, Root, Roots
from k8e.engine.local.runtime.bundle import write_bundle
from k8e.engine.local.runtime.cgroup import Cgroups
from k8e.engine.local.runtime.seccomp import build_profile
from k8e.engine.local.system.calls import MS_NOSUID, mount, read_ticks
from k8e.engine.local.vm.bases import Bases
from k8e.engine.local.vm.bundle import FILES, FOLDERS, MISC, NODES, VMM_USER, VmSpec, build_vmm, qemu_command
from k8e.engine.local.vm.firecracker import boot, firecracker_command, list_requests
from k8e.engine.local.vm.guest import Guest, place_initramfs
from k8e.engine.local.vm.runtime import VmRuntime
from k8e.engine.tasks import Once, do_both, finish_in_thread

_MERGED = ("bin", "sbin", "lib", "lib64")
_HOSTNAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SCRATCH = "size=1m,nr_inodes=64,mode=711"  # of the VMM's sockets and logs


class VmLauncher:
    def __init__(self, layout: Layout, cgroups: Cgroups, roots: Roots, store: LayerStore, network: Network) -> None:
        self._layout = layout
        self._cgroups = cgroups
        self._roots = roots
        self._network = network
        self._bases = Bases(layout, store)
        self._initramfs: Once[tuple[str, bool], Path] = Once()

    async def launch(
        self, sandbox: str, spec: SandboxSpec, runtime: VmRuntime, record: Record, template: disk.Template | None
    ) -> Place:
        """Returns when the VMM has started. `template`: as for other runtimes."""
        refuse_shape(spec)
        paths, root = self._layout.sandbox(sandbox), self._roots.of(record.image)
        base = await self._bases.of(record.image, runtime.guest)
        micro = runtime.name is Runtime.FIRECRACKER
        initramfs = await self._place_initramfs(runtime.guest, vsock=micro)
        assert record.first_id is not None, "a VMM has ids of its own"
        lay = partial(open_bridged_tap, owner=record.first_id + VMM_USER) if micro else open_tap
        try:
            opening = self._network.open(sandbox, spec.egress, spec.hostname, lay=lay)
            (wire, namespace), _ = await do_both(opening, self._prepare_disk(paths, root, record, spec.shape, template))
            machine = VmSpec(
                sandbox=spec,
                root=paths.bundle / "root",
                kernel=runtime.guest.elf or runtime.guest.kernel,
                initramfs=initramfs,
                base=base,
                disk=paths.disk_image,
                disk_size=os.stat(paths.disk_image).st_size,
                link=paths.link,
                wire=wire,
                instance=bytes.fromhex(record.instance),
                cgroup=self._cgroups.path_of(sandbox),
                first_id=record.first_id,
                seccomp=build_profile(platform.machine(), set_ids=False, reserving=False),
                hidden=await self._roots.of("host").hidden(),
                vmm=runtime.binary,
                accelerator=runtime.accelerator,
                link_kind="vsock" if micro else "console",
                clock_khz=await finish_in_thread(measure_clock) if runtime.emulated else 0,
                nodes=_name_nodes(paths, emulated=runtime.emulated, micro=micro),
                namespace=namespace if micro else "",
            )
            command = firecracker_command(machine) if micro else qemu_command(machine)
            await finish_in_thread(_write_start_files, paths, machine, command)
            stdin = subprocess.DEVNULL if micro else self._network.descriptor(sandbox)
            await runtime.start(self._layout, sandbox, paths, stdin)
            self._cgroups.allow_bursts(sandbox)
            if micro:
                await boot(paths, list_requests(machine))
            return await root.place(paths)
        finally:
            self._network.let_go(sandbox)

    async def _place_initramfs(self, guest: Guest, *, vsock: bool) -> Path:
        placing = partial(place_initramfs, guest, self._layout.agents, vsock=vsock)
        return await self._initramfs.get((guest.digest, vsock), lambda: finish_in_thread(placing))

    async def _prepare_disk(
        self, paths: SandboxPaths, root: Root, record: Record, shape: Shape, template: disk.Template | None
    ) -> None:
        if template is not None:
            # Inside the guest ids are what they are in the image: those of the record are the VMM's.
            plain = replace(record, id_range=None)
            await finish_in_thread(disk.mount_copy, template, paths.disk_image, paths.disk, None)
            await root.make(paths, plain, shape)
            await unmount_below(paths.disk)
        await finish_in_thread(_open_scratch, paths, (record.first_id or 0) + VMM_USER)

    async def close(self) -> None:
        await self._bases.close()
        await self._initramfs.close()


def refuse_shape(spec: SandboxSpec) -> None:
    """Refuses what a virtual machine cannot have yet, with the reason."""
    if spec.shape.mounts or spec.shape.slots:
        cause = f"a sandbox of the runtime {spec.runtime.value} cannot have directories of the machine yet"
        hint = "use gvisor or native; or mount nothing (agentkernel: --profile restrictive) and copy the files with cp"
        raise MountRefused("mounts", cause, hint)
    if spec.shares:
        cause = f"a sandbox of the runtime {spec.runtime.value} cannot share another's workspace yet"
        hint = (
            "make the parent with --runtime gvisor or native; or make a session of its own and copy the files with cp"
        )
        raise SharingRefused("workspace", cause, hint)
    if not _HOSTNAME.fullmatch(spec.hostname):
        raise EngineError("hostname", f"{spec.hostname!r} cannot be passed to a guest")


def _open_scratch(paths: SandboxPaths, owner: int) -> None:
    """Where a VMM makes its sockets and logs: memory of its own control group, and little of it. On the machine's disk
    it could fill that."""
    os.chown(paths.disk_image, owner, owner)
    paths.disk_image.chmod(0o600)
    paths.disk.mkdir(mode=0o711, exist_ok=True)
    mount("k8e", paths.disk, "tmpfs", MS_NOSUID, _SCRATCH)
    paths.link.mkdir(mode=0o700)
    os.chown(paths.link, owner, owner)


def _name_nodes(paths: SandboxPaths, *, emulated: bool, micro: bool) -> dict[str, str]:
    """Where the device nodes are, by their names for the VMM."""
    names = () if emulated else ("kvm", "net/tun") if micro else ("kvm",)
    return {name: os.fspath(paths.disk / name.replace("/", "-")) for name in names}


def _write_start_files(paths: SandboxPaths, machine: VmSpec, command: Sequence[str]) -> None:
    write_bundle(paths, build_vmm(machine, command))
    for name in FOLDERS:
        (machine.root / name).mkdir(parents=True)
    for name in _MERGED:
        (machine.root / name).symlink_to(f"usr/{name}")
    for name in FILES:
        (machine.root / "k8e" / name).touch()
    paths.bundle.chmod(0o711)
    machine.root.chmod(0o755)  # the runtime opens it as root of the VMM's user namespace
    owner = machine.first_id + VMM_USER
    for name, node in machine.nodes.items():
        os.mknod(node, 0o020600, os.makedev(MISC, NODES[name]))
        os.chown(node, owner, owner)


@cache
def measure_clock() -> int:
    """Returns how many thousand ticks a second the machine's processor counts."""
    ticks, began = read_ticks(), time.monotonic_ns()
    time.sleep(0.1)
    counted, nanoseconds = read_ticks() - ticks, time.monotonic_ns() - began
    return round(counted * 1_000_000 / nanoseconds)
