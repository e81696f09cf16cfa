"""Three servers and a worker: how a server joins, what the loss of one changes, and how it comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.members.conftest import Member, until
from tests.members.machine import Segment
from tests.members.test_members import get, make_pod

SLEEP = "exec sleep infinity"
MEMBERS = """
import asyncio, json, sys
from pathlib import Path
from k8e.cluster.member.servers.etcd_members import EtcdMembers
tls = Path("/var/lib/k8e/server/tls")
etcd = EtcdMembers(["127.0.0.1"], tls / "etcd-ca.crt", tls / "supervisor/etcd.pem")
found = asyncio.run(etcd.list_members())
print(json.dumps(None if found is None else {each.name: not each.is_learner for each in found}))
"""


@dataclass
class Cluster:
    servers: dict[str, Member]
    worker: Member
    node_token: str
    server_token: str

    def url(self, name: str) -> str:
        return f"https://{self.servers[name].machine.address}:6443"

    def join(self, name: str, through: str) -> None:
        self.servers[name].start(K8E_URL=self.url(through), K8E_TOKEN=self.server_token)

    def list_etcd(self, asked: str) -> dict[str, bool] | None:
        """Returns the members of etcd and whether they vote; None when there is no majority."""
        found: dict[str, bool] | None = json.loads(self.servers[asked].run_python(MEMBERS))
        return found


def read(member: Member, name: str) -> str:
    return member.machine.run("cat", f"/var/lib/k8e/server/{name}").stdout.strip()


def is_ready(member: Member, node: str) -> bool:
    conditions = get(member, f"node/{node}")["status"]["conditions"]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def describe(member: Member, pod: str) -> tuple[str, int]:
    """Returns what changes when a container is started again."""
    status: dict[str, Any] = get(member, f"pod/{pod}")["status"]["containerStatuses"][0]
    return status["containerID"], status["restartCount"]


@pytest.fixture(scope="module")
def cluster(segment: Segment) -> Cluster:
    one = Member(segment.make("one"), "server")
    one.start()
    one.wait_ready()
    found = Cluster(
        {"one": one}, Member(segment.make("w"), "worker"), read(one, "node-token"), read(one, "server-token")
    )
    for name in ("two", "three"):
        found.servers[name] = Member(segment.make(name), "server")
        found.join(name, "one")  # both at once
    found.worker.start(K8E_URL=found.url("one"), K8E_TOKEN=found.node_token)
    for member in (*found.servers.values(), found.worker):
        member.wait_ready()
        member.import_busybox()
    return found


def test_three_servers_are_three_members_of_etcd(cluster: Cluster) -> None:
    assert cluster.list_etcd("three") == {"one": True, "two": True, "three": True}
    names = {item["metadata"]["name"] for item in get(cluster.servers["two"], "nodes")["items"]}
    assert names == {"one", "two", "three", "w"}


def test_all_servers_have_the_same_authorities_and_give_the_same_tokens(cluster: Cluster) -> None:
    for name in ("authorities/client/ca.key", "authorities/encryption.key", "node-token", "server-token"):
        assert len({read(server, name) for server in cluster.servers.values()}) == 1, name


def test_an_object_that_is_written_at_one_is_read_at_the_others(cluster: Cluster) -> None:
    cluster.servers["two"].kubectl("create", "secret", "generic", "shared", "--from-literal=a=of-two")
    for server in cluster.servers.values():
        assert get(server, "secret/shared")["data"]["a"] == "b2YtdHdv"  # decrypted with the key that all have


@pytest.fixture(scope="module")
def other(segment: Segment, cluster: Cluster) -> Member:
    """A machine with nothing on it."""
    return Member(segment.make("other"), "server")


class TestMachineThatBecomesNoServer:
    def test_has_no_token(self, other: Member, cluster: Cluster) -> None:
        other.start(K8E_URL=cluster.url("one"))
        assert other.wait_refused()["code"] == "no_cluster"
        assert other.machine.run("find", "/var/lib/k8e", "-name", "*.key").stdout == ""

    def test_has_a_worker_s_token(self, other: Member, cluster: Cluster) -> None:
        other.start(K8E_URL=cluster.url("one"), K8E_TOKEN=cluster.node_token)
        assert other.wait_refused()["code"] == "worker_token"

    def test_has_a_worker_s_token_and_a_key_that_it_made_up(self, other: Member, cluster: Cluster) -> None:
        other.start(K8E_URL=cluster.url("one"), K8E_TOKEN=f"{cluster.node_token}::{'ab' * 32}")
        assert other.wait_refused()["code"] in ("cluster_refuses", "token_not_found")

    def test_has_a_server_s_token_with_another_key(self, other: Member, cluster: Cluster) -> None:
        other.start(K8E_URL=cluster.url("one"), K8E_TOKEN=cluster.server_token[:-64] + "ab" * 32)
        assert other.wait_refused()["code"] == "keys_sealed"

    def test_has_the_name_of_a_server_that_lives(self, other: Member, cluster: Cluster) -> None:
        other.start("two", K8E_URL=cluster.url("one"), K8E_TOKEN=cluster.server_token)
        assert other.wait_refused()["code"] == "name_taken"
        assert cluster.list_etcd("one") == {"one": True, "two": True, "three": True}

    def test_reads_no_keys_with_a_worker_s_token(self, other: Member, cluster: Cluster) -> None:
        secret = f"k8e-keys-{cluster.server_token[70:76]}"
        for name, bearer, code in ((secret, cluster.node_token[70:], 403), ("", cluster.server_token[70:93], 403)):
            address = f"{cluster.url('one')}/api/v1/namespaces/kube-system/secrets/{name}"
            command = ["curl", "--silent", "--insecure", "--header", f"Authorization: Bearer {bearer}", address]
            assert json.loads(other.machine.run(*command).stdout)["code"] == code

    def test_leaves_no_key_of_the_cluster_on_its_disk(self, other: Member) -> None:
        """After all of the above but the one with the right token."""
        other.machine.cut_power()
        other.machine.lose_disk()
        other.machine.boot()
        other.start(K8E_URL="https://10.99.7.10:6443", K8E_TOKEN=f"K8E1{'0' * 64}::abcdef.{'0' * 16}::{'ab' * 32}")
        assert other.wait_refused()["code"] == "wrong_cluster"
        assert other.machine.run("find", "/var/lib/k8e", "-name", "*.key").stdout == ""


def test_the_cluster_goes_on_without_a_server_and_takes_it_back(cluster: Cluster) -> None:
    """The first one, through which all others have joined: no power any more, and no disk."""
    one, two, worker = cluster.servers["one"], cluster.servers["two"], cluster.worker
    for name, node in (("on-worker", "w"), ("on-server", "three")):
        two.kubectl("apply", "--filename=-", given=make_pod(name, node, "native", SLEEP))
    two.kubectl("wait", "--for=condition=Ready", "pod/on-worker", "pod/on-server", "--timeout=150s")
    before = {name: describe(two, name) for name in ("on-worker", "on-server")}
    one.machine.cut_power()
    one.machine.lose_disk()
    # A worker that was told of the first server only finds another, and starts pods.
    lost = f'"{one.machine.address}"'
    until(lambda: lost not in two.kubectl("get", "endpointslices", "kubernetes", "--output=json", check=False))
    until(lambda: not is_ready(two, "one"))
    assert is_ready(two, "w")
    two.kubectl("apply", "--filename=-", given=make_pod("later", "w", "native", SLEEP))
    two.kubectl("wait", "--for=condition=Ready", "pod/later", "--timeout=150s")
    assert two.kubectl("exec", "on-worker", "--", "echo", "there") == "there\n"
    assert {name: describe(two, name) for name in before} == before
    assert one.machine.address not in worker.machine.run("cat", "/var/lib/k8e/agent/servers.json").stdout.split('"')[1]
    # The machine comes back with an empty disk.
    one.machine.boot()
    cluster.join("one", "two")
    one.wait_ready()
    one.import_busybox()
    assert cluster.list_etcd("one") == {"one": True, "two": True, "three": True}
    until(lambda: is_ready(one, "one"))
    assert {name: describe(one, name) for name in before} == before
    one.kubectl("apply", "--filename=-", given=make_pod("back", "one", "native", SLEEP))
    one.kubectl("wait", "--for=condition=Ready", "pod/back", "--timeout=150s")
    one.kubectl("delete", "pod", "later", "back", "--wait=false")


def test_a_server_that_is_started_again_without_a_token_is_the_same_one(cluster: Cluster) -> None:
    two = cluster.servers["two"]
    before = two.list_processes()
    two.kill()
    two.start()
    two.wait_ready()
    assert two.list_processes() == before


def test_a_worker_that_was_cut_off_comes_back_with_its_pods(cluster: Cluster) -> None:
    one, worker = cluster.servers["one"], cluster.worker
    before = describe(one, "on-worker")
    worker.machine.set_link("down")
    try:
        until(lambda: not is_ready(one, "w"))
    finally:
        worker.machine.set_link("up")
    until(lambda: is_ready(one, "w"))
    assert describe(one, "on-worker") == before
    assert one.kubectl("exec", "on-worker", "--", "echo", "there") == "there\n"


def test_all_is_back_after_a_power_failure_of_all(cluster: Cluster) -> None:
    one, members = cluster.servers["one"], (*cluster.servers.values(), cluster.worker)
    before = {item["metadata"]["name"]: item["metadata"]["uid"] for item in get(one, "nodes")["items"]}
    for member in members:
        member.machine.cut_power()
    for member in members:
        member.machine.boot()
    # As a service starts them: with the variables of their first start. Each names a server that does not run yet.
    for name, through in (("one", "two"), ("two", "one"), ("three", "one")):
        cluster.join(name, through)
    cluster.worker.start(K8E_URL=cluster.url("one"), K8E_TOKEN=cluster.node_token)
    for member in members:
        member.wait_ready()
    assert cluster.list_etcd("one") == {"one": True, "two": True, "three": True}
    assert {item["metadata"]["name"]: item["metadata"]["uid"] for item in get(one, "nodes")["items"]} == before
    until(lambda: describe(one, "on-worker")[1] > 0)
    one.kubectl("wait", "--for=condition=Ready", "pod/on-worker", "pod/on-server", "--timeout=150s")
