"""Lists of hosts: parsed, normalised, matched, merged, compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network

from k8e.policy.addresses import Address

DEFAULT_PORTS = (80, 443)
MAX_ENTRIES = 512


class InvalidEntry(ValueError):
    """`text` is no entry: `cause` says why, `hint` what to write instead."""

    def __init__(self, text: str, cause: str, hint: str = "") -> None:
        self.text = text
        self.cause = cause
        self.hint = hint
        super().__init__(f"{text!r}: {cause}")


@dataclass(frozen=True, slots=True, order=True)
class HostEntry:
    """One thing that may be reached, in its canonical form: `example.com`, `*.example.com`, `192.0.2.0/24`,
    `[2001:db8::1]:8443`. Exactly one of `name` and `network` is set."""

    name: str = ""  # lower case A-labels, no trailing dot
    wildcard: bool = False  # every subdomain of the name, not the name
    network: IPv4Network | IPv6Network | None = None  # one address is a block of one
    port: int | None = None  # None: DEFAULT_PORTS

    @property
    def ports(self) -> tuple[int, ...]:
        return DEFAULT_PORTS if self.port is None else (self.port,)

    def __str__(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class HostList:
    """Sorted, without duplicates: equal lists are equal."""

    entries: tuple[HostEntry, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> HostList:
        """Raises InvalidEntry for the first text that is none."""
        raise NotImplementedError

    @property
    def texts(self) -> tuple[str, ...]:
        """The canonical forms; `parse` gives back the same list."""
        return tuple(str(entry) for entry in self.entries)

    def entries_for_name(self, name: str) -> tuple[HostEntry, ...]:
        """The entries that name is on; the name is in canonical form."""
        raise NotImplementedError

    def entries_for_address(self, address: Address) -> tuple[HostEntry, ...]:
        raise NotImplementedError

    def plus(self, other: HostList) -> HostList:
        raise NotImplementedError

    def minus(self, other: HostList) -> HostList:
        raise NotImplementedError


NOTHING = HostList()


def canonical_name(text: str) -> str:
    """The one form of a host name (IDNA, lower case, no trailing dot). Raises InvalidEntry."""
    raise NotImplementedError


def excess(child: HostList, parent: HostList) -> tuple[HostEntry, ...]:
    """The entries of the child that reach further than the parent; empty: a subset."""
    raise NotImplementedError
