"""Sandboxes of tenants in namespaces of their own, on a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace

from k8e.engine import EngineError, Runtime, SandboxSpec
from k8e.engine.kubernetes import TenantEngine
from k8e.engine.kubernetes.options import NODE
from k8e.engine.kubernetes.tenants import HOME, TENANT, find_namespaces
from tests.kubernetes.engine.rig import LIMITS, ROOT, Site, new_name, rename
from tests.kubernetes.kubectl import Kubectl

TENANTS = ("red", "blue")


def spec_for(tenant: str) -> SandboxSpec:
    return SandboxSpec(Runtime.NATIVE, limits=LIMITS, tenant=tenant)


@pytest.fixture(scope="module")
def places(site: Site) -> Iterator[dict[str, str]]:
    """The namespaces of tenants, made from the manifest."""
    home = site.kubectl.namespace
    documents = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/tenant.yaml").read_text()))
    found = {tenant: f"{home}-{tenant}" for tenant in TENANTS}
    try:
        for tenant, namespace in found.items():
            names = {"k8e": home, "k8e-tenant-ci": namespace, "ci": tenant, "k8e-gateway-tenants": f"{home}-tenants"}
            Kubectl(site.cluster, namespace).apply(*(rename(one, names) for one in documents))
        yield found
    finally:
        for kind in ("clusterrolebinding", "clusterrole"):
            site.kubectl("delete", kind, f"{home}-tenants", "--ignore-not-found")
        for namespace in found.values():
            site.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--wait=false")


def list_pods(site: Site, namespace: str) -> list[str]:
    answer: dict[str, Any] = json.loads(Kubectl(site.cluster, namespace)("get", "pods", "--output=json"))
    return [one["metadata"]["name"] for one in answer["items"] if "deletionTimestamp" not in one["metadata"]]


def open_tenants(site: Site) -> TenantEngine:
    return TenantEngine(site.options, site.state / "gateway.pem", site.kubeconfig)


async def test_each_tenant_has_its_namespace_and_the_next_gateway_finds_all(site: Site, places: dict[str, str]) -> None:
    engine = open_tenants(site)
    sandboxes = {tenant: new_name() for tenant in ("", *TENANTS)}
    try:
        for tenant, sandbox in sandboxes.items():
            await engine.create(sandbox, spec_for(tenant))
        for tenant, sandbox in sandboxes.items():
            assert len(list_pods(site, places.get(tenant, site.kubectl.namespace))) == 1
            assert (await engine.observe(sandbox)).alive
        assert await engine.list() == sorted(sandboxes.values())
        with pytest.raises(EngineError, match="exists already"):
            await engine.create(sandboxes["red"], spec_for("blue"))
    finally:
        await engine.close()
    engine = open_tenants(site)
    try:
        assert await engine.list() == sorted(sandboxes.values())
        for sandbox in sandboxes.values():
            await engine.attach(sandbox)
        for sandbox in sandboxes.values():
            await engine.destroy(sandbox)
            assert not (await engine.observe(sandbox)).alive
        assert await engine.list() == []
    finally:
        await engine.close()


async def test_a_tenant_without_a_namespace_is_refused(site: Site, places: dict[str, str]) -> None:
    engine = open_tenants(site)
    try:
        with pytest.raises(EngineError, match="no namespace") as caught:
            await engine.create(new_name(), spec_for("green"))
        assert "k8e.dev/tenant=green" in caught.value.hint
        assert await engine.list() == []
    finally:
        await engine.close()


def test_the_helpers_of_nodes_are_refused(site: Site) -> None:
    from dataclasses import replace

    with pytest.raises(EngineError, match="helpers"):
        TenantEngine(replace(site.options, egress=NODE), site.state / "gateway.pem", site.kubeconfig)


def test_labels_say_whose_a_namespace_is() -> None:
    def label(name: str, **labels: str) -> Namespace:
        return Namespace(metadata=ObjectMeta(name=name, labels=labels or None))

    found = find_namespaces(
        [
            label("a", **{TENANT: "red", HOME: "k8e"}),
            label("b", **{TENANT: "red", HOME: "other"}),
            label("c", **{TENANT: "blue", HOME: "k8e"}),
            label("d", **{TENANT: "blue", HOME: "k8e"}),
            label("e", **{HOME: "k8e"}),
            label("f"),
        ],
        "k8e",
    )
    assert found == {"red": ["a"], "blue": ["c", "d"]}


def test_the_manifest_gives_the_rights_of_the_gateways_own_namespace() -> None:
    def rules(file: str) -> Any:
        documents = yaml.safe_load_all(Path(ROOT, "deploy/kubernetes", file).read_text())
        return next(
            one["rules"] for one in documents if one["kind"] == "Role" and one["metadata"]["name"] == "k8e-gateway"
        )

    assert rules("tenant.yaml") == rules("gateway.yaml")
