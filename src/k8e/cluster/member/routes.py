"""The routes between nodes: to each other node's pods, through that node's address. Pure but for `apply_routes`.

Routes of ours have a protocol number of their own, by which those of nodes that are gone are found; no other route is
touched.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Final

PROTOCOL: Final = "107"


@dataclass(frozen=True, slots=True)
class Route:
    pods: IPv4Network
    node: IPv4Address


def want_routes(nodes: Iterable[Mapping[str, Any]], own: str, pods: IPv4Network) -> dict[IPv4Network, IPv4Address]:
    """Returns the routes that the node `own` needs. A node's word about itself is checked: its pods are a part of the
    pods' network and not of another node's, and its address is no pod's."""
    found: dict[IPv4Network, IPv4Address] = {}
    taken: list[IPv4Network] = []
    # The oldest first: a node that claims what another has does not get it.
    for node in sorted(nodes, key=_age):
        part, address = _read_part(node), _read_address(node)
        if part is None or not part.subnet_of(pods) or any(part.overlaps(other) for other in taken):
            continue
        taken.append(part)
        if node["metadata"]["name"] != own and address is not None and address not in pods:
            found[part] = address
    return found


def compare_routes(
    wanted: Mapping[IPv4Network, IPv4Address], there: Mapping[IPv4Network, IPv4Address]
) -> tuple[list[Route], list[IPv4Network]]:
    """Returns the routes to be set, and those to be removed."""
    setting = [Route(part, node) for part, node in wanted.items() if there.get(part) != node]
    return setting, [part for part in there if part not in wanted]


async def apply_routes(wanted: Mapping[IPv4Network, IPv4Address]) -> None:
    listed = await _ip("-json", "-4", "route", "show", "proto", PROTOCOL)
    there = {IPv4Network(each["dst"]): IPv4Address(each["gateway"]) for each in json.loads(listed or "[]")}
    setting, removing = compare_routes(wanted, there)
    for part in removing:
        await _ip("route", "del", str(part), "proto", PROTOCOL)
    for route in setting:
        await _ip("route", "replace", str(route.pods), "via", str(route.node), "proto", PROTOCOL)


async def _ip(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "ip", *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode()


def _age(node: Mapping[str, Any]) -> tuple[str, str]:
    metadata = node["metadata"]
    return str(metadata.get("creationTimestamp", "")), str(metadata["name"])


def _read_part(node: Mapping[str, Any]) -> IPv4Network | None:
    try:
        return IPv4Network((node.get("spec") or {})["podCIDR"])
    except (KeyError, ValueError):
        return None


def _read_address(node: Mapping[str, Any]) -> IPv4Address | None:
    for each in (node.get("status") or {}).get("addresses") or []:
        if each.get("type") == "InternalIP":
            try:
                return IPv4Address(each["address"])
            except (KeyError, ValueError):
                return None
    return None
