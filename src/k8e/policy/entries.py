"""One entry of a list of hosts: parses what people write into the canonical form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from k8e.policy.addresses import Address, AddressKind, Network, is_forbidden, kind_of, plain_network
from k8e.policy.names import MAX_TEXT, InvalidEntry, canonical_name, is_local_name, is_metadata_name

DEFAULT_PORTS = (80, 443)

_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_PREFIX = re.compile(r"0|[1-9][0-9]{0,2}", re.ASCII)
_ADDRESS = re.compile(r"[0-9.]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", re.ASCII)

_KINDS = {
    AddressKind.LOOPBACK: "the machine itself",
    AddressKind.LINK_LOCAL: "link-local",
    AddressKind.METADATA: "a cloud provider's metadata service",
    AddressKind.UNUSABLE: "no address of a host (unspecified, multicast or reserved)",
}
_NEVER = "no list opens it; leave it out"


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One thing that may be reached, in its canonical form: `example.com`, `*.example.com`, `192.0.2.0/24`,
    `[2001:db8::1]:8443`. Exactly one of `name` and `network` is set, but for `*`, which has neither: every name and
    every public address, on every port."""

    name: str = ""  # lower case A-labels, no trailing dot
    wildcard: bool = False  # every subdomain of the name, not the name
    network: Network | None = None  # one address is a block of one
    port: int | None = None  # None: DEFAULT_PORTS

    @property
    def everything(self) -> bool:
        return self.wildcard and not self.name

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of the entry. For `*`: those of registries with a private address; public addresses have all."""
        return DEFAULT_PORTS if self.port is None else (self.port,)

    @property
    def order(self) -> tuple[object, ...]:
        """Names first, a wildcard after the name it is over, then blocks by number."""
        block = (0, 0, 0)
        if self.network is not None:
            block = (self.network.version, int(self.network.network_address), self.network.prefixlen)
        return (*block, self.name, self.wildcard, self.port or 0)

    def __lt__(self, other: HostEntry) -> bool:
        return self.order < other.order

    def matches_name(self, name: str) -> bool:
        if self.everything:
            return True
        if self.wildcard:
            return name.endswith("." + self.name)
        return bool(self.name) and name == self.name

    def matches_address(self, address: Address) -> bool:
        if self.everything:
            return kind_of(address) is AddressKind.PUBLIC
        return self.network is not None and address in self.network

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        if self.everything:
            return "*"
        if self.network is None:
            return f"{'*.' if self.wildcard else ''}{self.name}{port}"
        whole = self.network.prefixlen == self.network.max_prefixlen
        text = str(self.network.network_address if whole else self.network)
        return f"[{text}]{port}" if port and self.network.version == 6 else text + port


EVERYTHING = HostEntry(wildcard=True)


def parse_entry(text: str) -> HostEntry:
    """Raises InvalidEntry."""
    _check_characters(text)
    host, port = _split_port(text)
    address, slash, prefix = host.partition("/")
    if slash or _is_address(address):
        return HostEntry(network=_parse_network(text, address, prefix if slash else None), port=port)
    return _parse_name(text, host, port)


def _check_characters(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise InvalidEntry(text[:80] + "...", f"it has {len(text)} characters", "write a host name or an address")
    if not text:
        raise InvalidEntry(text, "it is empty", "leave it out, or write a host name such as example.com")
    if not text.isprintable() or " " in text:
        raise InvalidEntry(text, "it has a space or a control character", "write one host, without spaces around it")
    if "," in text:
        raise InvalidEntry(text, "it has a comma", "write one host per entry")
    if "://" in text:
        raise InvalidEntry(text, "it is a URL", "write only its host, with a port if it is neither 80 nor 443")
    if "@" in text:
        raise InvalidEntry(text, "it has user information ('@')", "write only the host")
    if "%" in text:
        raise InvalidEntry(
            text, "it has a zone or an escape ('%')", "write a plain name or address; zones mean nothing here"
        )
    if "\\" in text or "?" in text or "#" in text:
        raise InvalidEntry(text, "it has a part of a URL", "write only the host")


def _split_port(text: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[IPv6]`, `[IPv6]:port`, IPv6 without brackets and thus without a port."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host:
            raise InvalidEntry(text, "brackets stand around an IPv6 address", "write [2001:db8::1]:8443")
        if rest and not rest.startswith(":"):
            raise InvalidEntry(
                text, f"{rest!r} follows the bracket", "write a block inside the brackets: [2001:db8::/32]:8443"
            )
        return host, _parse_port(text, rest[1:]) if rest else None
    if text.count(":") != 1:
        return text, None
    host, _, port = text.partition(":")
    if not host:
        raise InvalidEntry(text, "there is no host before the port", "write example.com:8443")
    return host, _parse_port(text, port)


def _parse_port(text: str, port: str) -> int:
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise InvalidEntry(text, f"{port!r} is no port", "a port is a number from 1 to 65535, without leading zeros")
    return int(port)


def _is_address(host: str) -> bool:
    """Whether it is one in its usual spelling; what only looks like one is refused as a name."""
    if not _ADDRESS.fullmatch(host):
        return False
    try:
        ip_address(host)
    except ValueError:
        return ":" in host
    return True


def _parse_network(text: str, address: str, prefix: str | None) -> Network:
    try:
        first: IPv4Address | IPv6Address = ip_address(address)
    except ValueError:
        if prefix is not None and not _ADDRESS.fullmatch(address):
            raise InvalidEntry(
                text, "it has a path ('/')", "write only the host; access is per host, not per path"
            ) from None
        hint = "write addresses as four decimal numbers without leading zeros (192.0.2.1), or as IPv6 (2001:db8::1)"
        raise InvalidEntry(text, f"{address!r} is no address", hint) from None
    if prefix is None:
        prefix = str(first.max_prefixlen)
    if not _PREFIX.fullmatch(prefix) or int(prefix) > first.max_prefixlen:
        hint = f"write the number of leading bits, 0 to {first.max_prefixlen}: 192.0.2.0/24"
        raise InvalidEntry(text, f"{prefix!r} is no length of a block", hint)
    network = ip_network((first, int(prefix)), strict=False)
    if network.network_address != first:
        raise InvalidEntry(text, "the address has bits beyond the block's length", f"write {network} or {first}")
    network = plain_network(network)
    if is_forbidden(network):
        raise InvalidEntry(text, f"it is {_KINDS[kind_of(network.network_address)]}", _NEVER)
    return network


def _parse_name(text: str, host: str, port: int | None) -> HostEntry:
    wildcard = host.startswith("*.")
    if text == "*":
        return EVERYTHING
    if host in {"*", "*."}:
        raise InvalidEntry(text, "it is every host", "write * alone, for every host on every port, or name the hosts")
    try:
        name = canonical_name(host[2:] if wildcard else host)
    except InvalidEntry as error:
        raise InvalidEntry(text, error.cause, error.hint) from None
    if any(label.startswith("-") or label.endswith("-") for label in name.split(".")):
        raise InvalidEntry(text, "a label begins or ends with '-'", "write the name as it is registered")
    if is_metadata_name(name):
        raise InvalidEntry(text, "it is a cloud provider's metadata service", _NEVER)
    if is_local_name(name):
        raise InvalidEntry(text, "it is the machine itself", _NEVER)
    return HostEntry(name=name, wildcard=wildcard, port=port)
