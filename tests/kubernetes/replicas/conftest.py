from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from k8e.cluster.cluster import Cluster
from tests.kubernetes.engine.conftest import images, open_site
from tests.kubernetes.engine.rig import ROOT, Site, rename
from tests.kubernetes.kubectl import Kubectl

__all__ = ["images"]


def allow_records(kubectl: Kubectl) -> None:
    files = ("deploy/helm/crds/sandboxrecords.yaml", "deploy/kubernetes/records.yaml")
    documents = [one for file in files for one in yaml.safe_load_all((ROOT / file).read_text())]
    kubectl.apply(*(rename(one, {"k8e": kubectl.namespace}) for one in documents))
    kubectl("wait", "--for=condition=Established", "crd/sandboxrecords.k8e.dev", "--timeout=60s")


@pytest.fixture(scope="module")
def site(cluster: Cluster, images: None) -> Iterator[Site]:
    """With the rights of several gateways."""
    with open_site(cluster, volumes=False) as site:
        allow_records(site.kubectl)
        yield site
