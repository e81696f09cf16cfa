"""`k8e doctor --engine kubernetes` under Cilium: its policies are tried with real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kubernetes.cilium.rig import list_policies
from tests.kubernetes.engine.rig import Site
from tests.kubernetes.engine.test_doctor import examine, verdicts


def test_a_cluster_with_cilium_and_nothing_is_left(site: Site, tmp_path: Path) -> None:
    status, report = examine(site, tmp_path, egress="cilium")
    found = verdicts(report["cluster"])
    assert (found["Cilium"], found["rights"]) == ("ok", "ok")
    assert "clearing up" not in found  # this account may delete these policies
    for each in report["runtimes"]:
        if each["runtime"] in ("native", "gvisor"):
            assert verdicts(each["checks"])["network policy"] == "ok", each
    assert (status, report["safe"]) == (0, True)
    assert list_policies(site) == set()


def test_rights_that_are_missing_are_named(site: Site, tmp_path: Path) -> None:
    kubectl = site.kubectl
    rules = kubectl.get("role/k8e-gateway-cilium")["rules"]

    def allow(rules: list[dict[str, Any]]) -> None:
        kubectl("patch", "role", "k8e-gateway-cilium", "--type=merge", f"--patch={json.dumps({'rules': rules})}")

    allow([rule for rule in rules if rule["resources"] != ["ciliumendpoints"]])
    try:
        status, report = examine(site, tmp_path, egress="cilium")
    finally:
        allow(rules)
    (rights,) = [check for check in report["cluster"] if check["name"] == "rights"]
    assert "list ciliumendpoints.cilium.io, watch ciliumendpoints.cilium.io" in rights["found"]
    assert (status, rights["verdict"]) == (1, "failed")
