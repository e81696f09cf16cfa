"""What a running cluster refuses, and what it writes down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.members.conftest import Member, until
from tests.members.machine import Segment
from tests.members.test_members import get, make_pod

SLEEP = "exec sleep infinity"
CERTIFICATE = "/var/lib/k8e/agent/kubelet/pki/kubelet-client-current.pem"


def ask(member: Member, address: str, *more: str) -> dict[str, Any]:
    command = ["curl", "--silent", "--insecure", "--max-time", "20", *more, address]
    found: dict[str, Any] = json.loads(member.machine.run(*command).stdout)
    return found


def use_secret(name: str, node: str) -> str:
    pod = json.loads(make_pod(name, node, "native", SLEEP))
    pod["spec"]["volumes"].append({"name": "secret", "secret": {"secretName": f"of-{name}"}})
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "secret", "mountPath": "/secret"})
    return json.dumps(pod)


@pytest.fixture(scope="module")
def thief(segment: Segment, server: Member, worker: Member) -> Member:
    """A machine outside of the cluster that has the worker's certificate, with its key."""
    machine = segment.make("thief")
    content = worker.machine.run("cat", CERTIFICATE).stdout
    machine.run("sh", "-c", "umask 077; cat > /run/stolen.pem", given=content)
    for name, node in (("here", "one"), ("there", "two")):
        server.kubectl("create", "secret", "generic", f"of-{name}", "--from-literal=a=b")
        server.kubectl("apply", "--filename=-", given=use_secret(name, node))
    server.kubectl("wait", "--for=condition=Ready", "pod/here", "pod/there", "--timeout=150s")
    return Member(machine, "worker")


class TestStolenCertificate:
    def ask(self, thief: Member, url: str, path: str, *more: str) -> dict[str, Any]:
        return ask(thief, f"{url}{path}", "--cert", "/run/stolen.pem", *more)

    def test_reads_the_secrets_of_its_own_node(self, thief: Member, url: str) -> None:
        """So far it is the worker: `kubectl delete node` and a new token end that."""
        assert self.ask(thief, url, "/api/v1/namespaces/default/secrets/of-there")["kind"] == "Secret"

    def test_reads_no_secret_of_another_node(self, thief: Member, url: str) -> None:
        for path in ("default/secrets/of-here", "kube-system/secrets", "default/secrets"):
            assert self.ask(thief, url, f"/api/v1/namespaces/{path}")["code"] == 403

    def test_gets_no_token_of_an_account_of_another_node_s_pod(self, thief: Member, url: str, server: Member) -> None:
        uid = get(server, "pod/here")["metadata"]["uid"]
        bound = {"kind": "Pod", "apiVersion": "v1", "name": "here", "uid": uid}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": bound}}
        more = ["--request", "POST", "--header", "Content-Type: application/json", "--data", json.dumps(body)]
        path = "/api/v1/namespaces/default/serviceaccounts/default/token"
        assert self.ask(thief, url, path, *more)["code"] == 403

    def test_changes_and_removes_no_other_node(self, thief: Member, url: str) -> None:
        assert self.ask(thief, url, "/api/v1/nodes/one", "--request", "DELETE")["code"] == 403
        patch = ["--request", "PATCH", "--header", "Content-Type: application/merge-patch+json", "--data", "{}"]
        assert self.ask(thief, url, "/api/v1/nodes/one/status", *patch)["code"] == 403

    def test_gives_its_node_no_role(self, thief: Member, url: str) -> None:
        role = {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": "true"}}}
        patch = ["--header", "Content-Type: application/merge-patch+json", "--data", json.dumps(role)]
        assert self.ask(thief, url, "/api/v1/nodes/two", "--request", "PATCH", *patch)["code"] == 403


class TestKubelet:
    def test_has_no_port_without_authentication(self, server: Member, worker: Member) -> None:
        done = server.machine.run("curl", "--silent", f"http://{worker.machine.address}:10255/pods", check=False)
        assert done.returncode == 7  # refused
        command = ["curl", "--silent", "--insecure", "--output", "/dev/null", "--write-out", "%{http_code}"]
        assert server.machine.run(*command, f"https://{worker.machine.address}:10250/pods").stdout == "401"

    def test_answers_no_other_node(self, server: Member, worker: Member) -> None:
        command = ["curl", "--silent", "--insecure", "--cert", CERTIFICATE, "--output", "/dev/null"]
        address = f"https://{server.machine.address}:10250/pods"
        assert worker.machine.run(*command, "--write-out", "%{http_code}", address).stdout == "403"


def test_a_pod_with_rights_on_its_node_is_refused(server: Member) -> None:
    for name, change in (
        ("privileged", {"securityContext": {"privileged": True}}),
        ("host-path", {"volumeMounts": [{"name": "machine", "mountPath": "/machine"}]}),
    ):
        pod = json.loads(make_pod(name, "one", "native", SLEEP))
        pod["spec"]["containers"][0] |= change
        pod["spec"]["volumes"].append({"name": "machine", "hostPath": {"path": "/"}})
        told = server.kubectl("apply", "--filename=-", given=json.dumps(pod), check=False)
        assert "violates PodSecurity" in told


def test_changes_are_in_the_audit_log_without_their_content(server: Member) -> None:
    server.kubectl("create", "secret", "generic", "audited", "--from-literal=a=content-of-an-audited-secret")
    log = "/var/lib/k8e/server/audit/audit.log"

    def find() -> list[dict[str, Any]]:
        lines = server.machine.run("grep", "audited", log, check=False).stdout.splitlines()
        return [json.loads(line) for line in lines]

    until(lambda: bool(find()))
    found = [each for each in find() if each["objectRef"]["resource"] == "secrets"]
    assert [(each["verb"], each["user"]["username"]) for each in found] == [("create", "k8e:admin")]
    assert server.machine.run("grep", "--count", "content-of-an", log, check=False).stdout.strip() == "0"
    assert server.machine.run("stat", "-c", "%a", log).stdout.strip() == "600"


def test_programs_have_limits(server: Member, worker: Member) -> None:
    for member, names in ((server, ("etcd", "kube-apiserver", "kubelet")), (worker, ("kubelet", "kube-proxy"))):
        pids = member.list_processes()
        for name in names:
            groups = member.machine.run("cat", f"/proc/{pids[name]}/cgroup").stdout
            assert f"/k8e-cluster/{name}" in groups
        assert "without limits" not in member.machine.run("cat", "/var/lib/k8e/logs/supervisor.log", check=False).stdout
