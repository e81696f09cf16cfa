"""A server from nothing, a worker that joins it, and machines that may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kubernetes.kubectl import BUSYBOX
from tests.members.conftest import Member, until
from tests.members.machine import Segment

SERVE = "echo hello > /tmp/index.html; exec httpd -f -p 8000 -h /tmp"


def get(member: Member, *what: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(member.kubectl("get", *what, "--output=json"))
    return found


def make_pod(name: str, node: str, runtime: str, script: str) -> str:
    container = {
        "name": "main",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", script],
        "volumeMounts": [{"name": "files", "mountPath": "/tmp"}],
    }
    spec = {
        "runtimeClassName": runtime,
        "nodeSelector": {"kubernetes.io/hostname": node},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "files", "emptyDir": {}}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})


def test_a_server_is_made_from_nothing(server: Member) -> None:
    assert "one" in {item["metadata"]["name"] for item in get(server, "nodes")["items"]}
    until(lambda: len(get(server, "runtimeclasses")["items"]) >= 2)
    names = {item["metadata"]["name"] for item in get(server, "runtimeclasses")["items"]}
    assert {"native", "gvisor"} <= names
    modes = server.machine.run("stat", "-c", "%a", "/var/lib/k8e/k8e.yaml", "/var/lib/k8e/server/node-token").stdout
    assert modes.split() == ["600", "600"]


def test_its_control_plane_has_users_without_rights(server: Member) -> None:
    pids = server.list_processes()
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"):
        status = server.machine.run("cat", f"/proc/{pids[name]}/status").stdout
        lines = {line.partition(":")[0]: line.split()[1:] for line in status.splitlines()}
        assert int(lines["Uid"][0]) > 1_900_000_000
        assert lines["CapEff"] == ["0" * 16]


def test_pods_of_two_nodes_reach_each_other(server: Member, worker: Member) -> None:
    for name, node, runtime in (("a", "one", "native"), ("b", "two", "native"), ("c", "two", "gvisor")):
        server.kubectl("apply", "--filename=-", given=make_pod(name, node, runtime, SERVE))
    server.kubectl("wait", "--for=condition=Ready", "pod/a", "pod/b", "pod/c", "--timeout=150s")
    addresses = {name: get(server, f"pod/{name}")["status"]["podIP"] for name in "abc"}
    for source, target in (("a", "b"), ("b", "a"), ("a", "c")):
        ask = f"until echo 'GET / HTTP/1.0\n' | nc -w 5 {addresses[target]} 8000; do sleep 0.1; done"
        assert server.kubectl("exec", source, "--", "sh", "-c", ask).endswith("\nhello\n")
    server.kubectl("delete", "pod", "a", "b", "c", "--wait=false")


def test_secrets_are_encrypted_on_the_disk(server: Member) -> None:
    server.kubectl("create", "secret", "generic", "hidden", "--from-literal=a=plain-text-of-a-secret")
    found = server.machine.run("grep", "-rlac", "plain-text-of-a-secret", "/var/lib/k8e/server/", check=False)
    assert (found.returncode, found.stdout) == (1, "")


class TestNode:
    CERTIFICATE = "/var/lib/k8e/agent/kubelet/pki/kubelet-client-current.pem"

    def ask(self, worker: Member, address: str, *more: str) -> str:
        command = ["curl", "--silent", "--insecure", "--max-time", "20", "--cert", self.CERTIFICATE]
        return worker.machine.run(*command, *more, address, check=False).stdout

    def test_reads_no_secret_of_others(self, server: Member, worker: Member, url: str) -> None:
        server.kubectl("create", "secret", "generic", "private", "--from-literal=a=b")
        answer = json.loads(self.ask(worker, f"{url}/api/v1/namespaces/default/secrets/private"))
        assert (answer["code"], "no relationship found" in answer["message"]) == (403, True)
        tokens = json.loads(self.ask(worker, f"{url}/api/v1/namespaces/kube-system/secrets"))
        assert tokens["code"] == 403

    def test_changes_no_other_node(self, worker: Member, url: str) -> None:
        body = ["--request", "PATCH", "--header", "Content-Type: application/merge-patch+json", "--data", "{}"]
        assert json.loads(self.ask(worker, f"{url}/api/v1/nodes/one", *body))["code"] == 403

    def test_opens_no_etcd(self, server: Member, worker: Member) -> None:
        assert self.ask(worker, f"https://{server.machine.address}:2380/version") == ""
        assert self.ask(worker, f"https://{server.machine.address}:2379/health") == ""

    def test_without_a_certificate_is_refused(self, worker: Member, url: str) -> None:
        command = ["curl", "--silent", "--insecure", "--max-time", "20", f"{url}/api/v1/nodes"]
        assert json.loads(worker.machine.run(*command).stdout)["code"] == 401


@pytest.fixture(scope="module")
def other(segment: Segment, worker: Member) -> Member:
    """A machine with nothing on it."""
    return Member(segment.make("three"), "worker")


class TestMachineThatMayNotJoin:
    def test_has_no_token(self, other: Member, url: str) -> None:
        other.start(K8E_URL=url)
        assert other.wait_refused()["code"] == "no_cluster"

    def test_has_a_wrong_secret(self, other: Member, url: str, token: str) -> None:
        wrong = token[:-16] + "0" * 16
        other.start(K8E_URL=url, K8E_TOKEN=wrong)
        error = other.wait_refused()
        assert error["code"] == "join_refused"
        assert wrong[-16:] not in json.dumps(error)

    def test_has_another_cluster_s_token(self, other: Member, url: str, token: str) -> None:
        other.start(K8E_URL=url, K8E_TOKEN=token.replace(token[4:68], "ab" * 32))
        assert other.wait_refused()["code"] == "wrong_cluster"

    def test_has_a_token_that_is_over(self, other: Member, server: Member, url: str, token: str) -> None:
        data = {
            "token-id": "over00",
            "token-secret": "0123456789abcdef",
            "usage-bootstrap-authentication": "true",
            "auth-extra-groups": "system:bootstrappers:k8e:workers",
            "expiration": "2026-01-01T00:00:00Z",
        }
        metadata = {"name": "bootstrap-token-over00", "namespace": "kube-system"}
        kind = {"apiVersion": "v1", "kind": "Secret", "type": "bootstrap.kubernetes.io/token"}
        server.kubectl("apply", "--filename=-", given=json.dumps({**kind, "metadata": metadata, "stringData": data}))
        other.start(K8E_URL=url, K8E_TOKEN=f"{token[:70]}over00.0123456789abcdef")
        assert other.wait_refused()["code"] == "join_refused"


def test_a_token_makes_no_node_that_is_there(
    other: Member, worker: Member, server: Member, url: str, token: str
) -> None:
    """A machine that has a token calls itself as the worker is called."""
    before = get(server, "node/two")["metadata"]["uid"]
    other.start("two", K8E_URL=url, K8E_TOKEN=token)
    until(lambda: "there is a node two" in server.said, server.said)
    other.kill()
    assert get(server, "node/two")["metadata"]["uid"] == before


def test_a_supervisor_that_is_killed_leaves_all_running_and_the_next_takes_over(server: Member, worker: Member) -> None:
    for member in (server, worker):
        before = member.list_processes()
        member.kill()
        assert member.list_processes() == before
        member.start()
        member.wait_ready()
        assert member.list_processes() == before


TOKENS = """
import asyncio, json, sys
from pathlib import Path
from k8e.cluster.api import Api
from k8e.cluster.member.tokens import create_token, delete_token, list_tokens
tls = Path("/var/lib/k8e/server/tls")
api = Api(sys.argv[1], tls / "server-ca.crt", tls / "supervisor/client.pem")
async def main():
    if sys.argv[2] == "create":
        return (await create_token(api, sys.argv[3], "of a test", float(sys.argv[4]))).text
    if sys.argv[2] == "delete":
        return await delete_token(api, sys.argv[3])
    return [record.body for record in await list_tokens(api)]
