"""A backup of a running cluster, and the way back: after data was lost, and after the whole machine was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k8e.cluster.build import default_cache, find_components
from tests.members.conftest import Member, until
from tests.members.test_members import get, make_pod

SLEEP = "exec sleep infinity"
BACKUPS = """
import json, sys
from ipaddress import IPv4Address
from pathlib import Path
from k8e.cluster.api import Api
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.backups.backup import make_backup
from k8e.cluster.member.backups.restoration import restore_backup
from k8e.cluster.member.layout import Layout
layout, tls = Layout(), Path("/var/lib/k8e/server/tls")
etcd = Api("https://127.0.0.1:2379", tls / "etcd-ca.crt", tls / "supervisor/etcd.pem")
verb, etcdutl, path, node, address = sys.argv[1:]
try:
    if verb == "make":
        done = make_backup(layout, etcd, Path(etcdutl), node, Path(path))
    else:
        done = restore_backup(layout, Path(path), Path(etcdutl), node, IPv4Address(address))
    print(json.dumps(done.body))
except ClusterError as error:
    print(json.dumps(error.body))
"""


def back_up(server: Member, verb: str, path: Path) -> dict[str, Any]:
    found = find_components(default_cache())
    assert found is not None
    etcdutl = Path("/run/binaries") / found.program("etcdutl").relative_to(default_cache())
    arguments = (verb, str(etcdutl), str(path), server.machine.name, server.machine.address)
    body: dict[str, Any] = json.loads(server.run_python(BACKUPS, *arguments))
    return body


def test_a_server_makes_a_backup_by_itself(server: Member) -> None:
    until(lambda: server.machine.run("ls", "/var/lib/k8e/server/backups", check=False).stdout.endswith(".tar\n"))
    assert "k8e-backup-" in server.said


def test_what_was_lost_is_back_and_workers_go_on(server: Member, worker: Member) -> None:
    kept = server.machine.folder / "kept.tar"  # outlives the machine's disk
    server.kubectl("create", "configmap", "before", "--from-literal=a=b")
    server.kubectl("create", "secret", "generic", "hidden", "--from-literal=a=c2VjcmV0")
    server.kubectl("apply", "--filename=-", given=make_pod("lasting", "two", "native", SLEEP))
    server.kubectl("wait", "--for=condition=Ready", "pod/lasting", "--timeout=150s")
    status = get(server, "pod/lasting")["status"]["containerStatuses"][0]
    assert back_up(server, "make", kept)["keys"] > 50
    assert back_up(server, "restore", kept)["code"] == "already_running"
    server.kubectl("create", "configmap", "after", "--from-literal=a=b")
    nodes = {item["metadata"]["name"]: item["metadata"]["uid"] for item in get(server, "nodes")["items"]}

    # etcd's data alone is lost: a start would be a second cluster under the same name.
    server.machine.cut_power()
    server.machine.boot()
    server.machine.run("rm", "-r", "/var/lib/k8e/server/etcd")
    server.start()
    assert server.wait_refused()["code"] == "etcd_data_missing"

    # The whole disk is lost.
    server.machine.cut_power()
    server.machine.lose_disk()
    server.machine.boot()
    assert back_up(server, "restore", kept)["node"] == "one"
    server.start()
    server.wait_ready()
    assert get(server, "configmap/before")["data"] == {"a": "b"}
    assert get(server, "secret/hidden")["data"]["a"] == "YzJWamNtVjA="  # the key that encrypts is back, too
    assert "NotFound" in server.kubectl("get", "configmap", "after", check=False)

    def is_ready(node: str) -> bool:
        conditions = get(server, f"node/{node}")["status"]["conditions"]
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    until(lambda: is_ready("one") and is_ready("two"))
    assert get(server, "node/two")["metadata"]["uid"] == nodes["two"]
    now = get(server, "pod/lasting")["status"]["containerStatuses"][0]
    assert (now["containerID"], now["restartCount"]) == (status["containerID"], status["restartCount"])
    server.import_busybox()
    for name, node in (("on-server", "one"), ("on-worker", "two")):
        server.kubectl("apply", "--filename=-", given=make_pod(name, node, "native", SLEEP))
    server.kubectl("wait", "--for=condition=Ready", "pod/on-server", "pod/on-worker", "--timeout=150s")
