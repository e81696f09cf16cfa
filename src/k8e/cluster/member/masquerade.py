"""Pods have addresses that only members of the cluster know: what goes further gets the node's own, by one rule of
nftables. Which sandbox may go where is not decided here, but by the helper of the node."""

from __future__ import annotations

import asyncio
from ipaddress import IPv4Network
from typing import Final

from k8e.cluster.errors import StartFailed

TABLE: Final = "k8e-pods"


def describe_rules(pods: IPv4Network) -> str:
    """Replaces the table whole: the same again changes nothing."""
    return f"""\
add table ip {TABLE}
delete table ip {TABLE}
table ip {TABLE} {{
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {pods} ip daddr != {pods} masquerade
  }}
}}
"""


async def set_masquerade(pods: IPv4Network) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            *("nft", "--file", "-"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, output = await process.communicate(describe_rules(pods).encode())
    except FileNotFoundError:
        output, process = b"there is no nft", None
    if process is None or process.returncode != 0:
        hint = "install nftables (Debian: apt-get install nftables); the kernel has to have it, too"
        detail = output.decode(errors="replace")[-500:]
        raise StartFailed("cluster_not_set_up", "the node's rules cannot be set", detail=detail, hint=hint)
