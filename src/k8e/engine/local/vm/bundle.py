"""The VMM of a virtual machine, as an OCI bundle: QEMU or Firecracker in a native sandbox of its own. Pure.

A VMM that was taken over by its guest has what a native sandbox has: ids of its own in a user namespace, namespaces, a
seccomp allowlist, no capabilities, a control group, /usr of the machine, read-only; and besides, its guest's disks and
its tap. It is in a network namespace in which there is nothing else: QEMU has the descriptor of the tap, which is an
interface of the machine; Firecracker opens its tap itself, so that is in the namespace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from k8e.engine import Limits, SandboxSpec
from k8e.engine.local.network.addresses import INNER_INTERFACE, Wire
from k8e.engine.local.runtime.bundle import ID_COUNT, PARKED_TASKS, agent_capabilities
from k8e.engine.local.vm.bases import Base

VMM_USER: Final = 1000  # in the VMM's own user namespace
LINK_PATH: Final = "/run/k8e"
# Of the virtio console: the first for questions about the machine, each other one a connection. One is the daemon's;
# another daemon's, which may not have ended yet, has the second; the third is spare. Each takes the guest 4 MiB of
# memory, because QEMU's virtio-mmio has no shorter queues.
PORTS: Final = 4
CONTROL_PORT: Final = 1
NODES: Final = {"kvm": 232, "net/tun": 200}  # minor numbers of devices that a VMM may need
MISC: Final = 10  # their major number
# Files for tracing the kernel, ten thousand of them, would take 9 MiB of the guest and a fifth of its boot.
KERNEL_WORDS: Final = ("console=ttyS0", "quiet", "loglevel=3", "panic=-1", "initcall_blacklist=tracer_init_tracefs")
_PERIOD: Final = 100_000
_TAP: Final = 3  # its descriptor there
_TASKS: Final = 64  # threads of the VMM, beyond one for each processor
_TRANSLATIONS: Final = 128  # MiB of translated code, when emulating
_OWN_MEMORY: Final = 96 << 20  # of the VMM itself
# The tap comes as standard input: it is the one descriptor that passes through the runtime. What QEMU says is kept on
# the small tmpfs that also has its sockets.
_START: Final = f'exec "$@" {_TAP}<&0 </dev/null >{LINK_PATH}/log 2>&1'
# Folders and links of the VMM's root; files of the machine are mounted over the rest.
FOLDERS: Final = ("proc", "dev", "usr", "run", "run/k8e", "k8e", "tmp", "etc")
FILES: Final = ("kernel", "initramfs", "base", "disk")


@dataclass(frozen=True, slots=True)
class VmSpec:
    sandbox: SandboxSpec
    root: Path  # of the VMM
    kernel: Path
    initramfs: Path
    base: Base
    disk: Path
    disk_size: int
    link: Path  # the directory of its sockets
    wire: Wire
    instance: bytes
    cgroup: str
    first_id: int
    seccomp: Mapping[str, Any]
    hidden: Sequence[str]  # files below /usr
    vmm: str  # the program
    accelerator: str  # kvm, tcg
    link_kind: str  # console, vsock
    clock_khz: int = 0  # of the machine's processor: the guest does not have to find it out, which fails on a busy one
    nodes: Mapping[str, str] = field(default_factory=dict)  # devices that the VMM may use, by their names in /dev
    namespace: str = ""  # of the network; empty: a new one


def guest_options(spec: VmSpec) -> list[str]:
    """The words for our first process in the guest (agent/guest/)."""
    limits, shape = spec.sandbox.limits, spec.sandbox.shape
    options = {
        "instance": spec.instance.hex(),
        "link": spec.link_kind,
        "hostname": spec.sandbox.hostname,
        "dns": str(spec.wire.host_addresses[0]),
        "mac": spec.wire.host_mac,
        "interface": INNER_INTERFACE,
        "pids": str(limits.pids + PARKED_TASKS),
        "files": str(limits.open_files),
        "shared": str(max(limits.memory // 4, 1 << 20)),
        "read_only": str(int(shape.read_only)),
        "capabilities": hex(sum(1 << number for number in agent_capabilities(shape).values())),
    }
    if spec.base.targets:
        options["binds"] = ",".join(spec.base.targets)
    for host_end, inner_end in spec.wire.pairs:
        options[f"ip{host_end.version}"] = f"{inner_end.ip},{host_end.ip},{host_end.network.prefixlen}"
    return [f"k8e.{name}={value}" for name, value in options.items()]


def qemu_command(spec: VmSpec) -> list[str]:
    limits, emulated = spec.sandbox.limits, spec.accelerator == "tcg"
    # Without the timers the kernel does not start under emulation; without the option ROMs it starts sooner.
    machine = "microvm,x-option-roms=off,rtc=on,acpi=on" + (",pit=on,pic=on" if emulated else "")
    kernel = [*KERNEL_WORDS, "reboot=t", "no_timer_check"]
    if emulated and spec.clock_khz:
        kernel.append(f"tsc_early_khz={spec.clock_khz}")
    words = [
        *(spec.vmm, "-name", "k8e", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *("-machine", machine, "-global", "virtio-mmio.force-legacy=false"),
        *("-accel", f"tcg,thread=multi,tb-size={_TRANSLATIONS}" if emulated else "kvm"),
        *("-cpu", "max" if emulated else "host", "-smp", str(processors(limits)), "-m", f"{limits.memory >> 20}M"),
        *("-kernel", "/k8e/kernel", "-initrd", "/k8e/initramfs", "-append", " ".join([*kernel, *guest_options(spec)])),
        *("-serial", f"file:{LINK_PATH}/console"),
        *("-drive", "id=base,file=/k8e/base,format=raw,if=none,readonly=on,file.locking=off"),
        *("-device", "virtio-blk-device,drive=base"),
        *("-drive", "id=disk,file=/k8e/disk,format=raw,if=none,cache=writeback,discard=unmap,file.locking=off"),
        *("-device", "virtio-blk-device,drive=disk"),
        *("-netdev", f"tap,id=wire,fd={_TAP}", "-device", f"virtio-net-device,netdev=wire,mac={spec.wire.inner_mac}"),
        *("-object", "rng-builtin,id=entropy", "-device", "virtio-rng-device,rng=entropy"),
        *("-device", f"virtio-serial-device,max_ports={PORTS + 1}"),
    ]
    for port in range(1, PORTS + 1):
        words += ["-chardev", f"socket,id=port{port},path={LINK_PATH}/{port}.sock,server=on,wait=off"]
        words += ["-device", f"virtserialport,chardev=port{port},nr={port}"]
    return words


def processors(limits: Limits) -> int:
    return max(1, math.ceil(limits.cpus))


def _bind(source: object, target: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": "bind", "source": str(source), "options": ["bind", "private", *options]}


def build_vmm(spec: VmSpec, command: Sequence[str]) -> dict[str, Any]:
    limits = spec.sandbox.limits
    memory = limits.memory + _OWN_MEMORY + (_TRANSLATIONS << 20 if spec.accelerator == "tcg" else 0)
    kept = ("ro", "nosuid", "nodev", "noexec")
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "noexec", "mode=755", "size=64k"],
        },
        _bind("/usr", "/usr", "ro", "nosuid", "nodev"),
        _bind(spec.kernel, "/k8e/kernel", *kept),
        _bind(spec.initramfs, "/k8e/initramfs", *kept),
        _bind(spec.base.image, "/k8e/base", *kept),
        _bind(spec.disk, "/k8e/disk", "rw", "nosuid", "nodev", "noexec"),
        _bind(spec.link, LINK_PATH, "rw", "nosuid", "nodev", "noexec"),
    ]
    devices: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]
    for name, node in spec.nodes.items():
        mounts.append(_bind(node, f"/dev/{name}", "rw", "nosuid", "noexec"))
        devices.append({"allow": True, "type": "c", "major": MISC, "minor": NODES[name], "access": "rw"})
    mapping = [{"containerID": 0, "hostID": spec.first_id, "size": ID_COUNT}]
    namespaces = [{"type": name} for name in ("pid", "mount", "ipc", "uts", "user", "cgroup")]
    namespaces.append({"type": "network", "path": spec.namespace} if spec.namespace else {"type": "network"})
    tasks = _TASKS + processors(limits)
    return {
        "ociVersion": "1.0.2",
        "hostname": "vmm",
        "root": {"path": str(spec.root), "readonly": True},
        "mounts": mounts,
        "linux": {
            "cgroupsPath": spec.cgroup,
            "resources": {
                "devices": devices,
                "memory": {"limit": memory, "swap": memory},
                "cpu": {"quota": max(1000, int(limits.cpus * _PERIOD)), "period": _PERIOD},
                "pids": {"limit": tasks},
            },
            "namespaces": namespaces,
            "uidMappings": mapping,
            "gidMappings": mapping,
            "seccomp": spec.seccomp,
            "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", *spec.hidden],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
        "process": {
            "terminal": False,
            "user": {"uid": VMM_USER, "gid": VMM_USER},
            "cwd": "/",
            "env": ["PATH=/usr/bin:/bin"],
            "args": ["/usr/bin/sh", "-c", _START, "vmm", *command],
            "noNewPrivileges": True,
            "capabilities": {name: [] for name in ("bounding", "effective", "permitted")},
            "rlimits": [
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
                # Its disk is a file of the machine's own: it grows no further.
                {"type": "RLIMIT_FSIZE", "soft": spec.disk_size, "hard": spec.disk_size},
                {"type": "RLIMIT_NOFILE", "soft": 256, "hard": 256},
                {"type": "RLIMIT_NPROC", "soft": tasks, "hard": tasks},
            ],
        },
    }
