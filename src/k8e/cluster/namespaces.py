"""The inside of the namespaces in which a cluster runs: mounts of its own, and its end of the link to the machine.

Called by the first process in there, before anything else is started. Components write to paths of the machine that no
option changes (/var/lib/kubelet, /var/lib/cni, /run/containerd, /run/netns) and set values of its kernel: here they
find folders and files of their own, which end with the namespaces.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from k8e.cluster.place import Addresses

_HIDDEN: Final = ("/run", "/var/lib", "/var/log")
_KEPT: Final = ("/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")

# The kubelet sets these for the whole machine if they are different, and the agent of Cilium the last two; they find
# them as they want them.
_KERNEL: Final = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
    "kernel/unprivileged_bpf_disabled": "1",
    "kernel/timer_migration": "0",
}


def enter_mounts(needed: Sequence[Path]) -> None:
    """Leaves of the machine's mounts only those that the cluster needs, and hides folders that are not its own.

    `needed` are folders that stay as they are, wherever they lie."""
    # A mount that stayed in this namespace would keep its disk busy after the machine has unmounted it.
    for point in reversed(list(_mount_points())):
        if not _is_below(point, _KEPT) and not any(_is_below(str(folder), (point,)) for folder in needed):
            _run("umount", "--lazy", point)
    hidden = [folder for folder in needed if _is_below(str(folder), _HIDDEN)]
    descriptors = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in hidden]
    for target in _HIDDEN:
        _run("mount", "-t", "tmpfs", "-o", "mode=0755", "k8e-cluster", target)
    for folder, descriptor in zip(hidden, descriptors, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", f"/proc/self/fd/{descriptor}", str(folder), descriptors=[descriptor])
        os.close(descriptor)
    values = Path("/run/kernel")
    values.mkdir()
    for name, value in _KERNEL.items():
        if not Path("/proc/sys", name).exists():  # a kernel without it
            continue
        file = values / name.replace("/", ".")
        file.write_text(f"{value}\n")
        _run("mount", "--bind", str(file), f"/proc/sys/{name}")
    # Volumes that pods mount reach other pods of the node; private to this namespace so far.
    _run("mount", "--make-rshared", "/")


def enter_network(addresses: Addresses) -> None:
    """Gives the node its address on the link, and routes for its pods. There is no way to anywhere else."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", f"{addresses.node}/{addresses.nodes.prefixlen}", "dev", "eth0")
    _run("ip", "link", "set", "eth0", "up")
    # kube-proxy changes the address of such packets, but only of packets that have a route.
    _run("ip", "route", "add", str(addresses.services), "dev", "eth0")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    # A new namespace takes over the machine's value, which is 1 where an engine of k8e has run. With it the kernel
    # drops every packet that Cilium redirects to its proxy: the way back to the pod is looked up by the mark that leads
    # to the proxy, and so the pod's address counts as one of the node's own.
    Path("/proc/sys/net/ipv4/conf/all/src_valid_mark").write_text("0\n")


def _mount_points() -> Iterator[str]:
    with open("/proc/self/mountinfo") as file:
        for line in file:
            point = line.split(" ")[4]
            if point != "/":
                yield point.encode().decode("unicode_escape")


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _run(*command: str, descriptors: Sequence[int] = ()) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, pass_fds=descriptors)
