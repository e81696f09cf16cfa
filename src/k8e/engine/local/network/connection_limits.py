"""How many entries of the machine's table of connections each wire may use. Pure, but for reading the table's size.

The kernel has one table for the whole machine (`nf_conntrack_max`), and drops all new connections when it is full. So
sandboxes have half of it together, and a wire's share follows from its number: the first sixteen wires share one part
of that half, the next 64 another one of the same size, and so on, four times as many wires with a quarter of the share
each. No share depends on which other wires are in use, so none is ever taken back, and all of them together never add
up to more. There are no wires that would have less than `LEAST`.

Connections that are closed are not counted, though the kernel remembers them for two minutes: it drops those by itself
before the table is full.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k8e.engine.local.network.addresses import BLOCK
from k8e.engine.local.network.netlink.messages import CONNTRACK, NetfilterSocket, netfilter_message

LEAST: Final = 32  # entries: three quarters are for connections, the rest for queries redirected to the resolver
MOST: Final = 8192
_GROWTH: Final = 4
_USUAL: Final = 1 << 18  # of a kernel that says nothing, or has no limit
_SIZE: Final = Path("/proc/sys/net/netfilter/nf_conntrack_max")
_STATISTICS: Final = 4  # the shortest request there is


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    size: int = _USUAL  # of the machine's table

    @property
    def tiers(self) -> tuple[tuple[int, int], ...]:
        """How many wires, and the entries of each."""
        half, count = self.size // 2, 1
        while half // (count + 1) // (BLOCK * _GROWTH**count) >= LEAST:
            count += 1
        sizes = [BLOCK * _GROWTH**number for number in range(count)]
        return tuple((wires, min(MOST, max(2, half // count // wires))) for wires in sizes)

    @property
    def wires(self) -> int:
        """The most that there can be."""
        return sum(wires for wires, _ in self.tiers)

    def of(self, index: int) -> int:
        """Of a wire, by its number."""
        for wires, share in self.tiers:
            if index < wires:
                return share
            index -= wires
        return LEAST  # one from a time when the table was larger

    def connections(self, index: int) -> int:
        return self.of(index) - self.queries(index)

    def queries(self, index: int) -> int:
        """To other resolvers, and over TCP: other queries take no entry."""
        return self.of(index) // 4


USUAL: Final = ConnectionLimits()


def read_connection_limits() -> ConnectionLimits:
    """Of this machine."""
    with contextlib.suppress(OSError):
        if not _SIZE.exists():  # not needed yet since the machine started: asking makes the kernel load it
            with NetfilterSocket() as kernel:
                kernel.dump(netfilter_message(CONNTRACK, _STATISTICS, socket.AF_UNSPEC, b""))
        return ConnectionLimits(int(_SIZE.read_text()) or _USUAL)
    return USUAL