print(json.dumps(asyncio.run(main())))
"""


def test_tokens_are_made_listed_and_deleted(server: Member, url: str, token: str) -> None:
    def ask(*arguments: str) -> Any:
        return json.loads(server.run_python(TOKENS, url, *arguments))

    made = ask("create", token[4:68], "4000000000")
    assert made[:70] == token[:70]
    found = {each["id"]: each for each in ask("list")}
    assert found[made[70:76]]["expires"] == "2096-10-02T07:06:40Z"
    assert found[token[70:76]]["expires"] is None
    assert made[77:] not in json.dumps(list(found.values()))
    ask("delete", made[70:76])
    assert made[70:76] not in {each["id"] for each in ask("list")}


def test_all_is_back_after_a_power_failure(server: Member, worker: Member) -> None:
    server.kubectl("apply", "--filename=-", given=make_pod("lasting", "two", "native", SERVE))
    server.kubectl("wait", "--for=condition=Ready", "pod/lasting", "--timeout=150s")
    before = {item["metadata"]["name"]: item["metadata"]["uid"] for item in get(server, "nodes")["items"]}
    for member in (server, worker):
        member.machine.cut_power()
    for member in (server, worker):
        member.machine.boot()
        member.start()
    for member in (server, worker):
        member.wait_ready()
    assert {item["metadata"]["name"]: item["metadata"]["uid"] for item in get(server, "nodes")["items"]} == before
    until(lambda: get(server, "pod/lasting")["status"]["containerStatuses"][0]["restartCount"] > 0)
    server.kubectl("wait", "--for=condition=Ready", "pod/lasting", "--timeout=150s")


REMOVE = """
import asyncio
from pathlib import Path
from k8e.cluster.member.layout import Layout
from k8e.cluster.member.removal import remove_member
asyncio.run(remove_member(Layout(kubeconfig=Path("/var/lib/k8e/k8e.yaml"))))
"""


def test_a_member_that_is_removed_leaves_nothing(server: Member, worker: Member) -> None:
    """With a pod that runs there."""
    worker.kill()
    worker.run_python(REMOVE)
    run = worker.machine.run
    assert worker.list_processes() == {}
    assert run("ls", "-A", "/var/lib/k8e").stdout == ""
    assert "k8e-pods" not in run("ip", "link").stdout
    assert run("ip", "route", "show", "proto", "107").stdout == ""
    mounts = run("cat", "/proc/mounts").stdout.splitlines()
    assert [line for line in mounts if "kubelet" in line or "/run/k8e/" in line] == []
    assert run("ls", "-A", "/run/netns").stdout == ""
    assert "kube-proxy" not in run("nft", "list", "tables").stdout
    left = run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert "shim" not in left
    assert "httpd" not in left
