from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.cluster.cluster import Cluster
from tests.kubernetes.engine.images import agent_image, tools_image
from tests.kubernetes.engine.rig import Site, make_site, remove_account
from tests.kubernetes.engine.volumes import provide_volumes
from tests.kubernetes.kubectl import Kubectl


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> None:
    for archive in (agent_image(), tools_image()):
        cluster.import_image(archive)


@contextlib.contextmanager
def open_site(cluster: Cluster, *, volumes: bool) -> Iterator[Site]:
    kubectl = Kubectl(cluster, f"engine-{uuid.uuid4().hex[:8]}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="k8e-gateway-")))
        kubectl("create", "namespace", kubectl.namespace)
        stack.callback(kubectl, "delete", "namespace", kubectl.namespace, "--wait=false")
        stack.callback(remove_account, kubectl)
        storage_class = stack.enter_context(provide_volumes(kubectl)) if volumes else ""
        yield make_site(cluster, kubectl, folder, storage_class)


@pytest.fixture(scope="module")
def site(cluster: Cluster, images: None) -> Iterator[Site]:
    """Without volumes: sandboxes end with their pods."""
    with open_site(cluster, volumes=False) as site:
        yield site


@pytest.fixture(scope="module")
def site_with_volumes(cluster: Cluster, images: None) -> Iterator[Site]:
    with open_site(cluster, volumes=True) as site:
        yield site
