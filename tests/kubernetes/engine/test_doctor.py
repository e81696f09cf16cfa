"""`k8e doctor --engine kubernetes` on a cluster as it is, and on one that lacks something."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.engine.rig import Site
from tests.kubernetes.engine.test_daemon import Home, describe
from tests.kubernetes.node.rig import run_on_node


def examine(site: Site, folder: Path, **changes: str) -> tuple[int, dict[str, Any]]:
    home = Home(folder, describe(site, **changes))
    done: subprocess.CompletedProcess[bytes] = home.call("doctor", "--engine", "kubernetes", "--json")
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert site.kubectl("get", "pods", "--output=name") == ""
    return done.returncode, report


def verdicts(checks: list[dict[str, Any]]) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in checks}


def test_a_cluster_with_all_that_is_needed(site: Site, tmp_path: Path) -> None:
    status, report = examine(site, tmp_path)
    assert verdicts(report["cluster"]) == {
        "API": "ok",
        "rights": "ok",
        "no further rights": "ok",
        "pod security": "ok",
        "RuntimeClasses": "ok",
        "agent-sandbox": "ok",
        "clearing up": "skipped",  # the gateway's account may delete no policy
    }
    runtimes = {each["runtime"]: each for each in report["runtimes"]}
    for name in ("native", "gvisor"):
        assert verdicts(runtimes[name]["checks"]) == {
            "pod": "ok",
            "way to pods": "ok",
            "command": "ok",
            "no account": "ok",
            "network policy": "skipped",  # egress is open
        }
    assert not runtimes["kata"]["available"]
    assert "no RuntimeClass kata" in runtimes["kata"]["reason"]
    assert (status, report["safe"], report["default"]) == (0, True, "gvisor")


def test_a_network_that_enforces_nothing_is_noticed(site: Site, tmp_path: Path) -> None:
    status, report = examine(site, tmp_path, egress="policy")
    checks = {each["runtime"]: each["checks"] for each in report["runtimes"]}
    for name in ("native", "gvisor"):
        (policy,) = [check for check in checks[name] if check["name"] == "network policy"]
        assert (policy["verdict"], "does not enforce" in policy["found"]) == ("failed", True)
        assert "Cilium" in policy["hint"]
    assert (status, report["safe"]) == (1, False)


@contextlib.contextmanager
def enforcing(site: Site) -> Iterator[None]:
    """The node drops connections that pods begin, as a network does that lets no pod out before it knows that no policy
    isolates it."""
    table = f"test_{secrets.token_hex(4)}"
    rules = (
        f"add table ip {table}\n"
        f"add chain ip {table} c {{ type filter hook forward priority -10; }}\n"
        f"add rule ip {table} c ip saddr {site.cluster.addresses.node_pods} ct direction original drop\n"
    )
    run_on_node(site.cluster, "nft", "-f", "-", given=rules)
    try:
        yield
    finally:
        run_on_node(site.cluster, "nft", "delete", "table", "ip", table)


def test_a_network_that_enforces_the_policy_is_noticed_too(site: Site, tmp_path: Path) -> None:
    with site.kubectl.watch("pods") as pods, enforcing(site):
        status, report = examine(site, tmp_path, egress="policy")
        assert pods.stdout is not None
        sandboxes: dict[str, dict[str, str]] = {}  # labels, by uid
        gone: set[str] = set()
        while len(gone) < 4:  # two of each runtime
            event = json.loads(pods.stdout.readline())
            meta = event["object"]["metadata"]
            sandboxes.setdefault(meta["uid"], meta["labels"])
            if event["type"] == "DELETED":
                gone.add(meta["uid"])
    checks = {each["runtime"]: verdicts(each["checks"]) for each in report["runtimes"]}
    assert [checks[name]["network policy"] for name in ("native", "gvisor")] == ["ok", "ok"]
    assert (status, report["safe"]) == (0, True)
    # The rule above asks for no policy: the one that is there isolates every sandbox.
    policies = json.loads(site.kubectl("get", "networkpolicies", "--output=json"))["items"]
    closed = [each["spec"] for each in policies if "Egress" in each["spec"]["policyTypes"]]
    assert not any(each.get("egress") for each in closed)
    for labels in sandboxes.values():
        assert any(each["podSelector"]["matchLabels"].items() <= labels.items() for each in closed), (closed, labels)


def test_what_is_missing_is_named(site: Site, tmp_path: Path) -> None:
    kubectl, namespace = site.kubectl, site.kubectl.namespace
    role = kubectl.get("role/k8e-gateway")
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    less = [rule for rule in role["rules"] if rule["resources"] != ["pods"]]
    kubectl("patch", "role", "k8e-gateway", "--type=merge", f"--patch={json.dumps({'rules': less})}")
    try:
        home = Home(tmp_path, describe(site))
        done = home.call("doctor", "--engine", "kubernetes")
        text = " ".join(done.stdout.decode().split())
        assert done.returncode == 1
        assert f"in {namespace} the account may not: create pods, delete pods" in text
    finally:
        kubectl("patch", "role", "k8e-gateway", "--type=merge", f"--patch={json.dumps({'rules': role['rules']})}")
    try:
        status, report = examine(site, tmp_path)
        assert (status, verdicts(report["cluster"])["pod security"]) == (1, "failed")
    finally:
        kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")


@pytest.mark.parametrize("words", [("--fix",)])
def test_it_fixes_nothing_on_a_cluster(site: Site, tmp_path: Path, words: tuple[str, ...]) -> None:
    body = Home(tmp_path, describe(site)).refuse("doctor", "--engine", "kubernetes", *words)
    assert body["code"] == "invalid_argument"


def test_a_cluster_that_does_not_answer(site: Site, tmp_path: Path) -> None:
    config = tmp_path / "nowhere"
    text = site.kubeconfig.read_text()
    server = next(line.split("server:")[1].strip() for line in text.splitlines() if "server:" in line)
    config.write_text(text.replace(server, "https://127.0.0.1:9"))
    status, report = examine(site, tmp_path, kubeconfig=str(config))
    assert (status, report["default"], verdicts(report["cluster"])["API"]) == (1, None, "failed")
