"""The node of a member: containerd with the runtimes that are there, the kubelet, which joins by a token and renews its
own certificates, the pods' network, and kube-proxy.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from k8e.cluster.api import Api, becomes_true
from k8e.cluster.build import Components
from k8e.cluster.errors import StartFailed
from k8e.cluster.image import PAUSE, make_image
from k8e.cluster.member.addons.images import AddonImage
from k8e.cluster.member.images import NodeImages
from k8e.cluster.member.layout import LIMITS, LOCAL_URL, Layout, Membership
from k8e.cluster.member.masquerade import set_masquerade
from k8e.cluster.member.objects import SHARED
from k8e.cluster.member.runtimes import Runtime, describe_containerd, label_node
from k8e.cluster.member.servers.forwarder import PORT
from k8e.cluster.supervisor import Program
from k8e.cluster.trust.join_token import NAMESPACE
from k8e.cluster.trust.leaves import describe_kubeconfig, name_file, write_file

_MAX_PODS: Final = 220  # of the 253 addresses that a node has
_CONTAINERD: Final = """\
version = 3
root = "{agent}/containerd"
state = "{run}/containerd/state"

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{agent}/opt"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"

[plugins."io.containerd.cri.v1.runtime"]
# A score below containerd's own needs CAP_SYS_RESOURCE, which root does not have on every machine.
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{plugins}"]
conf_dir = "{agent}/etc/cni"
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
"""


class Node:
    def __init__(self, layout: Layout, membership: Membership, components: Components, runtimes: list[Runtime]) -> None:
        self._layout = layout
        self._member = membership
        self._components = components
        self._runtimes = runtimes
        self._etc = layout.agent / "etc"
        self.api = Api(LOCAL_URL, membership.server_authority, layout.node_certificate)
        (self._etc / "cni").mkdir(parents=True, exist_ok=True)
        write_file(self._etc / "client-ca.crt", membership.client_authority.encode(), mode=0o644)

    def containerd(self) -> Program:
        layout = self._layout
        content = _CONTAINERD.format(
            agent=layout.agent,
            run=layout.run,
            socket=layout.containerd,
            pause=PAUSE,
            plugins=self._components.program("bridge").parent,
        )
        path = self._etc / "containerd" / "config.toml"
        write_file(path, (content + describe_containerd(self._runtimes)).encode(), mode=0o644)
        layout.containerd.parent.mkdir(mode=0o711, parents=True, exist_ok=True)

        async def is_ready() -> bool:
            return await self._ctr("version") == 0

        argv = [str(self._components.program("containerd")), "--config", str(path)]
        return Program("containerd", argv, is_ready, reads=(path,))

    def forwarder(self) -> Program:
        argv = [
            sys.executable,
            "-P",
            "-m",
            "k8e.cluster.member.servers.forwarder",
            str(self._layout.servers),
            str(PORT),
        ]

        async def is_ready() -> bool:
            answer = await Api(LOCAL_URL, self._member.server_authority).get("/livez")
            return answer is not None  # also when the question is refused

        return Program("forwarder", argv, is_ready, limits=LIMITS["forwarder"])

    async def import_pause(self) -> None:
        image = make_image(PAUSE, {"pause": self._components.program("pause").read_bytes()}, ["/pause"])
        if await self._ctr("images", "import", "-", given=image) != 0:
            raise _failure("containerd does not take the pause image")

    async def import_images(self, images: NodeImages) -> None:
        """Imports what is not there yet. Pinned: the kubelet does not remove them when its disk is full."""
        there = (await self._ask_ctr("images", "list", "--quiet")).split()
        for name, archive in ((images.agent, images.agent_archive), (images.sandbox, images.sandbox_archive)):
            if name in there:
                continue
            source = "-" if isinstance(archive, bytes) else str(archive)
            given = archive if isinstance(archive, bytes) else None
            if await self._ctr("images", "import", source, given=given) != 0:
                raise _failure(f"containerd does not take the image {name}")
            await self._ctr("images", "label", name, "io.cri-containerd.pinned=pinned")

    async def import_addons(self, images: Mapping[str, AddonImage]) -> None:
        there = (await self._ask_ctr("images", "list", "--quiet")).split()
        for image in images.values():
            if image.name in there:
                continue
            if await self._ctr("images", "import", "-", given=await asyncio.to_thread(image.make)) != 0:
                raise _failure(f"containerd does not take the image {image.name}")
            await self._ctr("images", "label", image.name, "io.cri-containerd.pinned=pinned")

    def helper(self, program: Sequence[str], namespace: str) -> Program:
        """Applies the lists of hosts of the sandboxes on this node. It asks as the node, which sees its own pods."""
        member = self._member
        argv = [
            *(*program, "node-helper", f"--node={member.node}", f"--address={member.address}"),
            *(f"--namespace={namespace}", f"--state={self._layout.helper}", f"--kubeconfig={self._own_kubeconfig()}"),
        ]
        where = (str(member.address), 10541)
        return Program("node-helper", argv, lambda: accepts(*where), health=lambda: accepts(*where))

    async def read_sandboxes(self) -> str:
        """Returns the namespace of the cluster's sandboxes; empty: there are none."""
        answer = await self.api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{SHARED}")
        if answer is None or answer[0] != 200:
            raise _failure("the node cannot read what all nodes may know")
        return str(json.loads(answer[1])["data"].get("sandboxes", ""))

    def kubelet(self) -> Program:
        layout, member = self._layout, self._member
        config: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self._etc / "client-ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "rotateCertificates": True,
            "serverTLSBootstrap": True,
            "readOnlyPort": 0,
            "containerRuntimeEndpoint": f"unix://{layout.containerd}",
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "maxPods": _MAX_PODS,
            "podLogsDir": str(layout.agent / "pods"),
            "clusterDomain": "cluster.local",
            "clusterDNS": [str(member.networks.dns)],
        }
        path = self._etc / "kubelet.yaml"
        write_file(path, yaml.safe_dump(config).encode())
        argv = [
            str(self._components.program("kubelet")),
            f"--config={path}",
            f"--kubeconfig={layout.agent / 'kubelet.kubeconfig'}",
            f"--bootstrap-kubeconfig={layout.bootstrap}",
            f"--root-dir={layout.kubelet}",
            f"--cert-dir={layout.kubelet / 'pki'}",
            f"--hostname-override={member.node}",
            f"--node-ip={member.address}",
        ]

        async def has_joined() -> bool:
            # Not whether it serves: it ends and is started again as long as containerd finds its earlier pods.
            return layout.node_certificate.exists() and await self._read_part() is not None

        return Program("kubelet", argv, has_joined, patience=120.0, reads=(path,), limits=LIMITS["kubelet"])

    async def set_up_network(self) -> None:
        """Writes the pods' network, when the cluster has given the node its part; containerd notices the file."""
        part = await self._read_part()
        await set_masquerade(self._member.networks.pods)
        self._layout.bootstrap.unlink(missing_ok=True)  # the token is not needed any more
        network = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "k8e-pods",
                    "isGateway": True,
                    "ipMasq": False,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(self._layout.run / "cni"),
                        "ranges": [[{"subnet": part}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        write_file(self._etc / "cni" / "pods.conflist", json.dumps(network).encode(), mode=0o644)
        kind = "application/merge-patch+json"
        labels = {"metadata": {"labels": label_node(self._runtimes)}}
        if (answer := await self.api.request("PATCH", self._path, labels, kind)) is None or answer[0] != 200:
            raise _failure("the node cannot say which runtimes it has")

    async def wait_ready(self, patience: float = 120.0) -> None:
        if not await becomes_true(self.api.has_condition(self._path, "Ready"), patience):
            raise _failure(f"the node is not ready after {patience:.0f} s")

    def _own_kubeconfig(self) -> Path:
        """Of the node itself, for programs of k8e and kube-proxy."""
        own, member = name_file(self._layout.node_certificate), self._member
        content = describe_kubeconfig(LOCAL_URL, member.server_authority.encode(), own)
        return write_file(self._layout.agent / "proxy.kubeconfig", content)

    def proxy(self) -> Program:
        member = self._member
        kubeconfig = self._own_kubeconfig()
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": str(member.networks.pods),
            "hostnameOverride": member.node,
            "bindAddress": str(member.address),
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        path = self._etc / "proxy.yaml"
        write_file(path, yaml.safe_dump(config).encode())
        argv = [str(self._components.program("kube-proxy")), f"--config={path}"]
        return Program("kube-proxy", argv, reads=(path,), limits=LIMITS["kube-proxy"])

    @property
    def _path(self) -> str:
        return f"/api/v1/nodes/{self._member.node}"

    async def _read_part(self) -> str | None:
        answer = await self.api.get(self._path)
        if answer is None or answer[0] != 200:
            return None
        part: str | None = (json.loads(answer[1]).get("spec") or {}).get("podCIDR")
        return part

    async def _ctr(self, *arguments: str, given: bytes | None = None) -> int:
        status, _ = await self._run_ctr(arguments, given)
        return status

    async def _ask_ctr(self, *arguments: str) -> str:
        return (await self._run_ctr(arguments))[1]

    async def _run_ctr(self, arguments: Sequence[str], given: bytes | None = None) -> tuple[int, str]:
        command = [str(self._components.program("ctr")), f"--address={self._layout.containerd}", "--namespace=k8s.io"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await process.communicate(given or b"")
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace")


async def accepts(host: str, port: int) -> bool:
    """Whether a program accepts connections there."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


def _failure(error: str) -> StartFailed:
    return StartFailed("cluster_not_set_up", error, hint="the logs of all components are in /var/lib/k8e/logs")
