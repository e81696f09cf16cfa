"""`k8e cluster status`: this member, its programs, and the nodes of its cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from k8e.cli.cluster.place import find_layout, find_membership, open_own, require_root, run
from k8e.cli.process import FAILED
from k8e.cli.view import show_value
from k8e.cluster.child import list_programs
from k8e.cluster.member.departure import find_supervisor
from k8e.cluster.member.gateways.peers import find_leader
from k8e.cluster.member.objects import SERVER_ROLE
from k8e.cluster.member.runtimes import LABEL

if TYPE_CHECKING:
    import argparse

    from k8e.cluster.api import Api


def show_status(options: argparse.Namespace) -> int:
    """Exits with 1 when this member is not well: its supervisor does not run, the cluster does not answer, or a node
    is not ready."""
    require_root("k8e cluster status")
    layout = find_layout()
    membership = find_membership(layout)
    api = open_own(layout, membership)
    nodes = run(list_nodes(api))
    # A worker may not read the lease.
    leader = run(find_leader(api)).rpartition(":")[0] if layout.is_server else ""
    supervisor = find_supervisor(layout)
    programs = [{"program": name, "pid": pid} for name, pid in sorted(list_programs(layout.logs).items())]
    well = supervisor is not None and nodes is not None and all(node["ready"] for node in nodes)
    show_value(
        {
            "ok": well,
            "role": "server" if layout.is_server else "worker",
            "node": membership.node,
            "url": membership.url,
            "reachable": nodes is not None,
            "supervisor": supervisor,
            "programs": programs,
            "gateway": next((node["node"] for node in nodes or [] if leader and node["address"] == leader), ""),
            "nodes": nodes or [],
        }
    )
    return 0 if well else FAILED


async def list_nodes(api: Api) -> list[dict[str, Any]] | None:
    answer = await api.get("/api/v1/nodes")
    if answer is None or answer[0] != 200:
        return None
    return [describe_node(node) for node in json.loads(answer[1])["items"]]


def describe_node(node: dict[str, Any]) -> dict[str, Any]:
    labels = node["metadata"].get("labels") or {}
    status = node.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
    addresses = [each["address"] for each in status.get("addresses") or [] if each["type"] == "InternalIP"]
    return {
        "node": node["metadata"]["name"],
        "role": "server" if SERVER_ROLE in labels else "worker",
        "ready": conditions.get("Ready") == "True",
        "schedulable": not (node.get("spec") or {}).get("unschedulable", False),
        "address": addresses[0] if addresses else "",
        "version": (status.get("nodeInfo") or {}).get("kubeletVersion", ""),
        "runtimes": sorted(label.removeprefix(LABEL) for label in labels if label.startswith(LABEL)),
    }
