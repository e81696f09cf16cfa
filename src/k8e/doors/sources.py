"""Where a connection comes from, as far as it is counted: an IPv4 address, or the 64 bits of an IPv6 address that one
subscriber has. The other 64 are theirs to choose."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def name_source(address: str) -> str:
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
