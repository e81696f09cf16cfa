"""A full disk under etcd: it is said, nothing that was acknowledged is lost, and all goes on when there is room."""

from __future__ import annotations

import hashlib
import json

from tests.members.conftest import Member, until
from tests.members.machine import Segment

DATA = "/var/lib/k8e/server/etcd"
SIZE = 700  # MiB


def make_object(number: int) -> str:
    content = hashlib.sha256(str(number).encode()).hexdigest() * 12_000  # 768 KiB
    return json.dumps(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"large-{number}"}, "data": {"a": content}}
    )


def test_a_full_disk_is_said_and_survived(segment: Segment) -> None:
    server = Member(segment.make("full"), "server")
    run = server.machine.run
    run("mkdir", "-p", DATA)
    run("mount", "-t", "tmpfs", "-o", f"size={SIZE}m", "small", DATA)
    server.start()
    server.wait_ready()
    assert "etcd_disk_full" not in server.said
    run("dd", "if=/dev/zero", f"of={DATA}/filling", "bs=1M", check=False)
    until(lambda: "etcd_disk_full" in server.said, server.said)

    written = []
    for number in range(400):
        done = server.machine.run(
            *server.kubectl_command("create", "--filename=-"), given=make_object(number), check=False
        )
        if done.returncode != 0:
            break
        written.append(number)
    else:
        raise AssertionError("the disk was never full")

    # etcd cannot write, ends, and is started again; nobody has touched its data.
    until(lambda: "ended" in run("grep", " etcd ", "/var/lib/k8e/logs/supervisor.log", check=False).stdout)
    run("rm", f"{DATA}/filling")
    until(lambda: '"ok"' in json.dumps(server.kubectl("get", "--raw=/readyz", check=False)))
    until(lambda: "has room again" in server.said, server.said)
    for number in written:
        found = json.loads(server.kubectl("get", f"configmap/large-{number}", "--output=json"))
        assert found["data"] == json.loads(make_object(number))["data"], number
    server.kubectl("create", "configmap", "later", "--from-literal=a=b")
    assert server.kubectl("get", "--raw=/readyz/etcd") == "ok"
