"""The components of a cluster: which Go modules they come from, and how each is compiled. Pure data.

`pins/NAME/go.mod` names the version, and `pins/NAME/go.sum` the content of every module that goes into it, so that a
proxy cannot change what is built. Each component has a module of its own, because together they would have to agree on
the versions of what they share.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PINS: Final = Path(__file__).parent / "pins"


@dataclass(frozen=True, slots=True)
class Patch:
    """One change of one file of the component's module. `old` has to be there exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    module: str
    packages: dict[str, str]  # the program's name, and its package below the module; "./NAME" is below pins/
    tags: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)  # variables that the linker sets; {version} is the module's
    patch: Patch | None = None
    files: tuple[str, ...] = ()  # files of the module that are kept beside the programs
    # The same of folders. Not in the text of a component that has none: what is built already keeps its fingerprint.
    folders: tuple[str, ...] = field(default=(), repr=False)

    @property
    def folder(self) -> Path:
        return PINS / self.name

    @property
    def version(self) -> str:
        match = re.search(
            rf"^require {re.escape(self.module)} (\S+)$", self.folder.joinpath("go.mod").read_text(), re.M
        )
        if match is None:
            raise ValueError(f"{self.folder / 'go.mod'} does not name a version of {self.module}")
        return match[1]

    @property
    def fingerprint(self) -> str:
        """Tells whether what was built earlier is what would be built now, the compiler left aside."""
        total = hashlib.sha256(repr(self).encode())
        if self.folders:
            total.update(repr(self.folders).encode())
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            total.update(f"{path.relative_to(self.folder)}\0".encode() + path.read_bytes())
        return total.hexdigest()[:16]


# Quickest first: the first results come soon, and a machine that cannot build says so early.
COMPONENTS: Final = (
    Component(
        name="cni",
        module="github.com/containernetworking/plugins",
        packages={
            "bridge": "plugins/main/bridge",
            "loopback": "plugins/main/loopback",
            "host-local": "plugins/ipam/host-local",
        },
    ),
    Component(name="etcd", module="go.etcd.io/etcd/server/v3", packages={"etcd": ""}),
    Component(name="etcdutl", module="go.etcd.io/etcd/etcdutl/v3", packages={"etcdutl": ""}),
    Component(
        name="containerd",
        module="github.com/containerd/containerd/v2",
        packages={
            "containerd": "cmd/containerd",
            "containerd-shim-runc-v2": "cmd/containerd-shim-runc-v2",
            "ctr": "cmd/ctr",
        },
        tags=("no_btrfs", "no_devmapper", "no_zfs"),
        settings={"github.com/containerd/containerd/v2/version.Version": "{version}"},
    ),
    Component(
        name="agent-sandbox",
        module="sigs.k8s.io/agent-sandbox",
        packages={"agent-sandbox-controller": "cmd/agent-sandbox-controller"},
        files=(
            "k8s/rbac.generated.yaml",
            "k8s/extensions-rbac.generated.yaml",
            "k8s/crds/agents.x-k8s.io_sandboxes.yaml",
            "k8s/crds/extensions.agents.x-k8s.io_sandboxclaims.yaml",
            "k8s/crds/extensions.agents.x-k8s.io_sandboxtemplates.yaml",
            "k8s/crds/extensions.agents.x-k8s.io_sandboxwarmpools.yaml",
        ),
    ),
    Component(
        name="gvisor",
        module="gvisor.dev/gvisor",
        packages={"runsc": "runsc"},
        # Without this it calls itself VERSION_MISSING, and an engine could not tell that it is a current one.
        settings={"gvisor.dev/gvisor/runsc/version.version": "{version}"},
    ),
    Component(
        name="gvisor-shim",
        module="gvisor.dev/gvisor",
        packages={"containerd-shim-runsc-v1": "shim"},
        # A lower OOM score than one's own needs CAP_SYS_RESOURCE, which root does not have on every machine; the shim
        # gives up there. The kernel may then end a shim when memory runs out: its sandbox ends, which is noticed.
        patch=Patch(
            file="pkg/shim/v1/manager.go",
            old="sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); err != nil {",
            new="sys.SetOOMScore(cmd.Process.Pid, oomScoreMax); err != nil && !os.IsPermission(err) {",
        ),
    ),
    Component(
        name="kubernetes",
        module="k8s.io/kubernetes",
        packages={
            "kube-apiserver": "cmd/kube-apiserver",
            "kube-controller-manager": "cmd/kube-controller-manager",
            "kube-scheduler": "cmd/kube-scheduler",
            "kube-proxy": "cmd/kube-proxy",
            "kubelet": "cmd/kubelet",
            "kubectl": "cmd/kubectl",
            "pause": "./pause",
        },
        # Without these it calls itself v0.0.0-master, which clients refuse to talk to.
        settings={
            "k8s.io/component-base/version.gitVersion": "{version}",
            "k8s.io/component-base/version.gitMajor": "{major}",
            "k8s.io/component-base/version.gitMinor": "{minor}",
        },
    ),
)

# The network of a cluster that is started with it, in place of the bridge. Its operator is not needed on a single node:
# the CRDs are applied from the module's own files, and Kubernetes itself gives the node its block of addresses.
CILIUM: Final = Component(
    name="cilium",
    module="github.com/cilium/cilium",
    packages={"cilium-agent": "daemon", "cilium-cni": "plugins/cilium-cni"},
    settings={"github.com/cilium/cilium/pkg/version.ciliumVersion": "{version}"},
    # The programs for the kernel, which the agent compiles with clang when it starts.
    folders=("bpf", "pkg/k8s/apis/cilium.io/client/crds"),
)

# A member runs those that it has (docs/cluster.md#add-ons); the cluster for tests needs none.
ADDONS: Final = (
    Component(
        name="local-path-provisioner",
        module="github.com/rancher/local-path-provisioner",
        packages={"local-path-provisioner": "", "local-path-helper": "./local-path-helper"},
    ),
    # With the plugins for a cluster's own names only.
    Component(name="coredns", module="github.com/coredns/coredns", packages={"coredns": "./coredns"}),
    Component(
        name="metrics-server",
        module="sigs.k8s.io/metrics-server",
        packages={"metrics-server": "cmd/metrics-server"},
    ),
)

# No part of a cluster: it installs deploy/helm there.
HELM: Final = Component(
    name="helm",
    module="helm.sh/helm/v4",
    packages={"helm": "cmd/helm"},
    settings={"helm.sh/helm/v4/internal/version.version": "{version}"},
)

# No part of a cluster either: it plays nodes and their kubelets, for measurements (bench/fleet.py).
KWOK: Final = Component(
    name="kwok",
    module="sigs.k8s.io/kwok",
    packages={"kwok": "cmd/kwok"},
)
