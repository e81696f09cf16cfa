"""Upstream's own client on a warm pool of ours: run by test_upstream.py, with an interpreter that has the client.

upstream_client.py POOL NAMESPACE    says in lines of JSON what it found; a line on stdin lets it go on"""

from __future__ import annotations

import json
import sys

from k8s_agent_sandbox import SandboxClient
from k8s_agent_sandbox.exceptions import SandboxError
from k8s_agent_sandbox.models import SandboxdInClusterConnectionConfig, SandboxInClusterConnectionConfig


def tell(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def attempt(client: SandboxClient, claim: str, namespace: str) -> str:
    """The class of the error that a command ends with; empty: none."""
    sandbox = client.get_sandbox(claim, namespace=namespace)
    try:
        sandbox.commands.run("true", timeout=10)
    except (SandboxError, RuntimeError, ImportError) as error:
        return type(error).__name__
    return ""


def main(pool: str, namespace: str) -> None:
    client = SandboxClient(connection_config=SandboxInClusterConnectionConfig())
    sandbox = client.create_sandbox(warmpool=pool, namespace=namespace, shutdown_after_seconds=600)
    claim = sandbox.claim_name
    try:
        tell(
            claim=claim,
            pod=sandbox.get_pod_name(),
            address=sandbox.get_pod_ip(),
            status=sandbox.status(),
            listed=client.list_all_sandboxes(namespace=namespace),
        )
        other = SandboxClient(connection_config=SandboxdInClusterConnectionConfig(mode="in-cluster-pod-ip"))
        tell(legacy=attempt(client, claim, namespace), sandboxd=attempt(other, claim, namespace))
        sys.stdin.readline()
    finally:
        client.delete_sandbox(claim, namespace=namespace)
    tell(deleted=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
