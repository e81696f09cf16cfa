"""The other gateways: which of them leads, and the names by which clients reach all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from k8e.cluster.api import Api
from k8e.cluster.member.layout import SANDBOXES
from k8e.cluster.member.objects import SERVER_ROLE

PORT: Final = 10540  # of the one that leads, for the others
_LEASES: Final = f"/apis/coordination.k8s.io/v1/namespaces/{SANDBOXES}/leases"
_ADDRESS: Final = "k8e.dev/address"


async def find_leader(api: Api) -> str:
    """Returns the address at which the gateway that leads serves the others; empty: none does."""
    answer = await api.get(_LEASES)
    return "" if answer is None or answer[0] != 200 else read_leader(json.loads(answer[1]).get("items") or [])


def read_leader(leases: Iterable[dict[str, Any]]) -> str:
    for lease in leases:
        metadata = lease["metadata"]
        if metadata["name"].startswith("k8e-gateway-") and (lease.get("spec") or {}).get("holderIdentity"):
            return str((metadata.get("annotations") or {}).get(_ADDRESS, ""))
    return ""


async def find_names(api: Api) -> list[str] | None:
    """Returns the names and addresses of all servers; None when there is no answer."""
    answer = await api.get(f"/api/v1/nodes?labelSelector={SERVER_ROLE.replace('/', '%2F')}")
    return None if answer is None or answer[0] != 200 else read_names(json.loads(answer[1]).get("items") or [])


def read_names(nodes: Iterable[dict[str, Any]]) -> list[str]:
    found = set()
    for node in nodes:
        addresses = (node.get("status") or {}).get("addresses") or []
        found.add(str(node["metadata"]["name"]))
        found.update(str(each["address"]) for each in addresses if each["type"] == "InternalIP")
    return sorted(found)
