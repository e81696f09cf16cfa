"""The chart: its values are checked, its roles are what the engine needs, and the objects are what a cluster admits."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import yaml

from k8e.engine.kubernetes.doctor.rights import NEEDED, NEEDED_BY_SEVERAL, NEEDED_WITH_CILIUM, Right
from k8e.settings.file import read_table
from tests.kubernetes.install.helm import CHART, ROOT, Helm
from tests.kubernetes.kubectl import Kubectl

EVERYTHING: dict[str, Any] = {
    "images": {"gatewayDigest": f"sha256:{'0' * 64}", "pullSecrets": [{"name": "pull"}]},
    "sandboxes": {"quota": {"pods": 200}, "storageClass": "fast", "requests": 0.5, "egress": "node", "images": ["*"]},
    "nodeHelper": {"nameservers": ["192.0.2.53"]},
    "gateway": {
        "replicas": 3,
        "names": ["k8e.example.com", "192.0.2.1"],
        "settings": "[pool]\nenabled = false\n\n[quotas]\nsessions = 7\n",
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "podLabels": {"team": "tools"},
        "podAnnotations": {"note": "none"},
        "priorityClassName": "system-cluster-critical",
    },
    "service": {"type": "LoadBalancer", "annotations": {"note": "none"}},
    "networkPolicy": {"clients": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]},
    "mcp": {"enabled": True},
    "metrics": {
        "enabled": True,
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
}


def pick(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def list_rights(objects: list[dict[str, Any]]) -> set[Right]:
    """Those about anything but a single named object."""
    return {
        Right(verb, resource, group, role["kind"] == "ClusterRole")
        for role in objects
        if role["kind"] in ("Role", "ClusterRole")
        for rule in role["rules"]
        if "resourceNames" not in rule
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_it_is_in_order(helm: Helm) -> None:
    for changes in ({}, EVERYTHING):
        helm("lint", "--strict", str(CHART), helm.values(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"images": {"registry": ""}},
        {"images": {"gatewayDigest": "sha256:0"}},
        {"sandboxes": {"image": ""}},
        {"sandboxes": {"egress": ""}},
        {"sandboxes": {"egress": "closed"}},
        {"sandboxes": {"requests": 2}},
        {"sandboxes": {"lifetime": "1d"}},
        {"gateway": {"replicas": 10}},
        {"nodeHelper": {"port": 53}},
        {"runtimeClasses": {"gvisor": "No Name"}},
        {"unknown": True},
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(helm: Helm, changes: dict[str, Any]) -> None:
    said = helm.refused("template", "boxes", str(CHART), helm.values(changes))
    assert "values don't meet the specifications of the schema" in said


def test_without_the_values_that_have_no_default_it_is_refused(helm: Helm) -> None:
    said = helm.refused("template", "boxes", str(CHART))
    assert all(name in said for name in ("registry", "image", "egress"))


def test_its_roles_are_the_rights_that_the_engine_needs(helm: Helm) -> None:
    gateway, records, node_helper, cilium = (
        list(yaml.safe_load_all((ROOT / f"deploy/kubernetes/{name}.yaml").read_text()))
        for name in ("gateway", "records", "node-helper", "cilium")
    )
    assert list_rights(helm.render()) == list_rights(gateway) == set(NEEDED)
    several = helm.render({"gateway": {"replicas": 2}})
    assert list_rights(several) == list_rights([*gateway, *records]) == {*NEEDED, *NEEDED_BY_SEVERAL}
    with_cilium = helm.render({"sandboxes": {"egress": "cilium"}})
    assert list_rights(with_cilium) == list_rights([*gateway, *cilium]) == {*NEEDED, *NEEDED_WITH_CILIUM}
    helped = helm.render({"sandboxes": {"egress": "node"}})
    assert list_rights(helped) - list_rights(helm.render()) == {Right("patch", "pods/status")}
    (role,) = [role for role in pick(helped, "Role") if role["metadata"]["name"] == "boxes-node-helper"]
    assert list_rights([role]) == list_rights(node_helper)
    (key,) = [role for role in pick(helm.render(), "Role") if role["metadata"]["namespace"] == "house"]
    rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["boxes-key"], "verbs": ["get", "patch"]}
    assert key["rules"] == [rule]
    assert not [one for one in helm.render({"rbac": {"create": False}}) if "Role" in one["kind"]]


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["least", "everything"])
def test_its_settings_are_those_of_the_daemon(helm: Helm, changes: dict[str, Any]) -> None:
    objects = helm.render(changes)
    (config,) = pick(objects, "ConfigMap")
    settings = read_table(ROOT, tomllib.loads(config["data"]["k8e.toml"]))
    assert settings.kubernetes.namespace == "k8e-sandboxes"
    assert settings.kubernetes.agent_image == "k8e.local/k8e-agent:0.1.0"
    assert settings.kubernetes.key_secret == "house/boxes-key"
    assert settings.kubernetes.gvisor == "gvisor"
    assert "boxes.house.svc" in settings.gateway.names
    if changes:
        assert (settings.quotas.sessions, settings.pool.enabled) == (7, False)
        assert settings.gateway.metrics == "0.0.0.0:9464"
        assert len(pick(objects, "ServiceMonitor")) == 1
        assert (settings.kubernetes.peers, settings.kubernetes.egress) == ("0.0.0.0:50052", "node")
        assert settings.kubernetes.images == ("*",)
        assert (settings.gateway.mcp, settings.kubernetes.mcp_peers) == ("0.0.0.0:8811", "0.0.0.0:50053")


def test_a_cluster_admits_all_of_it(helm: Helm, kubectl: Kubectl) -> None:
    """Of the pods, as strictly as it admits sandboxes; but the helper of a node, which is privileged."""
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    for changes in ({}, EVERYTHING):
        for one in helm.render(changes):
            if one["kind"] in ("Namespace", "ServiceMonitor"):  # there is no operator
                continue
            if "namespace" in one["metadata"]:
                one["metadata"]["namespace"] = kubectl.namespace
            objects = [one]
            if one["kind"] == "Deployment":  # of which itself only warnings come
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gateway"}}
                objects.append({**pod, "spec": one["spec"]["template"]["spec"]})
            for each in objects:
                if each["kind"] == "Pod":  # what it refers to is not there
                    each["spec"] = {**each["spec"], "serviceAccountName": "default", "priorityClassName": ""}
                kubectl("create", "--dry-run=server", "--filename=-", given=yaml.safe_dump(each))
