"""OCI bundles: one description of a sandbox for every runtime. Pure, but for writing one.

gVisor gets the same shape, the seccomp filter included (its own kernel applies it), but for the user namespace.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e.engine import Limits, SandboxSpec, Shape
from k8e.engine.local.layout import SandboxPaths

AGENT_PATH = "/k8e-agent"
LOADER = "/k8e-loader.so"
LINK_PATH = "/run/k8e"
NOTHING = "nothing"  # the name of an empty file in a bundle
ID_COUNT = 65536
_PERIOD = 100_000
# Interpreters that wait for a program are no program's: templates of two kinds and their copies, up to four each, Node
# with its threads, and their supervisors.
PARKED_TASKS = 48

# The agent, root of the sandbox, serves all its users with these. Commands get none of them.
_CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
}
# With these it starts commands as any user and ends them; it handles files as the user whom it is asked for.
_FEWEST_CAPABILITIES = ("CAP_KILL", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID")
_MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/firmware",
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


@dataclass(frozen=True, slots=True)
class HostPath:
    """A directory or file of the machine, seen read-only in the sandbox."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory or file below the sandbox's own directory on the machine, and where it is seen."""

    source: str
    target: str
    writable: bool = True
    whole: bool = False  # with what was mounted below it
    follows: bool = False  # and with what is mounted there later


@dataclass(frozen=True, slots=True)
class BundleSpec:
    sandbox: SandboxSpec
    root: str
    agent: str  # the verified binary on the machine
    loader: str  # and the library that it parks interpreters with
    link: str  # the socket's directory on the machine
    instance: bytes
    cgroup: str
    host_paths: Sequence[HostPath]
    first_id: int | None  # the first of the machine's ids that the sandbox's are mapped to; None: no user namespace
    seccomp: Mapping[str, Any]
    hard_files: int  # the most that the machine lets the daemon set
    network: str  # path of the network namespace to join; no process inside has power over it
    binds: Sequence[Bind]  # in the order in which they are mounted; /workspace is one of them
    hidden: Sequence[str] = ()  # files below the host_paths that must not be seen
    nothing: str = ""  # an empty file on the machine, to be seen in their place
    mounting: bool = False  # the agent can mount inside, until it starts its first command: gVisor's kernel has slots


def _mount(target: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


def _bind(source: str, target: str, *options: str) -> dict[str, Any]:
    return _mount(target, "bind", source, *options, "nosuid", "nodev")


def _own_bind(bind: Bind) -> dict[str, Any]:
    # Private: what is mounted or unmounted on the machine later is not seen inside, but for slots.
    kind = ("rbind", "rprivate") if bind.whole else ("bind", "private")
    if bind.follows:
        kind = ("rbind", "rslave")
    return _bind(bind.source, bind.target, *kind, "rw" if bind.writable else "ro")


def _mounts(spec: BundleSpec) -> list[dict[str, Any]]:
    memory = f"size={max(spec.sandbox.limits.memory // 4, 1 << 20)}"
    mounts = [
        _mount("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
        _mount("/dev", "tmpfs", "tmpfs", "nosuid", "noexec", "mode=755", "size=64k"),
        _mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
        _mount("/dev/shm", "tmpfs", "shm", "nosuid", "nodev", "mode=1777", memory),
        # Memory, not disk: what must reach no file of the machine (a session's secrets) is kept here.
        _mount("/run", "tmpfs", "run", "nosuid", "nodev", "noexec", "mode=755", memory),
    ]
    mounts += [_bind(str(overlay.source), overlay.target, "bind", "ro") for overlay in spec.host_paths]
    if spec.first_id is None:
        # gVisor would cover them in its own kernel, and its processes could still read them.
        mounts += [_bind(spec.nothing, path, "bind", "ro") for path in spec.hidden]
    # Without this gVisor would put a tmpfs there, outside the disk's limits.
    mounts.append(_bind(f"{spec.root}/tmp", "/tmp", "bind", "rw"))
    mounts += [_own_bind(bind) for bind in spec.binds]
    mounts.append(_bind(spec.agent, AGENT_PATH, "bind", "ro"))
    mounts.append(_bind(spec.loader, LOADER, "bind", "ro"))
    mounts.append(_bind(spec.link, LINK_PATH, "bind", "rw", "noexec"))
    return mounts


def agent_capabilities(shape: Shape) -> Mapping[str, int]:
    """Those of the agent, with the kernel's number of each."""
    return {name: _CAPABILITIES[name] for name in (_FEWEST_CAPABILITIES if shape.powerless else _CAPABILITIES)}


def _resources(limits: Limits, native: bool) -> dict[str, Any]:
    # gVisor needs two tasks of the machine for each process inside, and some for itself; without one of them it dies.
    # So there the limit of the cgroup is a backstop, and programs meet RLIMIT_NPROC, which its own kernel keeps.
    tasks = limits.pids + PARKED_TASKS if native else 2 * (limits.pids + PARKED_TASKS) + 256
    return {
        "devices": [{"allow": False, "access": "rwm"}],
        "memory": {"limit": limits.memory, "swap": limits.memory},
        "cpu": {"quota": max(1000, int(limits.cpus * _PERIOD)), "period": _PERIOD},
        "pids": {"limit": tasks},
    }


def build_config(spec: BundleSpec) -> dict[str, Any]:
    limits, shape = spec.sandbox.limits, spec.sandbox.shape
    namespaces: list[dict[str, str]] = [{"type": name} for name in ("pid", "mount", "ipc", "uts")]
    namespaces.append({"type": "network", "path": spec.network})
    linux: dict[str, Any] = {
        "cgroupsPath": spec.cgroup,
        "resources": _resources(limits, spec.first_id is not None),
        "maskedPaths": [*_MASKED, *(spec.hidden if spec.first_id is not None else ())],
        "readonlyPaths": list(_READ_ONLY),
        "seccomp": spec.seccomp,
    }
    if spec.first_id is not None:
        namespaces += [{"type": "user"}, {"type": "cgroup"}]
        mapping = [{"containerID": 0, "hostID": spec.first_id, "size": ID_COUNT}]
        linux |= {"uidMappings": mapping, "gidMappings": mapping}
    files = min(limits.open_files, spec.hard_files)
    processes = limits.pids + PARKED_TASKS
    capabilities = [*agent_capabilities(shape), *(["CAP_SYS_ADMIN"] if spec.mounting else [])]
    return {
        "ociVersion": "1.0.2",
        "hostname": spec.sandbox.hostname,
        "root": {"path": spec.root, "readonly": shape.read_only},
        "mounts": _mounts(spec),
        "linux": linux | {"namespaces": namespaces},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "env": ["PATH=/usr/bin:/bin"],
            "args": [AGENT_PATH, "--listen", f"{LINK_PATH}/agent.sock", "--instance", spec.instance.hex()],
            "noNewPrivileges": True,
            "oomScoreAdj": 0,
            "capabilities": {name: list(capabilities) for name in ("bounding", "effective", "permitted")},
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "soft": files, "hard": files},
                {"type": "RLIMIT_NPROC", "soft": processes, "hard": processes},
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
            ],
        },
    }


def write_bundle(paths: SandboxPaths, config: dict[str, Any]) -> None:
    paths.bundle.mkdir(mode=0o700)
    (paths.bundle / "config.json").write_text(json.dumps(config))
    (paths.bundle / NOTHING).touch(mode=0o444)
