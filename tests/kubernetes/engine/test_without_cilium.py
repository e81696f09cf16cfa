"""`egress = "cilium"` on a cluster whose network is another one: no sandbox is handed out, with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from k8e.engine import EngineError, Runtime
from k8e.engine.kubernetes.cilium import egress
from k8e.engine.kubernetes.options import CILIUM
from tests.kubernetes.cilium.rig import allow_policies
from tests.kubernetes.engine.rig import Site, new_name, open_engine, spec_of
from tests.kubernetes.kubectl import Kubectl

KINDS = {"ciliumnetworkpolicies": "CiliumNetworkPolicy", "ciliumendpoints": "CiliumEndpoint"}


def describe(plural: str, kind: str) -> dict[str, Any]:
    """As one that an earlier Cilium has left: served, and applied by no agent."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v2", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.cilium.io"},
        "spec": {
            "group": "cilium.io",
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [version],
        },
    }


@contextlib.contextmanager
def served_by_none(kubectl: Kubectl) -> Iterator[None]:
    definitions = [describe(plural, kind) for plural, kind in KINDS.items()]
    kubectl.apply(*definitions)
    try:
        for one in definitions:
            kubectl("wait", "--for=condition=Established", f"crd/{one['metadata']['name']}", "--timeout=60s")
        yield
    finally:
        for one in definitions:
            kubectl("delete", "crd", one["metadata"]["name"])


async def refuse(site: Site) -> EngineError:
    async with open_engine(site, egress=CILIUM) as engine:
        with pytest.raises(EngineError) as caught:
            await engine.create(new_name(), spec_of(Runtime.NATIVE))
        assert await engine.list() == []
        await engine.keep_ready({})
    return caught.value


async def test_without_its_crds(site: Site) -> None:
    error = await refuse(site)
    assert (error.control, "does not serve CiliumNetworkPolicy" in error.cause) == ("egress", True)
    assert 'egress = "node"' in error.hint


async def test_with_crds_and_no_agent(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "_PATIENCE", 5.0)
    allow_policies(site.kubectl)
    with served_by_none(site.kubectl):
        error = await refuse(site)
        assert (error.control, "its agent has no endpoint for the pod" in error.cause) == ("egress", True)
        assert "Cilium's agent" in error.hint
        left = site.kubectl("get", "ciliumnetworkpolicies", "--output=name").split()
    assert len(left) == 1  # for all sandboxes: as a NetworkPolicy, it stays
