"""The servers of the cluster, as each node knows them: the file that the forwarder reads (forwarder.py).

The API servers themselves keep the list, in the endpoints of the service `kubernetes`: one that has not renewed its
lease for 15 s is not in it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from k8e.cluster.api import Api
from k8e.cluster.member.layout import Layout, Membership
from k8e.cluster.trust.leaves import read_if_there, write_file

_ITEMS: Final = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
_SLICES: Final = f"{_ITEMS}?labelSelector=kubernetes.io%2Fservice-name%3Dkubernetes"
PORT: Final = 6443


async def find_servers(api: Api) -> list[str] | None:
    """Returns the servers that serve, as ADDRESS:PORT; None when there is no answer."""
    answer = await api.get(_SLICES)
    return None if answer is None or answer[0] != 200 else read_slices(json.loads(answer[1]))


def read_slices(body: dict[str, Any]) -> list[str]:
    """Returns the addresses in a list of EndpointSlices."""
    found: set[str] = set()
    for each in body.get("items") or []:
        ports = [port.get("port") for port in each.get("ports") or [] if port.get("port")]
        for endpoint in each.get("endpoints") or []:
            if (endpoint.get("conditions") or {}).get("ready", True):
                found.update(f"{address}:{port}" for address in endpoint.get("addresses") or [] for port in ports)
    return sorted(found)


def order_servers(found: Iterable[str], own: str, url: str) -> list[str]:
    """Returns the servers in the order in which a node tries them: its own; the others; and at last the address with
    which it has joined, which may be that of a load balancer."""
    servers = sorted(found, key=lambda each: (each != own, each))
    given = name_address(url)
    return servers if given in servers else [*servers, given]


def name_address(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or PORT}"


def read_servers(path: Path) -> list[str]:
    """Empty when there is no usable list."""
    try:
        found = json.loads(read_if_there(path) or b"[]")
        return [str(each) for each in found] if isinstance(found, list) else []
    except ValueError:
        return []


def write_servers(path: Path, servers: Sequence[str]) -> None:
    write_file(path, json.dumps(list(servers)).encode())


def find_alive(servers: Sequence[str]) -> list[str]:
    """Returns those that accept connections."""
    found = []
    for server in servers:
        host, _, port = server.rpartition(":")
        try:
            socket.create_connection((host, int(port)), 3.0).close()
        except (OSError, ValueError):
            continue
        found.append(server)
    return found


class ServerList:
    """Keeps the list up to date. It asks the servers one by one and not through the forwarder: one that answers, but
    has lost its etcd, does not keep the list as it is."""

    def __init__(self, layout: Layout, membership: Membership) -> None:
        self._layout = layout
        self._member = membership
        self._own = f"{membership.address}:{PORT}"
        if not read_servers(layout.servers):
            write_servers(layout.servers, [name_address(membership.url)])

    async def refresh(self) -> None:
        known = read_servers(self._layout.servers)
        for server in known:
            api = Api(f"https://{server}", self._member.server_authority, self._layout.node_certificate)
            if found := await find_servers(api):
                ordered = order_servers(found, self._own, self._member.url)
                if ordered != known:
                    await asyncio.to_thread(write_servers, self._layout.servers, ordered)
                return
