"""The chart with `sandboxes.egress: node`: its DaemonSet applies lists of hosts, with an internet that has every
address; nothing opens when it is killed or gone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k8e.cluster.cluster import Cluster
from sandbox_client import SandboxClient, SandboxError
from tests.egress.internet import NAME_SERVER, Internet
from tests.kubernetes.engine.rig import find_processes
from tests.kubernetes.install.helm import Helm
from tests.kubernetes.install.rig import Release, install
from tests.kubernetes.kubectl import Kubectl
from tests.kubernetes.node.rig import internet_behind
from tests.kubernetes.node.test_egress import ALLOWED, OTHER, REACH, STRANGE

# Tries both addresses until the file is there, and tells each result once.
ATTEMPTS = f"""
import os, socket
seen = set()
while not os.path.exists("/workspace/enough"):
    for address in ("{OTHER}", "{STRANGE}"):
        try:
            socket.create_connection((address, 80), 2).close()
            result = "reached"
        except OSError as error:
            result = type(error).__name__
        if (address, result) not in seen:
            seen.add((address, result))
            print(address, result, flush=True)
"""


@pytest.fixture(scope="module")
def internet(cluster: Cluster) -> Iterator[Internet]:
    with internet_behind(cluster) as internet:
        internet.publish({"allowed.com": {"A": [ALLOWED]}, "other.com": {"A": [OTHER]}})
        yield internet


@pytest.fixture
def release(
    cluster: Cluster, chart_images: None, helm_program: Path, tmp_path: Path, kubectl: Kubectl, internet: Internet
) -> Iterator[Release]:
    helm = Helm(helm_program, tmp_path, cluster.place.kubeconfig)
    changes = {"sandboxes": {"egress": "node"}, "nodeHelper": {"nameservers": [str(NAME_SERVER)]}}
    with install(cluster, kubectl, helm, changes) as release:
        try:
            yield release
        finally:
            # Shown when a test fails.
            sys.stdout.write(kubectl("logs", f"daemonset/{release.name}-node-helper", "--tail=50"))


def reach(client: SandboxClient, session: str, *targets: str) -> tuple[list[str], set[tuple[str, str, str]]]:
    """What came of each, and what was refused and why."""
    done = client.exec(session, f"python3 -c '{REACH}' {' '.join(targets)}")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout), {(each.host, each.address, each.reason) for each in done.denied}


def find_helper(release: Release) -> dict[str, Any]:
    (pod,) = release.list_pods("node-helper")
    return pod


def count_starts(pod: dict[str, Any]) -> int:
    (status,) = pod["status"]["containerStatuses"]
    return int(status["restartCount"]) if status["ready"] else -1


@pytest.mark.parametrize("runtime", ["native", "gvisor"])
def test_what_is_listed_is_reached_and_the_rest_is_refused_and_explained(release: Release, runtime: str) -> None:
    key = release.make_key(f"deploy/{release.name}")
    with (
        release.forward(f"service/{release.name}") as port,
        SandboxClient(f"localhost:{port}", api_key=key) as client,
    ):
        session = client.create_session(runtime, allowed_hosts=["allowed.com"])
        node = str(release.cluster.addresses.node)
        results, denied = reach(
            client, session, "allowed.com:80", "other.com:80", f"{STRANGE}:80", f"{node}:10250", "169.254.169.254:80"
        )
        assert results == ["reached", "gaierror", *["ConnectionRefusedError"] * 3]
        assert denied == {
            ("other.com", "", "name_not_listed"),
            ("", STRANGE, "address_not_listed"),
            ("", node, "machine"),
            ("", "169.254.169.254", "metadata"),
        }
        client.update_allowed_hosts(session, add=["other.com"])
        assert reach(client, session, "other.com:80")[0] == ["reached"]
        client.update_allowed_hosts(session, remove=["other.com"])
        assert reach(client, session, "other.com:80", f"{OTHER}:80")[0] == ["gaierror", "ConnectionRefusedError"]
        client.destroy_session(session)


def test_nothing_opens_when_the_helper_is_killed(release: Release) -> None:
    key = release.make_key(f"deploy/{release.name}")
    with (
        release.forward(f"service/{release.name}") as port,
        SandboxClient(f"localhost:{port}", api_key=key) as client,
    ):
        session = client.create_session("native", allowed_hosts=["allowed.com"])
        assert reach(client, session, "allowed.com:80")[0] == ["reached"]
        attempts = client.start(session, ATTEMPTS, language="python")
        pod = find_helper(release)
        before = count_starts(pod)
        for pid in list(find_processes(pod["metadata"]["uid"])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while count_starts(find_helper(release)) <= before:
            assert time.monotonic() < deadline, "the helper was not started again"
            time.sleep(0.2)
        while reach(client, session, "allowed.com:80")[0] != ["reached"]:  # names are answered again
            assert time.monotonic() < deadline
        results, denied = reach(client, session, "other.com:80", f"{STRANGE}:80")
        assert results == ["gaierror", "ConnectionRefusedError"]
        assert ("other.com", "", "name_not_listed") in denied

        # Gone for good: no node is chosen any more.
        patch = {"spec": {"template": {"spec": {"nodeSelector": {"k8e.dev/none": "x"}}}}}
        daemon_set = f"daemonset/{release.name}-node-helper"
        release.kubectl("patch", daemon_set, "--patch", json.dumps(patch))
        release.kubectl("wait", "--for=delete", f"pod/{pod['metadata']['name']}", "--timeout=60s")
        results, _ = reach(client, session, f"{ALLOWED}:80", f"{OTHER}:80", f"{STRANGE}:80", "other.com:80")
        assert results[1:3] == ["ConnectionRefusedError"] * 2
        assert results[3] != "reached"
        with pytest.raises(SandboxError, match="helper"):
            client.create_session("native", allowed_hosts=["allowed.com"])
        client.write_file(session, "enough", b"")
        seen = attempts.wait().stdout.split("\n")
        assert sorted(filter(None, seen)) == [f"{OTHER} ConnectionRefusedError", f"{STRANGE} ConnectionRefusedError"]

        # And back, so that what is left of the pods is removed.
        undo = {"spec": {"template": {"spec": {"nodeSelector": None}}}}
        release.kubectl("patch", daemon_set, "--patch", json.dumps(undo))
        release.kubectl("rollout", "status", daemon_set, "--timeout=90s")
        client.update_allowed_hosts(session, add=["other.com"])
        assert reach(client, session, "other.com:80")[0] == ["reached"]
        client.destroy_session(session)
