"""A cluster with Cilium as its network, for all tests here: `make test-kubernetes ARGS=tests/kubernetes/cilium`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from k8e.cluster.build import Components, build_components, default_cache
from k8e.cluster.cluster import Cluster
from k8e.engine.kubernetes.options import CILIUM
from tests.egress.internet import NAME_SERVER, Internet
from tests.kubernetes.cilium.rig import allow_policies
from tests.kubernetes.conftest import provide_cluster, say
from tests.kubernetes.engine.conftest import images, open_site
from tests.kubernetes.engine.rig import Site
from tests.kubernetes.node.rig import internet_behind

__all__ = ["images"]


@pytest.fixture(scope="session")
def components() -> Components:
    return build_components(default_cache(), say, cilium=True)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield from provide_cluster(request, "test-cluster-cilium")


@pytest.fixture(scope="module")
def site(cluster: Cluster, images: None) -> Iterator[Site]:
    with open_site(cluster, volumes=False) as site:
        allow_policies(site.kubectl)
        yield replace(site, options=replace(site.options, egress=CILIUM, nameservers=(NAME_SERVER,)))


@pytest.fixture(scope="module")
def internet(cluster: Cluster) -> Iterator[Internet]:
    with internet_behind(cluster) as internet:
        internet.publish(
            {
                "allowed.com": {"A": ["45.90.31.1"]},
                "other.com": {"A": ["45.90.31.2"]},
                "deep.below.example.org": {"A": ["45.90.31.3"]},
                "example.org": {"A": ["45.90.31.4"]},
                "private.com": {"A": ["10.99.0.1"]},
                "metadata.com": {"A": ["169.254.169.254"]},
            }
        )
        yield internet
