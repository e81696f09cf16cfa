"""One gateway with volumes and lists of hosts for each file: the node's helper applies the lists."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.cluster.cluster import Cluster
from k8e.engine.kubernetes.options import NODE
from tests.kubernetes.engine.conftest import images, open_site
from tests.kubernetes.engine.rig import Site
from tests.kubernetes.node.rig import Helper
from tests.kubernetes.scenarios.place import ClusterUser, Place, make_user, open_place

__all__ = ["images"]

# They look at files that the command line keeps for the daemon of its own machine.
AT_SOCKET = (
    *("test_auto", "test_tenants", "test_by_hand"),
    "test_the_same_session_is_used_again_and_nothing_has_to_be_managed",
)


@pytest.fixture(scope="module")
def site(cluster: Cluster, images: None) -> Iterator[Site]:
    with open_site(cluster, volumes=True) as site:
        yield replace(site, options=replace(site.options, egress=NODE))


@pytest.fixture(scope="module")
def cluster_place(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    helper = Helper(site, tmp_path_factory.mktemp("helper"))
    helper.start()
    try:
        with open_place(site) as place:
            yield place
        site.kubectl("wait", "--for=delete", "pod", "--all", "--timeout=90s")
    finally:
        helper.end()


@pytest.fixture
def user(cluster_place: Place, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ClusterUser]:
    user = make_user(cluster_place, tmp_path)
    if getattr(request.node, "originalname", "") not in AT_SOCKET:
        user.go_through_the_gateway(f"user-{secrets.token_hex(4)}")
    yield user
    user.bring_the_daemon_back()
    for session in user.live_sessions():
        user.k8e("sandbox", "destroy", session)
