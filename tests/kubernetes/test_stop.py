"""A cluster ends without a trace, however it ends, and beside another one that goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.cluster.build import Components
from k8e.cluster.cluster import Cluster, find_cluster, start_cluster, stop_cluster
from k8e.cluster.errors import ClusterError, StartFailed
from k8e.cluster.machine import find_boot
from k8e.cluster.place import Place
from tests.kubernetes.conftest import ROOT, say
from tests.kubernetes.kubectl import Kubectl, make_busybox, make_pod

NAMESPACES = ("mnt", "net", "pid")
# Written by components of a cluster that is not in namespaces of its own.
FOLDERS = (
    "/etc/cni",
    "/opt/cni",
    "/opt/containerd",
    "/run/containerd",
    "/var/lib/cni",
    "/var/lib/kubelet",
    "/var/log/pods",
)
KERNEL = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "cluster")
    yield place
    stop_cluster(place)


def read_machine() -> tuple[dict[str, bool], list[str]]:
    """What no cluster may change on the machine."""
    values = [Path("/proc/sys", name).read_text() for name in KERNEL]
    return {folder: os.path.exists(folder) for folder in FOLDERS}, values


def read_namespaces(pid: str) -> set[str]:
    with contextlib.suppress(OSError):
        return {os.readlink(f"/proc/{pid}/ns/{name}") for name in NAMESPACES}
    return set()


def find_traces(place: Place, namespaces: set[str]) -> list[str]:
    """Processes, mounts, links, routes, control groups, rules and files of a cluster."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if read_namespaces(pid) & namespaces:
            found.append(f"process {pid}")
        with contextlib.suppress(OSError):
            if str(place.root) in Path(f"/proc/{pid}/mountinfo").read_text():
                found.append(f"a mount that process {pid} sees")
    found += [f"link {name}" for _, name in socket.if_nameindex() if name == place.link]
    routes = subprocess.run(["ip", "route", "show", "table", "all"], capture_output=True, text=True, check=True).stdout
    found += [f"route {line}" for line in routes.splitlines() if place.link in line]
    found += [f"control group {path}" for path in Path("/sys/fs/cgroup").rglob(place.group)]
    rules = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    found += [f"rules {line}" for line in rules.splitlines() if "kube" in line or "cni" in line]
    return found + [f"file {path}" for path in place.root.parent.iterdir()]


def test_stop_leaves_nothing(cluster: Cluster, components: Components, place: Place) -> None:
    """Killed while it starts, started again, used, and stopped, while another cluster of the machine goes on."""
    before = read_machine()
    command = [sys.executable, str(ROOT / "scripts" / "cluster.py"), "start", "--folder", str(place.root)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as starter:
        assert starter.stderr is not None
        assert any("kube-apiserver runs" in line for line in starter.stderr)
        starter.kill()
    assert find_cluster(place) is None

    second = start_cluster(place, components, say)
    assert not second.addresses.network.overlaps(cluster.addresses.network)
    assert start_cluster(place, components, say) == second
    second.import_image(make_busybox())
    kubectl = Kubectl(second, "default")
    kubectl.apply(*(make_pod(runtime, runtime, "exec sleep 1000") for runtime in ("native", "gvisor")))
    kubectl("wait", "--for=condition=Ready", "pod/native", "pod/gvisor", "--timeout=120s")
    namespaces = set.union(*(read_namespaces(str(pid)) for pid in find_boot(place))) - read_namespaces("self")
    assert len(namespaces) == len(NAMESPACES)
    assert len(find_traces(place, namespaces)) > 20  # so it would find some

    stop_cluster(place)
    assert find_traces(place, namespaces) == []
    assert read_machine() == before
    assert Kubectl(cluster, "default").get(f"node/{cluster.place.node}")


def test_a_folder_of_another_purpose_is_not_touched(components: Components, place: Place) -> None:
    place.root.mkdir()
    (place.root / "thesis").write_text("years of work")
    for attempt in (lambda: start_cluster(place, components, say), lambda: stop_cluster(place)):
        with pytest.raises(ClusterError, match="not_a_cluster"):
            attempt()
    assert [path.name for path in place.root.iterdir()] == ["thesis"]
    shutil.rmtree(place.root)


def test_a_start_that_fails_is_explained_and_leaves_nothing(components: Components, place: Place) -> None:
    broken = place.root.parent / "broken"
    broken.mkdir()
    (broken / "etcd").write_text("#!/bin/sh\necho no space left on device\nexit 3\n")
    (broken / "etcd").chmod(0o755)
    with pytest.raises(StartFailed, match="etcd does not start: it ended with 3") as caught:
        start_cluster(place, Components({**components.folders, "etcd": broken}), say)
    assert caught.value.detail == "no space left on device"
    shutil.rmtree(broken)
    assert find_traces(place, set()) == []


def test_a_killed_cluster_ends_whole_and_is_cleaned(components: Components, place: Place) -> None:
    started = start_cluster(place, components, say)
    assert find_cluster(place) == started
    pids = find_boot(place)
    namespaces = set.union(*(read_namespaces(str(pid)) for pid in pids)) - read_namespaces("self")
    os.kill(max(pids), signal.SIGKILL)
    while any(read_namespaces(pid) & namespaces for pid in filter(str.isdigit, os.listdir("/proc"))):
        time.sleep(0.02)
    assert find_cluster(place) is None
    stop_cluster(place)
    assert find_traces(place, namespaces) == []
