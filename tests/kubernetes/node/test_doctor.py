"""`k8e doctor --engine kubernetes` under `egress = "node"`: with the helper of the node, and without it."""

from __future__ import annotations

from pathlib import Path

from tests.kubernetes.engine.conftest import site
from tests.kubernetes.engine.rig import Site
from tests.kubernetes.engine.test_doctor import examine, verdicts
from tests.kubernetes.node.rig import Helper

__all__ = ["site"]


def test_a_list_of_hosts_is_tried(site: Site, tmp_path: Path) -> None:
    (tmp_path / "helper").mkdir()
    helper = Helper(site, tmp_path / "helper")
    helper.start()
    try:
        status, report = examine(site, tmp_path, egress="node")
    finally:
        helper.end()
    for name in ("native", "gvisor"):
        (checks,) = [each["checks"] for each in report["runtimes"] if each["runtime"] == name]
        assert verdicts(checks) == {
            "pod": "ok",
            "way to pods": "ok",
            "command": "ok",
            "no account": "ok",
            "list of hosts": "ok",
        }, helper.log.read_text()[-2000:]
        (tried,) = [check for check in checks if check["name"] == "list of hosts"]
        assert tried["found"].endswith("other_sandbox")
    assert (status, report["safe"]) == (0, True)


def test_a_node_without_a_helper_is_named(site: Site, tmp_path: Path) -> None:
    status, report = examine(site, tmp_path, egress="node")
    for name in ("native", "gvisor"):
        (checks,) = [each["checks"] for each in report["runtimes"] if each["runtime"] == name]
        (pod,) = checks
        assert (pod["name"], pod["verdict"], "DaemonSet" in pod["hint"]) == ("pod", "failed", True)
        assert site.cluster.place.node in pod["found"]
    assert (status, report["safe"]) == (1, False)
