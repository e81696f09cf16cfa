"""Asks the machine's own name servers. Believes an answer to the query, from the server that was asked, and no more."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv6Address

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype

from k8e.engine.local.dns.answers import BadAnswer, Finding, read_answer
from k8e.engine.local.dns.queries import HEADER, LARGEST_REPLY
from k8e.engine.local.dns.resolv_conf import Configuration, ResolvConf, Server

# Before the clients give up (twice five seconds), so that they are told that it failed.
DEADLINE = 9.0
MAX_AT_ONCE = 256  # sockets
MAX_DATAGRAM = 4096
MAX_STREAM = 16 << 10  # a thousand records; what is longer is no answer for a sandbox
MAX_STRAYS = 32  # packets that do not belong to the query, before the server is given up
AVOIDED = 30.0  # seconds for which a server that failed is asked last

log = logging.getLogger(__name__)
MAX_FINDINGS = 4096

Key = tuple[str, int]


class UpstreamFailed(Exception):
    """No server gave an answer. The text says why not, of the last one."""


class Upstream:
    """`servers` instead of the machine's: no search list, and /etc/resolv.conf does not matter."""

    def __init__(
        self, servers: Sequence[Server] = (), *, resolv_conf: ResolvConf | None = None, deadline: float = DEADLINE
    ) -> None:
        self._fixed = Configuration(servers=tuple(servers)) if servers else None
        self._resolv_conf = resolv_conf or ResolvConf()
        self._deadline = deadline
        self._known = Configuration()
        self._cache = Cache()
        self._asked: dict[tuple[str, int, Configuration], asyncio.Task[Finding]] = {}
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._avoided: dict[Server, float] = {}
        self._turn = 0

    @property
    def configuration(self) -> Configuration:
        current = self._fixed or self._resolv_conf.current()
        if current != self._known:
            # Another network, perhaps one with other answers to the same queries.
            self._known = current
            self._cache.clear()
            self._avoided.clear()
        return current

    def remembers(self, name: str, kind: int) -> bool:
        """Whether the answer costs no query."""
        return self.configuration == self._known and self._cache.has((name, kind), asyncio.get_running_loop().time())

    async def ask(self, name: str, kind: int) -> Finding:
        """Raises UpstreamFailed. Equal queries at one time are one, which goes on when a caller is cancelled."""
        loop = asyncio.get_running_loop()
        configuration = self.configuration
        if (finding := self._cache.get((name, kind), loop.time())) is not None:
            return finding
        key = (name, kind, configuration)
        if (task := self._asked.get(key)) is None:
            task = self._asked[key] = loop.create_task(self._find(name, kind, configuration))
            task.add_done_callback(lambda done: self._finished(key, done))
        return await asyncio.shield(task)

    def _finished(self, key: tuple[str, int, Configuration], task: asyncio.Task[Finding]) -> None:
        self._asked.pop(key, None)
        if not task.cancelled():
            task.exception()  # all callers have it, or have left

    async def close(self) -> None:
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _find(self, name: str, kind: int, configuration: Configuration) -> Finding:
        try:
            async with asyncio.timeout(self._deadline), self._slots:
                finding = Finding(False)
                for candidate in configuration.candidates(name):
                    finding = await self._ask_servers(candidate, kind, configuration)
                    if finding.exists:
                        break
        except TimeoutError:
            raise UpstreamFailed(f"no name server answered within {self._deadline:g} s") from None
        if configuration == self._known:
            self._cache.put((name, kind), finding, asyncio.get_running_loop().time())
        return finding

    async def _ask_servers(self, name: str, kind: int, configuration: Configuration) -> Finding:
        try:
            asked = dns.name.from_text(name)
        except dns.exception.DNSException:
            return Finding(False)  # a suffix has made it too long
        cause = "there is no name server"
        loop = asyncio.get_running_loop()
        for _ in range(configuration.attempts):
            for server in self._order(configuration, loop.time()):
                try:
                    async with asyncio.timeout(configuration.timeout):
                        message = await _ask_server(server, asked, kind, tcp=configuration.tcp)
                    finding = read_answer(message, asked, kind)
                except BadAnswer as error:
                    # It may know better about other names, and the order of servers means something: not avoided.
                    cause = f"name server {server}: {error}"
                except OSError as error:
                    silent = isinstance(error, TimeoutError)
                    cause = f"name server {server}: {'no answer' if silent else error.strerror}"
                    self._avoided[server] = loop.time() + AVOIDED
                else:
                    self._avoided.pop(server, None)
                    return finding
        raise UpstreamFailed(cause)

    def _order(self, configuration: Configuration, now: float) -> list[Server]:
        servers = list(configuration.servers)
        if configuration.rotate:
            self._turn = (self._turn + 1) % len(servers)
            servers = servers[self._turn :] + servers[: self._turn]
        return sorted(servers, key=lambda server: self._avoided.get(server, 0.0) > now)


