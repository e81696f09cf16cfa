"""What kind of address it is, and what follows from that.

Every spelling that leads to an IPv4 address (mapped, NAT64, 6to4, ...) is judged as that address.
"""

from __future__ import annotations

import enum
from ipaddress import IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address


class AddressKind(enum.Enum):
    PUBLIC = "public"
    PRIVATE = "private"  # also what `ipaddress` calls not global for other reasons
    LINK_LOCAL = "link_local"
    LOOPBACK = "loopback"
    METADATA = "metadata"  # of cloud providers
    UNUSABLE = "unusable"  # unspecified, multicast, broadcast, reserved


def kind_of(address: Address) -> AddressKind:
    raise NotImplementedError


def may_answer(address: Address, *, registry: bool) -> bool:
    """Whether a listed name may stand for it. A registry of the machine's own configuration may be private."""
    raise NotImplementedError


def may_list(address: Address) -> bool:
    """Whether a list may name it: private ones yes, loopback, link-local and metadata never."""
    raise NotImplementedError
