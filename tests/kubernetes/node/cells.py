"""Sandboxes of the cluster as the tests of one machine's egress have them (tests/egress), so that the same attempts are
made from pods."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from k8e.cluster.cluster import Cluster
from k8e.engine import Runtime
from k8e.engine.kubernetes import KubernetesEngine
from k8e.link import AgentLink
from k8e.policy import HostList
from tests.egress.internet import NAME_SERVER, Internet
from tests.egress.rig import Cell
from tests.engine.rig import Room
from tests.kubernetes.engine.rig import new_name, spec_of
from tests.kubernetes.node.rig import internet_behind, run_on_node

SEND = "from socket import *; import sys; socket(AF_INET, SOCK_DGRAM).sendto(sys.argv[1].encode(), (sys.argv[2], 9))"


@dataclass(slots=True)
class NodeInternet(Internet):
    """Behind the cluster's node, and reached from there alone."""

    cluster: Cluster | None = None

    def settle(self) -> None:
        import secrets

        assert self.cluster is not None
        marker = secrets.token_hex(8)
        run_on_node(self.cluster, sys.executable, "-c", SEND, marker, str(NAME_SERVER))
        self.ask(do="await", marker=marker)


@contextlib.contextmanager
def internet_of_node(cluster: Cluster) -> Iterator[NodeInternet]:
    with internet_behind(cluster) as internet:
        yield NodeInternet(internet.process, internet.authority, cluster=cluster)


@dataclass(slots=True)
class PodSite:
    internet: NodeInternet
    engine: KubernetesEngine
    runtime: Runtime

    @contextlib.asynccontextmanager
    async def cell(self, *hosts: str) -> AsyncIterator[Cell]:
        name = new_name()
        await self.engine.create(name, replace(spec_of(self.runtime), egress=HostList.parse(hosts)))
        try:
            link, place = await self.engine.attach(name)
            assert isinstance(link, AgentLink)
            # It has no paths on this machine, and its site is of another engine: the attempts need neither.
            yield Cell(cast("Any", self), Room(name, link, place, cast("Any", None)))
        finally:
            await self.engine.destroy(name)
