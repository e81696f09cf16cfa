"""Addresses that a door listens on, the names that clients know them by, and where connections come from."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

BACKLOG: Final = 512


def split_address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def bind_port(host: str, port: int) -> socket.socket:
    """`::` is both families, as `0.0.0.0` is one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def list_names(host: str, names: Sequence[str]) -> list[str]:
    """Lists the names for a server certificate: those configured, this machine's name, loopback, and the address."""
    wildcard = host in ("0.0.0.0", "::")
    usual = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *([] if wildcard else [host])]
    return list(dict.fromkeys([*names, *usual]))


@lru_cache(maxsize=4096)
def name_source(address: str) -> str:
    """Names the source that a connection is counted for: an IPv4 address, or the first 64 bits of an IPv6 address,
    because one subscriber chooses the other 64 at will."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        if not ip.is_loopback:
            return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)
