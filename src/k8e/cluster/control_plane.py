"""The control plane of a cluster: etcd, the API server, the controllers and the scheduler, as programs with their
certificates. All of them on one node.

etcd and the health ports are on the node's loopback only. Each program proves who it is with a certificate of its own,
and anonymous requests are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from k8e.cluster.api import Api
from k8e.cluster.build import Components
from k8e.cluster.place import Addresses, Place
from k8e.cluster.secrets import Secrets
from k8e.cluster.supervisor import Program
from k8e.cluster.trust.authority import Leaf

ADMINS = "system:masters"


class ControlPlane:
    def __init__(self, place: Place, addresses: Addresses, components: Components, secrets: Secrets) -> None:
        self._place = place
        self._addresses = addresses
        self._components = components
        self._secrets = secrets
        self.api = Api(
            addresses.api, secrets.certificate, secrets.issue("supervisor", Leaf("k8e:supervisor", (ADMINS,)))
        )

    def programs(self) -> Iterator[Program]:
        """In the order in which they can start."""
        yield self._etcd()
        yield self._api_server()
        yield self._controller_manager()
        yield self._scheduler()

    def _etcd(self) -> Program:
        own = self._secrets.issue("etcd", Leaf("etcd", hosts=("localhost", "127.0.0.1")))
        authority = self._secrets.certificate
        health = Api("https://127.0.0.1:2379", authority, own)
        clients, peers = "https://127.0.0.1:2379", "https://127.0.0.1:2380"
        return Program(
            "etcd",
            [
                str(self._components.program("etcd")),
                f"--data-dir={self._place.root / 'etcd'}",
                "--name=first",
                f"--initial-cluster=first={peers}",
                f"--initial-advertise-peer-urls={peers}",
                f"--listen-peer-urls={peers}",
                f"--listen-client-urls={clients}",
                f"--advertise-client-urls={clients}",
                f"--cert-file={own}",
                f"--key-file={own}",
                f"--trusted-ca-file={authority}",
                "--client-cert-auth",
                f"--peer-cert-file={own}",
                f"--peer-key-file={own}",
                f"--peer-trusted-ca-file={authority}",
                "--peer-client-cert-auth",
                # The folder is removed with the cluster: no write has to survive the machine.
                "--unsafe-no-fsync",
                "--log-level=warn",
            ],
            health.is_served("/health"),
        )

    def _api_server(self) -> Program:
        node, services = str(self._addresses.node), self._addresses.services
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        own = self._secrets.issue("apiserver", Leaf("kube-apiserver", hosts=(*names, node, str(services[1]))))
        public, private = self._secrets.make_key("service-account")
        authority = self._secrets.certificate
        return Program(
            "kube-apiserver",
            [
                str(self._components.program("kube-apiserver")),
                f"--advertise-address={node}",
                f"--bind-address={node}",
                "--secure-port=6443",
                f"--tls-cert-file={own}",
                f"--tls-private-key-file={own}",
                f"--client-ca-file={authority}",
                "--etcd-servers=https://127.0.0.1:2379",
                f"--etcd-cafile={authority}",
                f"--etcd-certfile={own}",
                f"--etcd-keyfile={own}",
                f"--kubelet-certificate-authority={authority}",
                f"--kubelet-client-certificate={own}",
                f"--kubelet-client-key={own}",
                # A node's name is in no DNS.
                "--kubelet-preferred-address-types=InternalIP",
                *self._aggregation(),
                f"--service-cluster-ip-range={services}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={public}",
                f"--service-account-signing-key-file={private}",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--anonymous-auth=false",
                "--allow-privileged=true",
                "--profiling=false",
            ],
            self.api.is_served("/readyz"),
        )

    def _aggregation(self) -> list[str]:
        """How the API server proves to further API servers for whom it asks: by an authority of its own."""
        secrets = Secrets(self._place.secrets / "front-proxy")
        own = secrets.issue("client", Leaf("front-proxy-client"))
        return [
            f"--requestheader-client-ca-file={secrets.certificate}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={own}",
            f"--proxy-client-key-file={own}",
        ]

    def _controller_manager(self) -> Program:
        public_authority = self._secrets.certificate
        return Program(
            "kube-controller-manager",
            [
                str(self._components.program("kube-controller-manager")),
                *self._kubeconfigs("controller-manager", "system:kube-controller-manager"),
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
                f"--root-ca-file={public_authority}",
                f"--cluster-signing-cert-file={public_authority}",
                f"--cluster-signing-key-file={self._secrets.key}",
                f"--service-account-private-key-file={self._secrets.folder / 'service-account.key'}",
                "--use-service-account-credentials=true",
                "--allocate-node-cidrs=true",
                f"--cluster-cidr={self._addresses.pods}",
                f"--service-cluster-ip-range={self._addresses.services}",
                "--profiling=false",
            ],
        )

    def _scheduler(self) -> Program:
        return Program(
            "kube-scheduler",
            [
                str(self._components.program("kube-scheduler")),
                *self._kubeconfigs("scheduler", "system:kube-scheduler"),
                "--bind-address=127.0.0.1",
                "--leader-elect=false",
                "--profiling=false",
            ],
        )

    def _kubeconfigs(self, name: str, user: str) -> list[str]:
        path = self._place.secrets / f"{name}.kubeconfig"
        self._secrets.write_kubeconfig(path, self._addresses.api, Leaf(user))
        return [f"--{purpose}kubeconfig={path}" for purpose in ("", "authentication-", "authorization-")]
