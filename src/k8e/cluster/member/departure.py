"""Takes a member out of its cluster: ends its supervisor, and removes its node. `removal.py` removes the rest."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from typing import Final

from k8e.cluster.api import Api
from k8e.cluster.errors import ClusterError
from k8e.cluster.member.layout import SANDBOXES, Layout

_PATIENCE: Final = 120.0


def find_supervisor(layout: Layout) -> int | None:
    """Returns the pid of the supervisor that runs on this machine."""
    try:
        with open(layout.lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read().strip()
                return int(text) if text.isdecimal() else 0
    except FileNotFoundError:
        pass
    return None


def stop_supervisor(layout: Layout) -> None:
    """Ends it, and with it its programs; pods go on."""
    end = time.monotonic() + _PATIENCE
    pid = find_supervisor(layout)
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while find_supervisor(layout) is not None:
        if time.monotonic() > end:
            hint = f"process {pid} has the lock {layout.lock}: end it"
            raise ClusterError("cluster_not_stopped", "the supervisor does not end", hint=hint)
        time.sleep(0.1)


async def list_sandboxes(api: Api, node: str) -> list[str]:
    """Returns the sandboxes that run on a node; none when the cluster does not answer."""
    answer = await api.get(f"/api/v1/namespaces/{SANDBOXES}/pods?fieldSelector=spec.nodeName%3D{node}")
    if answer is None or answer[0] != 200:
        return []
    pods = json.loads(answer[1])["items"]
    return [pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]


async def forget_node(api: Api, node: str) -> bool:
    """Removes the node's object; a node may remove itself. False when the cluster does not do it."""
    answer = await api.request("DELETE", f"/api/v1/nodes/{node}")
    return answer is not None and answer[0] in (200, 202, 404)
