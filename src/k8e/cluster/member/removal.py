"""Takes a member back: ends its programs and pods, and removes mounts, network and files. It can be killed at any
moment and run again; each step finds by itself what is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from k8e.cluster.child import find_children
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.kubelet_rules import remove_kubelet_rules
from k8e.cluster.member.layout import Layout
from k8e.cluster.member.masquerade import TABLE
from k8e.cluster.member.routes import PROTOCOL

BRIDGE: Final = "k8e-pods"
_GROUPS: Final = Path("/sys/fs/cgroup")
_PODS: Final = "kubepods"  # the kubelet's group, in every hierarchy
_NAMESPACES: Final = Path("/run/netns")
_PATIENCE: Final = 30.0


async def remove_member(layout: Layout) -> None:
    """Removes everything but the node's object in the cluster, which a server removes. No supervisor may run."""
    # The kubelet first: it would start again what is ended.
    for child in sorted(find_children(layout.logs), key=lambda child: child.name != "kubelet"):
        await child.end(10.0)
    remove_pods(layout)
    await _remove_rules(layout)
    remove_mounts(layout)
    remove_network()
    for path in (layout.server, layout.agent, layout.logs, layout.run / "containerd", layout.run / "cni"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
    layout.kubeconfig.unlink(missing_ok=True)


async def _remove_rules(layout: Layout) -> None:
    """Of the node's helper."""
    if layout.helper.exists():
        from k8e.engine.kubernetes.node.removal import remove_rules

        await remove_rules(layout.helper)


def remove_state(layout: Layout) -> None:
    """Removes what the gateway has left, too: its sessions, keys and logs."""
    for folder in (layout.state, layout.run):
        if not folder.is_dir():
            continue
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        with contextlib.suppress(OSError):  # it may be a disk of its own
            folder.rmdir()


def remove_pods(layout: Layout) -> None:
    """Ends all processes of pods, then the shims of containerd that have kept them."""
    tops = [path for path in _list_groups() if path.is_dir()]
    for top in tops:
        _wait(lambda top=top: _end_group(top), f"the processes in {top}")  # type: ignore[misc]
    for pid in _list_shims(layout):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _wait(lambda: not list(_list_shims(layout)), "the shims of containerd")
    for top in tops:
        _wait(lambda top=top: _remove_group(top), f"the control group {top}")  # type: ignore[misc]


def remove_mounts(layout: Layout) -> None:
    """The innermost first."""
    folders = tuple(f"{path}/" for path in (layout.agent, layout.run))
    for point in reversed(_list_mounts()):
        pods = point.startswith(f"{_NAMESPACES}/cni-")
        if pods or point.startswith(folders):
            subprocess.run(["umount", "--lazy", point], check=True, stdin=subprocess.DEVNULL)
        if pods:
            Path(point).unlink(missing_ok=True)


def remove_network() -> None:
    """The bridge of the pods, routes to other nodes, the rules of kube-proxy, and those for addresses outside."""
    _try("ip", "link", "delete", BRIDGE)
    _try("ip", "route", "flush", "proto", PROTOCOL)
    for family in ("ip", "ip6"):
        _try("nft", "delete", "table", family, "kube-proxy")
    _try("nft", "delete", "table", "ip", TABLE)
    remove_kubelet_rules()


def _list_groups() -> list[Path]:
    if (_GROUPS / "cgroup.controllers").exists():
        return [_GROUPS / _PODS]
    return [path / _PODS for path in sorted(_GROUPS.iterdir()) if path.is_dir() and not path.is_symlink()]


def _end_group(top: Path) -> bool:
    """Kills what is in there; True when there was nothing."""
    pids = []
    for folder, _, _ in os.walk(top):
        with contextlib.suppress(OSError):
            pids += [int(line) for line in Path(folder, "cgroup.procs").read_text().split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not pids


def _remove_group(top: Path) -> bool:
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return not top.exists()


def _list_shims(layout: Layout) -> Iterator[int]:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if "containerd-shim-" in argv[0] and str(layout.containerd) in argv:
                yield pid


def _list_mounts() -> list[str]:
    with open("/proc/self/mountinfo") as file:
        return [line.split(" ")[4].encode().decode("unicode_escape") for line in file]


def _try(*command: str) -> None:
    """Runs a command that removes something, which may be gone already."""
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)


def _wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            hint = "try again; the kernel may need longer to let go of it"
            raise ClusterError("cluster_not_stopped", f"{what} cannot be removed", hint=hint)
        time.sleep(0.02)
