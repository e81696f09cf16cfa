"""A server that is gone for good: another machine takes its place, when an administrator has given it up, and the lost
one comes back as a further one."""

from __future__ import annotations

from tests.members.conftest import Member
from tests.members.machine import Segment
from tests.members.test_servers import Cluster, cluster

__all__ = ["cluster"]


def test_a_server_takes_the_place_of_a_lost_one(cluster: Cluster, segment: Segment) -> None:
    one, three = cluster.servers["one"], cluster.servers["three"]
    three.machine.cut_power()
    four = Member(segment.make("four"), "server")
    cluster.servers["four"] = four
    cluster.join("four", "two")
    assert four.wait_refused()["code"] == "server_lost"
    assert set(cluster.list_etcd("one") or ()) == {"one", "two", "three"}
    one.kubectl("delete", "node", "three")
    cluster.join("four", "two")
    four.wait_ready()
    assert cluster.list_etcd("four") == {"one": True, "two": True, "four": True}

    # The lost one has its disk, and is no member any more: it does not start by itself, and joins when it is told.
    three.machine.boot()
    three.start()
    assert three.wait_refused()["code"] == "component_not_ready"
    cluster.join("three", "one")
    three.wait_ready()
    assert cluster.list_etcd("three") == {"one": True, "two": True, "three": True, "four": True}
    assert "etcd-removed" in three.machine.run("ls", "/var/lib/k8e/server").stdout
