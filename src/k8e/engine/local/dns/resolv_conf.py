"""resolv.conf: the machine's, which names the servers to ask, and the sandbox's, which names our resolver.

Read as glibc reads it (the first three servers, the last of `search` and `domain`), because a name should have the same
addresses in a sandbox as on the machine. The machine's /etc/hosts is not used: its entries are for the machine alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from k8e.policy import Address

PORT = 53
# Of our resolvers, for datagrams to other servers that are redirected here: their answers are translated back.
REDIRECTED_PORT = 54
MAX_SERVERS = 3
MAX_SEARCH = 6
MAX_FILE = 64 << 10


@dataclass(frozen=True, slots=True)
class Server:
    address: Address  # an IPv6 address may carry its zone
    port: int = PORT

    @classmethod
    def parse(cls, text: str) -> Server:
        """`192.0.2.1`, `192.0.2.1:5353`, `2001:db8::1`, `[fe80::1%eth0]:53`. ValueError for anything else."""
        host, port = text, str(PORT)
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket or (rest and not rest.startswith(":")):
                raise ValueError(f"{text!r} is no address of a name server")
            port = rest[1:] or port
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{text!r} has no valid port")
        return cls(ip_address(host), int(port))

    def __str__(self) -> str:
        host = f"[{self.address}]" if isinstance(self.address, IPv6Address) else str(self.address)
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Configuration:
    servers: tuple[Server, ...] = (Server(ip_address("127.0.0.1")),)
    search: tuple[str, ...] = ()  # lower case, without dots at the ends
    ndots: int = 1
    timeout: float = 5.0
    attempts: int = 2
    rotate: bool = False
    tcp: bool = False  # use-vc

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Lines that make no sense are passed over, as every resolver does."""
        servers: list[Server] = []
        search: tuple[str, ...] = ()
        options: dict[str, str] = {}
        for line in text.splitlines():
            if line[:1].isspace():
                continue
            keyword, *values = line.split()[:64] or [""]
            if keyword == "nameserver" and values:
                try:
                    servers.append(Server(ip_address(values[0])))
                except ValueError:
                    continue
            elif keyword in ("search", "domain"):
                kept = values if keyword == "search" else values[:1]
                search = tuple(suffix.strip(".").lower() for suffix in kept if suffix.strip("."))
            elif keyword == "options":
                options.update((name, value) for name, _, value in (option.partition(":") for option in values))
        return cls(
            servers=tuple(servers[:MAX_SERVERS]) or cls().servers,
            search=search[:MAX_SEARCH],
            ndots=_number(options.get("ndots"), 1, 0, 15),
            timeout=_number(options.get("timeout"), 5, 1, 30),
            attempts=_number(options.get("attempts"), 2, 1, 5),
            rotate="rotate" in options,
            tcp="use-vc" in options,
        )

    def candidates(self, name: str) -> Iterator[str]:
        """The names to query in order to find one. A short one (a mirror called `mirror`) is tried with the machine's
        suffixes, as on the machine. One with a dot is queried as it is first, whatever `ndots` says: no suffix can then
        shadow a name of the internet, and none costs it a query."""
        dots = name.count(".")
        if dots:
            yield name
        if dots < self.ndots:
            yield from (f"{name}.{suffix}" for suffix in self.search)
        if not dots:
            yield name


def _number(text: str | None, default: int, low: int, high: int) -> int:
    if text is None or not (text.isascii() and text.isdigit()):
        return default
    return min(max(int(text), low), high)


class ResolvConf:
    """The machine's file, read again when it has changed. That costs a stat for every query."""

    def __init__(self, path: Path = Path("/etc/resolv.conf")) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._configuration = Configuration()

    def current(self) -> Configuration:
        try:
            status = os.stat(self._path)
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                with open(self._path, encoding="utf-8", errors="replace") as file:
                    self._configuration = Configuration.parse(file.read(MAX_FILE))
                self._seen = seen
        except OSError:
            # Gone or being replaced: as glibc, ask the machine itself, which answers or refuses at once.
            self._seen = None
            self._configuration = Configuration()
        return self._configuration


def resolv_conf_for_sandbox(addresses: Sequence[Address]) -> str:
    """One server and no search list: a refusal is final at once, and no suffix makes a second query of it."""
    return f"nameserver {addresses[0]}\noptions edns0 timeout:5 attempts:2\n"
