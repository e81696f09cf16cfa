"""Lists of hosts: matched, merged, compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, collapse_addresses

from k8e.policy.addresses import Address, is_global, may_list, plain
from k8e.policy.entries import DEFAULT_PORTS, EVERYTHING, HostEntry, parse_entry
from k8e.policy.names import InvalidEntry, is_local_name, is_metadata_name

MAX_ENTRIES = 512


@dataclass(frozen=True, slots=True)
class HostList:
    """Sorted, without duplicates: equal lists are equal."""

    entries: tuple[HostEntry, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> HostList:
        """Raises InvalidEntry for the first text that is none."""
        return cls._of(parse_entry(text) for text in texts)

    @classmethod
    def _of(cls, entries: Iterable[HostEntry]) -> HostList:
        kept: set[HostEntry] = set()
        for entry in entries:
            kept.add(entry)
            if len(kept) > MAX_ENTRIES:
                raise InvalidEntry(
                    str(entry),
                    f"the list has more than {MAX_ENTRIES} entries",
                    "use a wildcard (*.example.com) or a block of addresses (192.0.2.0/24)",
                )
        return cls(tuple(sorted(kept)))

    @property
    def texts(self) -> tuple[str, ...]:
        """The canonical forms; `parse` gives back the same list."""
        return tuple(str(entry) for entry in self.entries)

    def entries_for_name(self, name: str) -> tuple[HostEntry, ...]:
        """The entries that name is on; the name is in canonical form. None for names that no list opens."""
        if is_metadata_name(name) or is_local_name(name):
            return ()
        return tuple(entry for entry in self.entries if entry.matches_name(name))

    def entries_for_address(self, address: Address) -> tuple[HostEntry, ...]:
        """The blocks it is in. None for addresses that no list opens, also when they lie within a block."""
        if not may_list(address):
            return ()
        return tuple(entry for entry in self.entries if entry.matches_address(plain(address)))

    def plus(self, other: HostList) -> HostList:
        return self._of((*self.entries, *other.entries))

    def minus(self, other: HostList) -> HostList:
        """Returns the list without exactly those entries: removing `example.com` keeps `example.com:8443`."""
        return HostList(tuple(entry for entry in self.entries if entry not in other.entries))


NOTHING = HostList()


def excess(child: HostList, parent: HostList) -> tuple[HostEntry, ...]:
    """The entries of the child that reach further than the parent; empty: a subset."""
    granted = {port: _Grant(parent, port) for port in {port for entry in child.entries for port in entry.ports}}
    return tuple(entry for entry in child.entries if not all(granted[port].covers(entry) for port in entry.ports))


def common(one: HostList, other: HostList) -> HostList:
    """Returns what both lists reach: of two entries that overlap, the narrower one; never more. (Of `*` and a block
    that is not public as a whole, which overlap without either being narrower, nothing.)"""
    one, other = _split_ports(one), _split_ports(other)
    within = set(one.minus(HostList(excess(one, other))).entries)
    within.update(other.minus(HostList(excess(other, one))).entries)
    for entry in list(within):
        twins = {replace(entry, port=port) for port in DEFAULT_PORTS}
        if twins <= within:
            within = within - twins | {replace(entry, port=None)}
    # Both lists are within bounds; what they have in common may be an entry too many, and then it reaches less.
    return HostList(tuple(sorted(within)[:MAX_ENTRIES]))


def _split_ports(hosts: HostList) -> HostList:
    """The same, with a port to each entry."""
    entries = (
        (entry,) if entry.everything else (replace(entry, port=port) for port in entry.ports) for entry in hosts.entries
    )
    return HostList(tuple(sorted({each for some in entries for each in some})))


class _Grant:
    """The part of a list for one port. Blocks that together make a larger one count as that one."""

    def __init__(self, hosts: HostList, port: int) -> None:
        self._everything = EVERYTHING in hosts.entries
        entries = [entry for entry in hosts.entries if port in entry.ports and not entry.everything]
        self._names = {entry.name for entry in entries if entry.name and not entry.wildcard}
        self._domains = {entry.name for entry in entries if entry.wildcard}
        networks = [entry.network for entry in entries]
        self._blocks_4 = list(collapse_addresses(block for block in networks if isinstance(block, IPv4Network)))
        self._blocks_6 = list(collapse_addresses(block for block in networks if isinstance(block, IPv6Network)))

    def covers(self, entry: HostEntry) -> bool:
        if self._everything and (entry.network is None or is_global(entry.network)):
            return True
        if entry.everything:
            return False
        if isinstance(entry.network, IPv4Network):
            return any(entry.network.subnet_of(block) for block in self._blocks_4)
        if isinstance(entry.network, IPv6Network):
            return any(entry.network.subnet_of(block) for block in self._blocks_6)
        if entry.name in (self._domains if entry.wildcard else self._names):
            return True
        labels = entry.name.split(".")
        return any(".".join(labels[start:]) in self._domains for start in range(1, len(labels)))
