"""The Kubernetes engine: sandboxes on an existing cluster, each a pod of its own. Only this package imports the
libraries of the extra `k8e[kubernetes]`; docs/kubernetes.md says which objects it makes and who writes what."""

from k8e.engine.kubernetes.api import Api
from k8e.engine.kubernetes.engine import KubernetesEngine
from k8e.engine.kubernetes.gateway_key import share_key
from k8e.engine.kubernetes.options import ClusterOptions
from k8e.engine.kubernetes.shared_secret import SharedSecret
from k8e.engine.kubernetes.tenants import TenantEngine

__all__ = ["Api", "ClusterOptions", "KubernetesEngine", "SharedSecret", "TenantEngine", "share_key"]
