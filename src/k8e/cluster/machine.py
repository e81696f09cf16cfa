"""Makes, finds and removes what a cluster has outside of its namespaces: a link with its route, control groups, and its
first process. Each carries the tag or the path of the cluster's folder, and is found by it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

from k8e.cluster.errors import ClusterError, StartFailed
from k8e.cluster.place import Addresses, Place

BOOT: Final = "k8e.cluster.boot"
_GROUPS: Final = Path("/sys/fs/cgroup")
# Private networks that few use; the local engine has 10.203.0.0/16.
_NETWORKS: Final = tuple(IPv4Network(f"10.{second}.0.0/16") for second in range(210, 250))
_PATIENCE: Final = 30.0


def make_link(place: Place, wanted: Addresses | None) -> Addresses:
    """Connects the machine with the cluster's network namespace, by a network that the machine does not use yet."""
    pid = next(iter(find_boot(place)), 0)
    with _alone():
        addresses = wanted or _choose(place)
        _ip("link", "add", place.link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _ip("address", "add", f"{addresses.machine}/{addresses.nodes.prefixlen}", "dev", place.link)
        _ip("link", "set", place.link, "up")
        _ip("route", "add", str(addresses.network), "via", str(addresses.node), "dev", place.link)
    return addresses


def remove_link(place: Place) -> None:
    if _has_link(place):
        subprocess.run(["ip", "link", "delete", place.link], stderr=subprocess.DEVNULL, check=False)
        # The kernel may be removing it already, with the namespace of its other end.
        _wait(lambda: not _has_link(place), f"the link {place.link}")


def make_groups(place: Place) -> None:
    for hierarchy in _hierarchies():
        # cgroup v2: the kubelet refuses a root that lacks a controller which the machine has.
        if hierarchy == _GROUPS:
            for controller in (hierarchy / "cgroup.controllers").read_text().split():
                with contextlib.suppress(OSError):  # one that is not for groups
                    (hierarchy / "cgroup.subtree_control").write_text(f"+{controller}")
        group = hierarchy / place.group
        group.mkdir(exist_ok=True)
        # cgroup v1: a group without processors takes no process, and the kubelet does not set this for its root.
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / name).exists() and (group / name).exists():
                (group / name).write_text((hierarchy / name).read_text())


def remove_groups(place: Place) -> None:
    """Removes the groups, which have no process any more."""
    for hierarchy in _hierarchies():
        top = hierarchy / place.group
        if top.is_dir():
            _wait(lambda top=top: _remove_tree(top), f"the control group {top}")  # type: ignore[misc]


def find_boot(place: Place) -> list[int]:
    """Returns the first process of the cluster, and the unshare(1) that has started it."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in pids if _read_argv(pid)[-2:] == _ending(place)]


def end_boot(place: Place) -> None:
    """Ends every process of the cluster, and returns when the kernel has."""
    with contextlib.ExitStack() as stack:
        found = []
        for pid in find_boot(place):
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                # Still the same process, or one that is ending already, which has no arguments any more.
                if _read_argv(pid)[-2:] in (_ending(place), []):
                    found.append((pid, descriptor))
        for _, descriptor in found:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        for pid, descriptor in found:
            # The first process of a pid namespace ends after all others in there.
            if not select.select([descriptor], [], [], _PATIENCE)[0]:
                raise _stuck(f"process {pid}")


def _ending(place: Place) -> list[str]:
    return [BOOT, str(place.root)]


def _read_argv(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []


def _choose(place: Place) -> Addresses:
    done = subprocess.run(["ip", "-json", "-4", "route", "show", "table", "all"], capture_output=True, check=True)
    used = [_parse(route["dst"]) for route in json.loads(done.stdout or b"[]")]
    first = int(place.tag, 16) % len(_NETWORKS)
    for network in (*_NETWORKS[first:], *_NETWORKS[:first]):
        if not any(network.overlaps(other) for other in used if other is not None):
            return Addresses(network)
    hint = "stop clusters that are not needed any more, or name a /16 with --network"
    raise StartFailed("no_network_left", "the machine uses all networks that a cluster may have", hint=hint)


def _parse(text: str) -> IPv4Network | None:
    """Default routes overlap with everything, and are no reason not to use a network."""
    return None if text == "default" else IPv4Network(text, strict=False)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Two clusters that choose at the same time would choose the same. A socket without a file leaves nothing."""
    end = time.monotonic() + _PATIENCE
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind("\0k8e-cluster-network")
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        yield


def _has_link(place: Place) -> bool:
    return place.link in {name for _, name in socket.if_nameindex()}


def _hierarchies() -> list[Path]:
    """cgroup v2 has one, v1 a folder for each controller."""
    if (_GROUPS / "cgroup.controllers").exists():
        return [_GROUPS]
    return sorted(path for path in _GROUPS.iterdir() if path.is_dir() and not path.is_symlink())


def _remove_tree(top: Path) -> bool:
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return not top.exists()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        detail = f"ip {' '.join(arguments)}: {done.stderr.strip()}"
        raise StartFailed(
            "no_link", "the machine cannot be connected with the cluster", detail=detail, hint="run as root"
        )


def _wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise _stuck(what)
        time.sleep(0.02)


def _stuck(what: str) -> ClusterError:
    return ClusterError("cluster_not_stopped", f"{what} of the cluster cannot be removed", hint="try to stop it again")
