"""From nothing to a sandbox, as docs/kubernetes.md has it: images, `helm install`, an API key, a command by the SDK."""

from __future__ import annotations

from pathlib import Path

from k8e.cluster.cluster import Cluster
from sandbox_client import SandboxClient
from tests.kubernetes.install.helm import CHART, Helm
from tests.kubernetes.install.rig import describe, install
from tests.kubernetes.kubectl import Kubectl


def test_from_nothing_to_a_command_and_back(
    cluster: Cluster, chart_images: None, helm_program: Path, tmp_path: Path, kubectl: Kubectl
) -> None:
    helm = Helm(helm_program, tmp_path, cluster.place.kubeconfig)
    changes = {"metrics": {"enabled": True}}
    with install(cluster, kubectl, helm, changes) as release:
        deployment, where = f"deploy/{release.name}", release.where
        key = release.make_key(deployment)
        status = kubectl("exec", deployment, "--", "python3", "-c", "import os; print(os.getuid())")
        assert status.strip() == "10001"
        with (
            release.forward(f"service/{release.name}") as port,
            SandboxClient(f"localhost:{port}", api_key=key) as client,
        ):
            done = client.run("print(6 * 7)", language="python")
            assert (done.exit_code, done.stdout) == (0, "42\n")
            assert release.boxes("get", "pods", "--output=name").startswith("pod/k8e-")
        secret = kubectl.get(f"secret/{release.name}-key")["data"]["gateway.pem"]
        values = helm.values(describe(release.boxes.namespace, {**changes, "gateway": {"podLabels": {"a": "b"}}}))
        helm("upgrade", release.name, str(CHART), where, values, "--wait", "--timeout=150s")
        assert kubectl.get(f"secret/{release.name}-key")["data"]["gateway.pem"] == secret
        said = helm("test", release.name, where, "--logs", "--timeout=150s")
        assert "Safe: sandboxes run with gvisor" in said
    assert kubectl.get(f"secret/{release.name}-key")["data"]["gateway.pem"] == secret
    assert "NotFound" in kubectl.refused("get", "namespace", release.boxes.namespace)
