"""Refusals of a sandbox, until core asks for them: names are kept here, addresses by the kernel. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from k8e.engine import Refusal
from k8e.engine.local.network.addresses import Network
from k8e.engine.local.network.netlink.elements import Found, read_refused
from k8e.engine.local.network.rules import KEPT_REFUSALS, REFUSAL_SECONDS
from k8e.policy import Address, AddressKind, HostList, kind_of

# The stable words of docs/egress.md; the resolver has more, for names.
ADDRESS_NOT_LISTED: Final = "address_not_listed"
PORT_NOT_LISTED: Final = "port_not_listed"
TOO_MANY: Final = "too_many_connections"
PROTOCOL: Final = "protocol_not_allowed"
METADATA: Final = "metadata"
FORBIDDEN: Final = "address_forbidden"
MACHINE: Final = "machine"
SANDBOX: Final = "other_sandbox"
MORE: Final = "more_refusals"

_TCP = 6
_KEPT_NAMES = 256
_KNOWN_ADDRESSES = 4096


@dataclass(slots=True)
class Refusals:
    """Of one sandbox. Bounded: that there were more is said."""

    names: OrderedDict[tuple[str, str, str], float] = field(default_factory=OrderedDict)  # name, address, reason: when
    known: OrderedDict[Address, str] = field(default_factory=OrderedDict)  # for which name an address was answered
    dropped: bool = False

    def refuse_name(self, name: str, reason: str, address: str, now: float) -> None:
        """`address`: the name's, if it was refused for that."""
        key = (name, address, reason)
        if key not in self.names and len(self.names) >= _KEPT_NAMES:
            self.dropped = True
            return
        self.names[key] = now

    def learn(self, name: str, addresses: Iterable[Address]) -> None:
        for address in addresses:
            self.known.pop(address, None)
            self.known[address] = name
        while len(self.known) > _KNOWN_ADDRESSES:
            self.known.popitem(last=False)

    def take_names(self) -> list[Refusal]:
        taken = [Refusal(name, address, 0, reason, at) for (name, address, reason), at in self.names.items()]
        self.names.clear()
        if self.dropped:
            taken.append(Refusal("", "", 0, MORE, max(each.at for each in taken)))
            self.dropped = False
        return taken


@dataclass(frozen=True, slots=True)
class RefusalContext:
    """Everything that explains a refusal."""

    hosts: HostList
    known: Callable[[Address], str]
    is_machine: Callable[[Address], bool]
    pool: tuple[Network, ...]
    is_open: Callable[[Address, int], bool] = lambda address, port: False  # by a name, at this moment


def explain(address: Address, protocol: int, port: int, context: RefusalContext) -> str:
    """Why it was refused, in the order in which the rules decide."""
    kind = kind_of(address)
    if kind is AddressKind.METADATA:
        return METADATA
    if context.is_machine(address):
        return MACHINE
    if any(address in network for network in context.pool):
        return SANDBOX
    if kind not in (AddressKind.PUBLIC, AddressKind.PRIVATE):
        return FORBIDDEN
    if protocol != _TCP:
        return PROTOCOL
    listed = context.hosts.entries_for_address(address)
    if context.is_open(address, port) or any(entry.everything or port in entry.ports for entry in listed):
        return TOO_MANY  # nothing else is refused of what is allowed
    name = context.known(address)
    named = context.hosts.entries_for_name(name) if name else ()
    return PORT_NOT_LISTED if listed or named else ADDRESS_NOT_LISTED


def read_refusals(found: Iterable[Found], context: RefusalContext, now: float) -> list[Refusal]:
    """Those that the kernel noted, the oldest first."""
    told = []
    for each in found:
        address, protocol, port = read_refused(each.key)
        at = now - REFUSAL_SECONDS + each.remaining / 1000
        reason = explain(address, protocol, port, context)
        told.append(Refusal(context.known(address), str(address), port, reason, at))
    told.sort(key=lambda refusal: refusal.at)
    if len(told) >= KEPT_REFUSALS:
        told.append(Refusal("", "", 0, MORE, told[-1].at))
    return told
