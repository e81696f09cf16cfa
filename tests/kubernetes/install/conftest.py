from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from k8e.cluster.build import build_tool, default_cache
from k8e.cluster.cluster import Cluster
from k8e.cluster.components import HELM
from tests.kubernetes.conftest import say
from tests.kubernetes.engine.images import tools_image
from tests.kubernetes.install.helm import ROOT, Helm


@pytest.fixture(scope="session")
def chart_images(cluster: Cluster) -> None:
    """Both images, by the real `make images`, on the node. `K8E_IMAGES=yes` takes those that are in dist/."""
    with (ROOT / "build" / "release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.environ.get("K8E_IMAGES"):
            done = subprocess.run(["make", "images"], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    for archive in (ROOT / "dist").glob("k8e-*.oci.tar"):
        cluster.import_image(archive.read_bytes())
    cluster.import_image(tools_image())


@pytest.fixture(scope="session")
def helm_program() -> Path:
    return build_tool(HELM, default_cache(), say) / "helm"


@pytest.fixture
def helm(helm_program: Path, tmp_path: Path) -> Helm:
    return Helm(helm_program, tmp_path)
