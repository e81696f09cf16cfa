"""Runs a member in the foreground, until the commands of `k8e` for it are there.

python -m tests.members.command server|worker NODE ADDRESS     K8E_URL and K8E_TOKEN as of `k8e agent`
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from ipaddress import IPv4Address
from pathlib import Path

from k8e.cluster.build import find_components
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.layout import Layout
from k8e.cluster.member.member import Options, run_server, run_worker
from k8e.cluster.trust.join_token import JoinToken


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    kind, node, address = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    components = find_components(Path(os.environ.get("K8E_TEST_BINARIES", "/run/binaries")))
    assert components is not None
    layout = Layout(kubeconfig=Path("/var/lib/k8e/k8e.yaml"))
    try:
        token = JoinToken.parse(text) if (text := os.environ.get("K8E_TOKEN")) else None
        options = Options(layout, components, node, IPv4Address(address), os.environ.get("K8E_URL", ""), token)
        asyncio.run((run_server if kind == "server" else run_worker)(options, say))
    except ClusterError as error:
        say(json.dumps(error.body))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
