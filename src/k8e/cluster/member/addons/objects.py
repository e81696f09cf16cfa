"""The objects of the add-ons. Pure.

CoreDNS answers for names of the cluster and for no other: pods have no way out of the cluster, and a resolver that
forwards would be one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from k8e.cluster.member.addons.pods import NAMESPACE, Addon, allow
from k8e.cluster.member.layout import Networks

METRICS_HOST: Final = f"metrics-server.{NAMESPACE}.svc"
METRICS_SECRET: Final = "metrics-server-certificate"
_READ: Final = ("get", "list", "watch")
_COREFILE: Final = """\
.:1053 {
    errors
    health :8080
    ready :8181
    kubernetes cluster.local in-addr.arpa {
        pods insecure
        ttl 30
    }
    cache 30
    loadbalance
}
"""
_HELPER: Final = "local-path-helper"
_STORAGE: Final = "local-path-provisioner"


def describe_addons(
    images: Mapping[str, str], networks: Networks, server_authority: str, kubelet_authority: str, storage: str
) -> list[dict[str, Any]]:
    """`images` are the names of those that there are; `storage` is the folder of volumes on every node."""
    found: list[dict[str, Any]] = []
    if image := images.get("coredns"):
        found += _describe_names(image, networks)
    if image := images.get("metrics-server"):
        found += _describe_metrics(image, server_authority, kubelet_authority)
    if image := images.get(_STORAGE):
        found += _describe_volumes(image, storage)
    return found


def _describe_names(image: str, networks: Networks) -> list[dict[str, Any]]:
    ports = {"dns": ("UDP", 1053), "dns-tcp": ("TCP", 1053), "ready": ("TCP", 8181)}
    addon = Addon(
        name="coredns",
        image=image,
        arguments=("-conf", "/etc/coredns/Corefile"),
        rules=[
            allow("", ("endpoints", "services", "pods", "namespaces"), ("list", "watch")),
            allow("discovery.k8s.io", ("endpointslices",), ("list", "watch")),
        ],
        memory="170Mi",
        ready={"httpGet": {"path": "/ready", "port": "ready"}},
        ports=ports,
        replicas=2,
        folders={"/etc/coredns": {"configMap": {"name": "coredns"}}},
    )
    published = [
        {"name": name, "protocol": ports[name][0], "port": 53, "targetPort": name} for name in ("dns", "dns-tcp")
    ]
    spec = {"clusterIP": str(networks.dns), "selector": {"k8e.dev/addon": "coredns"}, "ports": published}
    return [
        _configure("coredns", {"Corefile": _COREFILE}),
        *addon.describe(),
        {"apiVersion": "v1", "kind": "Service", "metadata": _name("kube-dns"), "spec": spec},
    ]


def _describe_metrics(image: str, server_authority: str, kubelet_authority: str) -> list[dict[str, Any]]:
    name = "metrics-server"
    addon = Addon(
        name=name,
        image=image,
        arguments=(
            "--secure-port=10250",
            "--tls-cert-file=/etc/certificate/tls.crt",
            "--tls-private-key-file=/etc/certificate/tls.key",
            "--kubelet-certificate-authority=/etc/kubelet/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            "--metric-resolution=15s",
        ),
        rules=[
            allow("", ("nodes/metrics",), ("get",)),
            allow("", ("pods", "nodes"), _READ),
            allow("authentication.k8s.io", ("tokenreviews",), ("create",)),
            allow("authorization.k8s.io", ("subjectaccessreviews",), ("create",)),
        ],
        memory="200Mi",
        ready={"httpGet": {"path": "/readyz", "port": "https", "scheme": "HTTPS"}},
        ports={"https": ("TCP", 10250)},
        folders={
            "/etc/certificate": {"secret": {"secretName": METRICS_SECRET}},
            "/etc/kubelet": {"configMap": {"name": name}},
        },
    )
    account = {"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}
    reader = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _name("k8e:addon:metrics-server"),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": "extension-apiserver-authentication-reader",
        },
        "subjects": [account],
    }
    service = {"selector": {"k8e.dev/addon": name}, "ports": [{"port": 443, "targetPort": "https"}]}
    registration = {
        "group": "metrics.k8s.io",
        "version": "v1beta1",
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "service": {"name": name, "namespace": NAMESPACE, "port": 443},
        "caBundle": base64.b64encode(server_authority.encode()).decode(),
    }
    return [
        _configure(name, {"ca.crt": kubelet_authority}),
        *addon.describe(),
        reader,
        {"apiVersion": "v1", "kind": "Service", "metadata": _name(name), "spec": service},
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.metrics.k8s.io"},
            "spec": registration,
        },
    ]


def _describe_volumes(image: str, storage: str) -> list[dict[str, Any]]:
    paths = [{"node": "DEFAULT_PATH_FOR_NON_LISTED_NODES", "paths": [storage]}]
    config = {"nodePathMap": paths, "setupCommand": f"/{_HELPER}", "teardownCommand": f"/{_HELPER}"}
    container = {
        "name": "helper",
        "image": image,
        "imagePullPolicy": "Never",
        "resources": {"limits": {"memory": "32Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    helper = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "local-path-helper"},
        "spec": {"automountServiceAccountToken": False, "containers": [container]},
    }
    addon = Addon(
        name=_STORAGE,
        image=image,
        arguments=(
            *("start", "--config=/etc/config/config.json", "--helper-pod-file=/etc/config/helperPod.yaml"),
            *(f"--namespace={NAMESPACE}", f"--service-account-name={_STORAGE}", f"--configmap-name={_STORAGE}"),
        ),
        rules=[
            allow("", ("nodes", "persistentvolumeclaims", "pods"), _READ),
            allow("", ("persistentvolumes",), (*_READ, "create", "patch", "update", "delete")),
            allow("", ("events",), ("create", "patch")),
            allow("storage.k8s.io", ("storageclasses",), _READ),
        ],
        inside=[
            allow("", ("pods",), ("create", "delete")),
            allow("", ("pods/log", "configmaps"), _READ),
            allow("", ("endpoints",), (*_READ, "create", "patch", "update")),
            allow("coordination.k8s.io", ("leases",), (*_READ, "create", "update")),
        ],
        memory="128Mi",
        folders={"/etc/config": {"configMap": {"name": _STORAGE}}},
        environment=[{"name": "CONFIG_MOUNT_PATH", "value": "/etc/config/"}],
    )
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": "local-path",
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "rancher.io/local-path",
        "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Delete",
    }
    files = {"config.json": json.dumps(config), "helperPod.yaml": json.dumps(helper)}
    return [_configure(_STORAGE, files), *addon.describe(), storage_class]


def _configure(name: str, files: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _name(name), "data": files}


def _name(name: str) -> dict[str, str]:
    return {"name": name, "namespace": NAMESPACE}
