"""Volumes for tests: directories of the node, one for each claim of a class, made and removed as claims come and go. A
cluster that people use has a provisioner of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kubernetes.kubectl import Kubectl


class Volumes:
    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        self._kubectl = kubectl
        self._folder = folder
        self.storage_class = f"{kubectl.namespace}-directories"

    def make_class(self) -> None:
        self._kubectl.apply(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": self.storage_class},
                "provisioner": "kubernetes.io/no-provisioner",
            }
        )

    def follow(self, watch: subprocess.Popen[str]) -> None:
        assert watch.stdout is not None
        for line in watch.stdout:
            event = json.loads(line)
            if event["type"] == "ADDED":
                self._provide(event["object"])
            elif event["type"] == "DELETED":
                self._remove(event["object"]["metadata"]["uid"])

    def _provide(self, claim: dict[str, Any]) -> None:
        meta = claim["metadata"]
        path = self._folder / meta["uid"]
        path.mkdir()
        path.chmod(0o777)  # Kubernetes gives nobody a directory of a node
        self._kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": meta["uid"]},
                "spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "capacity": claim["spec"]["resources"]["requests"],
                    "storageClassName": self.storage_class,
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": str(path)},
                    "claimRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
                },
            }
        )

    def _remove(self, uid: str) -> None:
        self._kubectl("delete", "persistentvolume", uid, "--wait=false", "--ignore-not-found")
        shutil.rmtree(self._folder / uid)

    def clear(self) -> None:
        self._kubectl("delete", "storageclass", self.storage_class, "--ignore-not-found")
        left = [path.name for path in self._folder.iterdir()]
        for uid in left:
            self._kubectl("delete", "persistentvolume", uid, "--wait=false", "--ignore-not-found")


@contextlib.contextmanager
def provide_volumes(kubectl: Kubectl) -> Iterator[str]:
    """Yields the name of a StorageClass whose claims in that namespace get volumes."""
    folder = Path(tempfile.mkdtemp(prefix="k8e-volumes-", dir="/tmp"))
    folder.chmod(0o755)
    volumes = Volumes(kubectl, folder)
    volumes.make_class()
    with kubectl.watch("persistentvolumeclaims") as watch:
        thread = threading.Thread(target=volumes.follow, args=(watch,))
        thread.start()
        try:
            yield volumes.storage_class
        finally:
            watch.terminate()
            thread.join()
            volumes.clear()
            shutil.rmtree(folder)