async def _ask_server(server: Server, name: dns.name.Name, kind: int, *, tcp: bool) -> dns.message.Message:
    """With EDNS, and once more without where a server is too old for it."""
    rdtype = dns.rdatatype.RdataType.make(kind)
    for edns in (0, None):
        query = dns.message.make_query(name, rdtype, use_edns=edns, payload=LARGEST_REPLY if edns == 0 else None)
        message = None if tcp else await _ask_over_udp(server, query)
        if message is None:
            message = await _ask_over_tcp(server, query)
        if message.rcode() not in (dns.rcode.FORMERR, dns.rcode.NOTIMP, dns.rcode.BADVERS):
            return message
    raise BadAnswer("the server does not understand the question")


def _open_socket(
    server: Server, kind: socket.SocketKind
) -> tuple[socket.socket, tuple[str, int] | tuple[str, int, int, int]]:
    if not isinstance(server.address, IPv6Address):
        return socket.socket(socket.AF_INET, kind | socket.SOCK_NONBLOCK), (str(server.address), server.port)
    zone = server.address.scope_id
    index = 0 if zone is None else int(zone) if zone.isdigit() else socket.if_nametoindex(zone)
    plain = str(server.address).partition("%")[0]
    return socket.socket(socket.AF_INET6, kind | socket.SOCK_NONBLOCK), (plain, server.port, 0, index)


async def _ask_over_udp(server: Server, query: dns.message.Message) -> dns.message.Message | None:
    """None: the answer is longer than a datagram. The socket lives for one query, so its port is one in tens of
    thousands, and it is connected, so the kernel drops packets from other addresses."""
    loop = asyncio.get_running_loop()
    sock, address = _open_socket(server, socket.SOCK_DGRAM)
    with sock:
        sock.connect(address)
        await loop.sock_sendall(sock, query.to_wire())
        for _ in range(MAX_STRAYS):
            packet = await loop.sock_recv(sock, MAX_DATAGRAM)
            if len(packet) < HEADER.size:
                continue
            number, flags, *_ = HEADER.unpack_from(packet)
            if number != query.id or not flags & dns.flags.QR:
                continue
            if flags & dns.flags.TC:
                return None
            message = _read_message(packet)
            if query.is_response(message):
                return message
    raise BadAnswer("the server answers something else")


async def _ask_over_tcp(server: Server, query: dns.message.Message) -> dns.message.Message:
    loop = asyncio.get_running_loop()
    sock, address = _open_socket(server, socket.SOCK_STREAM)
    with sock:
        await loop.sock_connect(sock, address)
        await loop.sock_sendall(sock, query.to_wire(prepend_length=True))
        (length,) = struct.unpack("!H", await _read_exactly(sock, 2))
        if length > MAX_STREAM:
            raise BadAnswer(f"an answer of {length} bytes")
        message = _read_message(await _read_exactly(sock, length))
    if not query.is_response(message):
        raise BadAnswer("the server answers something else")
    return message


async def _read_exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        chunk = await loop.sock_recv(sock, count - len(data))
        if not chunk:
            raise BadAnswer("the server hung up")
        data += chunk
    return data


def _read_message(packet: bytes) -> dns.message.Message:
    try:
        return dns.message.from_wire(packet, ignore_trailing=True)
    except (dns.exception.DNSException, ValueError, struct.error) as error:
        raise BadAnswer(f"an unreadable answer ({type(error).__name__})") from error


class Cache:
    """Answers, for as long as their TTL says. Shared by all sandboxes; which of them a sandbox may see is decided when
    it asks."""

    def __init__(self, size: int = MAX_FINDINGS) -> None:
        self._size = size
        self._findings: OrderedDict[Key, tuple[Finding, float]] = OrderedDict()

    def get(self, key: Key, now: float) -> Finding | None:
        """With the time that is left, and in a new order each time, as a server that spreads its load would."""
        if key not in self._findings:
            return None
        finding, since = self._findings[key]
        if now - since >= finding.ttl:
            del self._findings[key]
            return None
        self._findings.move_to_end(key)
        mixed = tuple(random.sample(finding.records, len(finding.records)))
        return replace(finding.aged(now - since), records=mixed)

    def has(self, key: Key, now: float) -> bool:
        finding, since = self._findings.get(key, (None, 0.0))
        return finding is not None and now - since < finding.ttl

    def put(self, key: Key, finding: Finding, now: float) -> None:
        if finding.ttl <= 0:
            return
        self._findings[key] = (finding, now)
        self._findings.move_to_end(key)
        while len(self._findings) > self._size:
            self._findings.popitem(last=False)

    def clear(self) -> None:
        self._findings.clear()

    def __len__(self) -> int:
        return len(self._findings)
