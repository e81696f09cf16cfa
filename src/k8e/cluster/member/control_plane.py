"""The control plane of a server: etcd, the API server, the controllers and the scheduler, each as a user of its own,
which can read its own keys only.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from k8e.cluster.api import Api, Question
from k8e.cluster.build import Components
from k8e.cluster.member.layout import AUTHORITIES, LIMITS, USERS, Layout, Networks
from k8e.cluster.member.servers.etcd_members import CLIENTS, EtcdMembers, name_peer
from k8e.cluster.supervisor import Program
from k8e.cluster.trust.authority import Authority, Leaf
from k8e.cluster.trust.leaves import (
    Leaves,
    contain_file,
    describe_kubeconfig,
    make_signing_key,
    name_file,
    read_if_there,
    read_public_key,
    write_file,
)

ADMINS: Final = "system:masters"
_PATIENCE: Final = 600.0  # seconds that one of several servers waits for a majority, after a power failure of all
_NAMES: Final = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
# Who changed what and when. Never the content: Secrets are among it.
_AUDIT: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
        {"level": "None", "resources": [{"group": "", "resources": ["events", "nodes/status", "pods/status"]}]},
        {"level": "Metadata"},
    ],
}
_ADMISSION: Final = {
    "apiVersion": "apiserver.config.k8s.io/v1",
    "kind": "AdmissionConfiguration",
    "plugins": [
        {
            "name": "PodSecurity",
            "configuration": {
                "apiVersion": "pod-security.admission.config.k8s.io/v1",
                "kind": "PodSecurityConfiguration",
                "defaults": {"enforce": "baseline", "enforce-version": "latest", "warn": "restricted"},
                "exemptions": {"namespaces": ["kube-system"]},
            },
        }
    ],
}


class ControlPlane:
    def __init__(
        self, layout: Layout, networks: Networks, components: Components, node: str, address: IPv4Address
    ) -> None:
        self.layout = layout
        self._networks = networks
        self.components = components
        self.node = node
        self._address = address
        now = time.time()
        layout.server.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.authorities = {name: Authority.open(layout.authorities / name, f"k8e {name}", now) for name in AUTHORITIES}
        self.leaves = Leaves(layout.tls)
        for name, authority in self.authorities.items():
            write_file(self.public(name), authority.certificate, mode=0o644)
        self.own_certificate = self._leaf("supervisor/client", "client", Leaf("k8e:supervisor", (ADMINS,)))
        self._own_etcd = self._leaf("supervisor/etcd", "etcd", Leaf("k8e:supervisor"))
        self.url = f"https://{address}:6443"
        self.api = Api(self.url, self.public("server"), self.own_certificate)
        self.etcd = Api(f"https://127.0.0.1:{CLIENTS}", self.public("etcd"), self._own_etcd)
        self._admin = self._leaf("supervisor/admin", "client", Leaf("k8e:admin", (ADMINS,)))
        self.write_kubeconfig()

    def write_kubeconfig(self) -> None:
        """Writes the administrator's; again when its certificate was renewed."""
        user = contain_file(self._admin.read_bytes())
        self.layout.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.layout.kubeconfig, describe_kubeconfig(self.url, self.authorities["server"].certificate, user))

    def list_etcd(self, addresses: Sequence[str]) -> EtcdMembers:
        return EtcdMembers(addresses, self.public("etcd"), self._own_etcd)

    def programs(self) -> Iterator[Program]:
        """In the order in which they can start."""
        yield self._etcd()
        yield self._api_server()
        yield self._controller_manager()
        yield self._scheduler()

    def _etcd(self) -> Program:
        name = "etcd"
        own = self._leaf("etcd/etcd", "etcd", Leaf(name, hosts=("localhost", "127.0.0.1", str(self._address))), name)
        data = self._own_folder(self.layout.etcd, name)
        loopback, clients = (f"https://{address}:{CLIENTS}" for address in ("127.0.0.1", self._address))
        peers = name_peer(self._address)
        told = (read_if_there(self.layout.initial_cluster) or b"").decode()
        argv = [
            str(self.components.program("etcd")),
            f"--data-dir={data}",
            f"--name={self.node}",
            f"--initial-cluster={told or f'{self.node}={peers}'}",
            f"--initial-cluster-state={'existing' if told else 'new'}",
            f"--initial-advertise-peer-urls={peers}",
            f"--listen-peer-urls={peers}",
            f"--listen-client-urls={loopback},{clients}",
            f"--advertise-client-urls={clients}",
            # Twice etcd's own: a disk that is busy for a second is no reason for an election.
            "--heartbeat-interval=200",
            "--election-timeout=2000",
            *_tls("", own, self.public("etcd")),
            *_tls("peer-", own, self.public("etcd")),
            "--log-level=warn",
        ]
        # Whether it lives, not whether there is a majority: to end it would not help the others.
        ask = self.etcd.is_served("/livez")
        return Program(name, argv, ask, _PATIENCE if told else 60.0, health=ask, user=USERS[name], limits=LIMITS[name])

    def _api_server(self) -> Program:
        name = "kube-apiserver"
        # 127.0.0.1: nodes reach an API server through their forwarder.
        hosts = (*_NAMES, "localhost", "127.0.0.1", self.node, str(self._address), str(self._networks.api))
        own = self._leaf(f"{name}/server", "server", Leaf(name, hosts=hosts), name)
        etcd = self._leaf(f"{name}/etcd", "etcd", Leaf(name), name)
        kubelet = self._leaf(f"{name}/kubelet", "client", Leaf(name), name)
        proxy = self._leaf(f"{name}/front-proxy", "front-proxy", Leaf("front-proxy-client"), name)
        signing = make_signing_key(self.layout.signing_key)
        public = self._give(name, "service-account.pub", read_public_key(signing))
        private = self._give(name, "service-account.key", signing.read_bytes())
        encryption = self._give(name, "encryption.json", json.dumps(self._describe_encryption()).encode())
        audit = self._give(name, "audit.json", json.dumps(_AUDIT).encode())
        admission = self._give(name, "admission.json", json.dumps(_ADMISSION).encode())
        log = self._own_folder(self.layout.server / "audit", name) / "audit.log"
        argv = [
            str(self.components.program(name)),
            f"--advertise-address={self._address}",
            f"--bind-address={self._address}",
            "--secure-port=6443",
            f"--tls-cert-file={own}",
            f"--tls-private-key-file={own}",
            f"--client-ca-file={self.public('client')}",
            "--etcd-servers=https://127.0.0.1:2379",
            f"--etcd-cafile={self.public('etcd')}",
            f"--etcd-certfile={etcd}",
            f"--etcd-keyfile={etcd}",
            f"--kubelet-certificate-authority={self.public('kubelet')}",
            f"--kubelet-client-certificate={kubelet}",
            f"--kubelet-client-key={kubelet}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={self.public('front-proxy')}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={proxy}",
            f"--proxy-client-key-file={proxy}",
            # To metrics-server's pod itself, and not by its service: a machine may have no route for services.
            "--enable-aggregator-routing=true",
            f"--service-cluster-ip-range={self._networks.services}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={private}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--enable-bootstrap-token-auth=true",
            "--anonymous-auth=false",
            "--allow-privileged=true",
            "--profiling=false",
            f"--encryption-provider-config={encryption}",
            f"--audit-policy-file={audit}",
            f"--audit-log-path={log}",
            "--audit-log-maxsize=32",
            "--audit-log-maxbackup=4",
            f"--admission-control-config-file={admission}",
        ]
        health = self.api.is_served("/livez")
        reads = (encryption, audit, admission)
        return Program(
            name, argv, self.api.is_served("/readyz"), 120.0, health, USERS[name], reads, limits=LIMITS[name]
        )

    def _controller_manager(self) -> Program:
        name = "kube-controller-manager"
        serve, health = self._loopback(name, 10257)
        signers = []
        for authority, signer in (("client", "kubelet-client"), ("kubelet", "kubelet-serving")):
            key = self._give(name, f"{authority}-ca.key", self.authorities[authority].key)
            signers.append(f"--cluster-signing-{signer}-cert-file={self.public(authority)}")
            signers.append(f"--cluster-signing-{signer}-key-file={key}")
        argv = [
            str(self.components.program(name)),
            *self._kubeconfigs(name, f"system:{name}"),
            *serve,
            "--controllers=*,tokencleaner",
            f"--root-ca-file={self.public('server')}",
            *signers,
            "--cluster-signing-duration=720h",
            f"--service-account-private-key-file={self._give(name, 'service-account.key', self._signing_key())}",
            "--use-service-account-credentials=true",
            "--allocate-node-cidrs=true",
            f"--cluster-cidr={self._networks.pods}",
            f"--service-cluster-ip-range={self._networks.services}",
            "--profiling=false",
        ]
        return Program(name, argv, health, health=health, user=USERS[name], limits=LIMITS[name])

    def _scheduler(self) -> Program:
        name = "kube-scheduler"
        serve, health = self._loopback(name, 10259)
        argv = [
            str(self.components.program(name)),
            *self._kubeconfigs(name, f"system:{name}"),
            *serve,
            "--profiling=false",
        ]
        return Program(name, argv, health, health=health, user=USERS[name], limits=LIMITS[name])

    def _loopback(self, name: str, port: int) -> tuple[list[str], Question]:
        """How a program serves its health, to this machine only."""
        own = self._leaf(f"{name}/loopback", "kubelet", Leaf(name, hosts=("127.0.0.1",)), name)
        health = Api(f"https://127.0.0.1:{port}", self.public("kubelet")).is_served("/healthz")
        return ["--bind-address=127.0.0.1", f"--tls-cert-file={own}", f"--tls-private-key-file={own}"], health

    def _kubeconfigs(self, name: str, user: str) -> list[str]:
        own = self._leaf(f"{name}/client", "client", Leaf(user), name)
        content = describe_kubeconfig(self.url, self.authorities["server"].certificate, name_file(own))
        path = self._give(name, "kubeconfig", content)
        return [f"--{purpose}kubeconfig={path}" for purpose in ("", "authentication-", "authorization-")]

    def _describe_encryption(self) -> dict[str, Any]:
        path = self.layout.encryption_key
        if not path.exists():
            write_file(path, base64.b64encode(secrets.token_bytes(32)))
        key = {"name": "first", "secret": path.read_text()}
        providers = [{"secretbox": {"keys": [key]}}, {"identity": {}}]
        return {
            "apiVersion": "apiserver.config.k8s.io/v1",
            "kind": "EncryptionConfiguration",
            "resources": [{"resources": ["secrets"], "providers": providers}],
        }

    def _signing_key(self) -> bytes:
        return make_signing_key(self.layout.signing_key).read_bytes()

    def _leaf(self, name: str, authority: str, leaf: Leaf, program: str = "") -> Path:
        return self.leaves.write(name, self.authorities[authority], leaf, USERS.get(program, 0))

    def _give(self, program: str, name: str, content: bytes) -> Path:
        """Writes a file that only this program can read."""
        return write_file(self.layout.tls / program / name, content, USERS[program])

    def public(self, authority: str) -> Path:
        return self.layout.tls / f"{authority}-ca.crt"

    def _own_folder(self, path: Path, program: str) -> Path:
        path.mkdir(mode=0o700, exist_ok=True)
        os.chown(path, USERS[program], USERS[program])
        return path


def _tls(purpose: str, own: Path, authority: Path) -> list[str]:
    return [
        f"--{purpose}cert-file={own}",
        f"--{purpose}key-file={own}",
        f"--{purpose}trusted-ca-file={authority}",
        f"--{purpose}client-cert-auth",
    ]
