"""A server that was given a place among etcd's members and never ran does not keep others from joining."""

from __future__ import annotations

from tests.members.conftest import Member
from tests.members.machine import Segment
from tests.members.test_servers import Cluster, read

ADD = """
import asyncio
from pathlib import Path
from k8e.cluster.member.servers.etcd_members import EtcdMembers
tls = Path("/var/lib/k8e/server/tls")
etcd = EtcdMembers(["127.0.0.1"], tls / "etcd-ca.crt", tls / "supervisor/etcd.pem")
assert asyncio.run(etcd.add_learner("https://10.99.7.250:2380"))
"""


def test_another_server_takes_the_place_of_one_that_never_started(segment: Segment) -> None:
    one, two = (Member(segment.make(name), "server") for name in ("one", "two"))
    one.start()
    one.wait_ready()
    cluster = Cluster({"one": one, "two": two}, one, "", read(one, "server-token"))
    one.run_python(ADD)
    assert cluster.list_etcd("one") == {"one": True, "": False}
    cluster.join("two", "one")
    two.wait_ready()
    assert "https://10.99.7.250:2380 of etcd, which never started, is removed" in two.said
    assert cluster.list_etcd("one") == {"one": True, "two": True}
