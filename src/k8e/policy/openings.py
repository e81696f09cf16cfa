"""Finds the entry of a list of hosts that would have let refused network access through."""

from __future__ import annotations

from ipaddress import ip_address

from k8e.policy.addresses import Address, AddressKind, kind_of, may_list
from k8e.policy.entries import DEFAULT_PORTS
from k8e.policy.hosts import HostList
from k8e.policy.names import InvalidEntry

# The reasons of docs/egress.md that are about the list; no list changes anything about the others.
_ABOUT_LIST = frozenset({"name_not_listed", "address_not_listed", "port_not_listed", "address_not_public"})


def find_opening(reason: str, host: str, address: str = "", port: int = 0) -> str:
    """Returns the entry in its canonical form; empty where no entry can open it. Host, address and port are those of
    the refusal, as far as they are known."""
    if reason not in _ABOUT_LIST:
        return ""
    found = _read(address)
    if found is not None and not may_list(found):
        return ""
    if found is None and reason == "address_not_public":
        return ""  # its address would open it, and is not known
    # A name does not open a private address, whatever it resolves to; the address itself does.
    if address and (not host or found is None or kind_of(found) is not AddressKind.PUBLIC):
        host = f"[{address}]" if ":" in address else address
    ending = f":{port}" if port and port not in DEFAULT_PORTS else ""
    try:
        (text,) = HostList.parse([host + ending]).texts
    except InvalidEntry:
        return ""
    return text


def _read(address: str) -> Address | None:
    try:
        return ip_address(address)
    except ValueError:
        return None
