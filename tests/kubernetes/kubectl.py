"""kubectl in one namespace of one cluster, and pods for tests."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from k8e.cluster.cluster import Cluster
from k8e.cluster.image import make_image

BUSYBOX = "k8e.local/busybox:1"


def make_busybox() -> bytes:
    found = shutil.which("busybox")
    assert found is not None, "the package busybox-static is missing: scripts/setup tests"
    links = {f"bin/{name}": "busybox" for name in ("sh", "cat", "echo", "httpd", "ls", "nc", "sleep", "wget")}
    return make_image(BUSYBOX, {"bin/busybox": Path(found).read_bytes()}, ["/bin/sh"], links)


class Kubectl:
    def __init__(self, cluster: Cluster, namespace: str, kubeconfig: Path | None = None) -> None:
        self.namespace = namespace
        program = cluster.components.program("kubectl")
        self._command = [str(program), f"--kubeconfig={kubeconfig or cluster.place.kubeconfig}", f"-n={namespace}"]

    def __call__(self, *arguments: str, given: str | None = None) -> str:
        done = self._run(arguments, given)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def refused(self, *arguments: str) -> str:
        """Returns the reason."""
        done = self._run(arguments)
        assert done.returncode != 0, f"kubectl {' '.join(arguments)}: {done.stdout}"
        return done.stderr

    def _run(self, arguments: Sequence[str], given: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._command, *arguments], input=given, capture_output=True, text=True, timeout=150)

    @contextlib.contextmanager
    def watch(self, kind: str) -> Iterator[subprocess.Popen[str]]:
        """Prints events as JSON, each on a line."""
        command = [*self._command, "get", kind, "--watch", "--output-watch-events", "--output=json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.terminate()

    def apply(self, *objects: dict[str, Any]) -> None:
        items = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self("apply", "--server-side", "--filename=-", given=items)

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("get", name, "--output=json"))
        return found


def describe_pod(runtime: str, script: str) -> dict[str, Any]:
    """A pod's spec: one container that runs a script of busybox's shell."""
    container = {
        "name": "main",
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", script],
        "volumeMounts": [{"name": "files", "mountPath": "/files"}],
    }
    return {
        "runtimeClassName": runtime,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "files", "emptyDir": {}}],
    }


def make_pod(name: str, runtime: str, script: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": describe_pod(runtime, script)}
