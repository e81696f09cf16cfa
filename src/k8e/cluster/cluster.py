"""Starts and stops a cluster of one node, in namespaces of its own: network, mounts and processes.

The machine reaches the API server, pods and services by their addresses; nothing listens on a port of the machine. Stop
leaves nothing: the kernel ends the namespaces with all that is in them, and the rest carries the folder's tag. Both can
be killed at any moment and run again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from k8e.cluster.build import Components
from k8e.cluster.errors import ClusterError, StartFailed
from k8e.cluster.machine import BOOT, end_boot, find_boot, make_groups, make_link, remove_groups, remove_link
from k8e.cluster.node import RUNTIMES
from k8e.cluster.place import Addresses, Place
from k8e.cluster.supervisor import read_end

Say = Callable[[str], None]
# As no child of this process, which may end before the cluster does, or long after it.
_UNSHARE: Final = ("setsid", "--fork", "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that runs, as its users need to know it."""

    place: Place
    addresses: Addresses
    components: Components

    @property
    def body(self) -> dict[str, Any]:
        """The same as JSON: `cluster.json` in the folder."""
        return {
            "node": self.place.node,
            "server": self.addresses.api,
            "kubeconfig": str(self.place.kubeconfig),
            "containerd": str(self.place.containerd),
            "network": str(self.addresses.network),
            "pods": str(self.addresses.node_pods),
            "services": str(self.addresses.services),
            "runtime_classes": list(RUNTIMES),
            "kubectl": str(self.components.program("kubectl")),
            "ctr": str(self.components.program("ctr")),
            "logs": str(self.place.logs),
            "components": self.components.body,
        }

    def import_image(self, archive: bytes) -> None:
        """Gives the node an image (k8e.cluster.image): no registry can be reached from there."""
        command = [str(self.components.program("ctr")), f"--address={self.place.containerd}", "--namespace=k8s.io"]
        subprocess.run([*command, "images", "import", "-"], input=archive, check=True, capture_output=True)


def find_cluster(place: Place) -> Cluster | None:
    """Returns the cluster of a folder if it runs and is ready."""
    try:
        body = json.loads(place.record.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not find_boot(place):
        return None
    return Cluster(place, Addresses.parse(body["network"]), Components.parse(body["components"]))


def start_cluster(place: Place, components: Components, say: Say, wanted: Addresses | None = None) -> Cluster:
    """Returns the cluster when it is ready: the one that runs in this folder, or a new one."""
    _require_root()
    with _lock(place):
        if (found := find_cluster(place)) is not None:
            return found
        _clean(place)
        try:
            return _start(place, components, say, wanted)
        except BaseException:
            _clean(place)
            raise


def stop_cluster(place: Place) -> None:
    """Ends the cluster, and removes all of it. Does nothing when there is none."""
    _require_root()
    with _lock(place):
        _clean(place)


def _start(place: Place, components: Components, say: Say, wanted: Addresses | None) -> Cluster:
    place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.mark.touch()
    place.logs.mkdir()
    make_groups(place)
    log = place.logs / "boot.log"
    command = [*_UNSHARE, sys.executable, "-m", BOOT, str(place.root)]
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd="/",
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.wait()  # of setsid(1), which has ended
        _read(process.stdout, log)
        addresses = make_link(place, wanted)
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the next line says why
            order = {"network": str(addresses.network), "components": components.body}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.close()
        while "ready" not in (told := _read(process.stdout, log)):
            say(told["step"])
    cluster = Cluster(place, addresses, components)
    # Last: a folder with this file has a cluster that was ready.
    place.record.write_text(json.dumps(cluster.body, indent=1) + "\n")
    return cluster


def _read(stream: IO[str], log: Path) -> dict[str, Any]:
    line = stream.readline()
    if not line:
        hint = "the end of its log is the detail"
        raise StartFailed("cluster_ended", "the cluster ended while it started", detail=read_end(log, 1500), hint=hint)
    told: dict[str, Any] = json.loads(line)
    if "error" in told:
        body = told["error"]
        raise StartFailed(body["code"], body["error"], detail=body["detail"], hint=body["hint"])
    return told


def _clean(place: Place) -> None:
    """Removes all that a cluster in this folder has left. An empty folder may be there, and one without a mark is not
    touched."""
    end_boot(place)
    remove_link(place)
    remove_groups(place)
    if place.mark.exists():
        _refuse_mounts(place)
        # The mark last: a removal that was cut off can go on.
        for path in sorted(place.root.iterdir(), key=lambda path: path == place.mark):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        place.root.rmdir()
    elif place.root.exists() and (not place.root.is_dir() or any(place.root.iterdir())):
        hint = "name a folder that is not there yet"
        raise ClusterError("not_a_cluster", f"{place.root} has files that are not a cluster's", hint=hint)


def _refuse_mounts(place: Place) -> None:
    """Refuses to remove what is mounted in the folder: mounts of a cluster ended with its namespaces."""
    with open("/proc/self/mountinfo") as file:
        points = [line.split(" ")[4] for line in file]
    if found := [point for point in points if point.startswith(f"{place.root}/")]:
        hint = f"unmount it: umount {found[-1]}"
        raise ClusterError("cluster_not_stopped", f"{found[-1]} is mounted in the cluster's folder", hint=hint)


@contextlib.contextmanager
def _lock(place: Place) -> Iterator[None]:
    """One command at a time for each folder. The file is removed again, by the one that has the lock."""
    place.lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(place.lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_file_at(file, place.lock):
                try:
                    yield
                finally:
                    place.lock.unlink()
                return


def _is_file_at(file: IO[str], path: Path) -> bool:
    """Whether the file that was locked is still the one with this name: the command before may have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _require_root() -> None:
    if os.geteuid() != 0:
        raise StartFailed("needs_root", "namespaces, control groups and links need root", hint="run it with sudo")
