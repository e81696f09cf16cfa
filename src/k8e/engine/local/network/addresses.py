"""The addresses and names of a sandbox's wire. Pure.

Every wire has a number that is unique on the machine, and all else follows from it: the interface's name, a pair of
IPv4 addresses, a pair of IPv6 addresses, the hardware addresses and the marks of its connections. So each of these says
after a crash which wire it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network

from k8e.engine import EngineError

INTERFACE_PREFIX = "k8e-"
INNER_INTERFACE = "k8e0"  # a name that no machine uses: an `eth0` is never a sandbox's
BLOCK = 16  # wires are leased from the machine, and put into the rules, this many at a time
MAX_WIRES = 1 << 15  # as many as marks can tell apart
_MARKS = 1 << 16  # of one wire
_POOL4 = IPv4Network("10.203.0.0/16")
_POOL6 = IPv6Network("fd6b:3865:6e65::/48")

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class Pool:
    """Where addresses are taken from. Of both networks only as much is used as both have."""

    v4: IPv4Network = _POOL4
    v6: IPv6Network | None = _POOL6  # None: sandboxes have no IPv6

    def __post_init__(self) -> None:
        if self.v4.num_addresses < 2 * BLOCK or (self.v6 is not None and self.v6.num_addresses < 2 * BLOCK):
            raise EngineError("network pool", f"{self} is too small", f"give at least {2 * BLOCK} addresses")

    @property
    def wires(self) -> int:
        return min(MAX_WIRES, self.v4.num_addresses // 2, self.v6.num_addresses // 2 if self.v6 else MAX_WIRES)

    @property
    def blocks(self) -> int:
        return self.wires // BLOCK

    def wire(self, index: int) -> Wire:
        if not 0 <= index < self.wires:
            raise ValueError(f"there is no wire {index}")
        return Wire(index, self.v4[2 * index], self.v6[2 * index] if self.v6 else None)

    def block(self, number: int) -> tuple[Wire, ...]:
        return tuple(self.wire(index) for index in range(number * BLOCK, (number + 1) * BLOCK))

    def block_networks(self, number: int) -> tuple[Network, ...]:
        """The networks that the addresses of a block of wires cover."""
        size = (2 * BLOCK).bit_length() - 1
        first = self.wire(number * BLOCK)
        v6 = () if first.host6 is None else (IPv6Network((int(first.host6), 128 - size)),)
        return (IPv4Network((int(first.host4), 32 - size)), *v6)


@dataclass(frozen=True, slots=True)
class Wire:
    """A pair of interfaces: one on the machine, one that is all a sandbox sees of the network."""

    index: int
    host4: IPv4Address
    host6: IPv6Address | None

    @property
    def interface(self) -> str:
        return f"{INTERFACE_PREFIX}{self.index}"

    @property
    def inner4(self) -> IPv4Address:
        return self.host4 + 1

    @property
    def inner6(self) -> IPv6Address | None:
        return None if self.host6 is None else self.host6 + 1

    @property
    def host_addresses(self) -> tuple[IPv4Address | IPv6Address, ...]:
        return (self.host4,) if self.host6 is None else (self.host4, self.host6)

    @property
    def inner_addresses(self) -> tuple[IPv4Address | IPv6Address, ...]:
        return (self.inner4,) if self.inner6 is None else (self.inner4, self.inner6)

    @property
    def pairs(self) -> tuple[tuple[IPv4Interface | IPv6Interface, IPv4Interface | IPv6Interface], ...]:
        """The machine's address and the sandbox's, with the prefix that holds just these two."""
        found: list[tuple[IPv4Interface | IPv6Interface, IPv4Interface | IPv6Interface]] = [
            (IPv4Interface((self.host4, 31)), IPv4Interface((self.inner4, 31)))
        ]
        if self.host6 is not None and self.inner6 is not None:
            found.append((IPv6Interface((self.host6, 127)), IPv6Interface((self.inner6, 127))))
        return tuple(found)

    @property
    def host_mac(self) -> str:
        return f"02:6b:38:00:{self.index >> 8:02x}:{self.index & 255:02x}"

    @property
    def inner_mac(self) -> str:
        return f"02:6b:38:01:{self.index >> 8:02x}:{self.index & 255:02x}"

    def mark(self, number: int) -> int:
        """Of the connections that one reason of the sandbox's list let out. Never 0, which means: none of ours."""
        if not 0 < number < _MARKS:
            raise ValueError(f"there is no mark {number}")
        return (self.index + 1) << 16 | number

    @property
    def mark_range(self) -> tuple[int, int]:
        """Value and mask that all of its marks have."""
        return (self.index + 1) << 16, 0xFFFF0000


def overlap(wanted: Iterable[Network], taken: Iterable[Network]) -> bool:
    others = list(taken)
    return any(type(one) is type(other) and one.overlaps(other) for one in wanted for other in others)
