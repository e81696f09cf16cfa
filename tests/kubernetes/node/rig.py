"""A node's helper, and a small internet behind the cluster: both in the network of the cluster's one node, which is
where a DaemonSet's pods with `hostNetwork` are."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from k8e.cluster.cluster import Cluster
from k8e.cluster.machine import find_boot
from tests.egress.internet import GATEWAY4, HOST4, NAME_SERVER, Internet, _close, _make_certificates
from tests.egress.namespaces import run_ip
from tests.egress.world import WIRE
from tests.kubernetes.engine.rig import ROOT, Site, rename, write_kubeconfig
from tests.kubernetes.kubectl import Kubectl

UPLINK = "uplink0"


def node_process(cluster: Cluster) -> int:
    """One in the node's network namespace."""
    own = os.stat("/proc/self/ns/net").st_ino
    return next(pid for pid in find_boot(cluster.place) if os.stat(f"/proc/{pid}/ns/net").st_ino != own)


def on_node(cluster: Cluster, *command: str) -> list[str]:
    return ["nsenter", f"--net=/proc/{node_process(cluster)}/ns/net", "--", *command]


def run_on_node(cluster: Cluster, *command: str, given: str | None = None) -> str:
    done = subprocess.run(on_node(cluster, *command), input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@contextlib.contextmanager
def internet_behind(cluster: Cluster) -> Iterator[Internet]:
    """The node's default route leads there. Its network translates addresses of pods, as clusters do."""
    table = f"test_{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="k8e-world-")))
        authority, certificate = _make_certificates(folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.egress.world"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for stream in (process.stdin, process.stdout):
            stack.callback(_close, stream)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        world = int(process.stdout.readline())
        node = node_process(cluster)
        run_ip("link", "add", UPLINK, "type", "veth", "peer", "name", WIRE, "netns", str(world), inside=node)
        run_ip("addr", "add", f"{HOST4}/24", "dev", UPLINK, inside=node)
        run_ip("addr", "add", f"{GATEWAY4}/24", "dev", WIRE, inside=world)
        run_ip("link", "set", UPLINK, "up", inside=node)
        for device in (WIRE, "lo"):
            run_ip("link", "set", device, "up", inside=world)
        run_ip("route", "add", "default", "via", GATEWAY4, inside=node)
        run_ip("route", "add", "local", "default", "dev", "lo", "table", "main", inside=world)
        rules = (
            f"add table ip {table}\n"
            f"add chain ip {table} c {{ type nat hook postrouting priority 100; }}\n"
            f"add rule ip {table} c oif {UPLINK} masquerade\n"
        )
        run_on_node(cluster, "nft", "-f", "-", given=rules)
        stack.callback(run_on_node, cluster, "nft", "delete", "table", "ip", table)
        internet = Internet(process, authority)
        internet.ask(do="open", certificate=str(certificate))
        yield internet


def make_helper_account(kubectl: Kubectl, folder: Path) -> Path:
    """Applies the rights of the helper's manifest in this namespace; returns a kubeconfig of its account."""
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/node-helper.yaml").read_text())
    names = {"k8e": kubectl.namespace, "k8e-system": kubectl.namespace}
    wanted = ("ServiceAccount", "Role", "RoleBinding")
    kubectl.apply(*(rename(one, names) for one in documents if one["kind"] in wanted))
    return write_kubeconfig(kubectl, "k8e-node-helper", folder / "helper.kubeconfig")


class Helper:
    """`k8e node-helper`, as a process that can be killed and started again."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site = site
        self._folder = folder
        self._kubeconfig = make_helper_account(site.kubectl, folder)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._folder / "helper.log"

    def start(self) -> None:
        place, addresses = self._site.cluster.place, self._site.cluster.addresses
        program = Path(sys.executable).with_name("k8e")
        command = on_node(
            self._site.cluster,
            *(str(program), "node-helper", f"--node={place.node}", f"--address={addresses.node}"),
            f"--namespace={self._site.kubectl.namespace}",
            *(f"--state={self._folder / 'node'}", f"--kubeconfig={self._kubeconfig}", f"--nameserver={NAME_SERVER}"),
        )
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None
