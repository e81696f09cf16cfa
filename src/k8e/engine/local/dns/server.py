"""The resolver of all sandboxes: listens for each, resolves its queries, and keeps one from disturbing another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import dns.message
import dns.rcode

from k8e.engine.local.dns.answers import build_reply, encode_reply
from k8e.engine.local.dns.decisions import Rules
from k8e.engine.local.dns.listeners import Listener, open_sockets
from k8e.engine.local.dns.queries import Mistake, Query, read_query
from k8e.engine.local.dns.rate_limits import UPSTREAM, UPSTREAM_AT_ONCE, Allowance, Load, Throttle
from k8e.engine.local.dns.resolution import Admit, AskUpstream, Failure, Result, Step, Tell, answer_query
from k8e.engine.local.dns.resolv_conf import PORT, REDIRECTED_PORT
from k8e.engine.local.dns.upstream import Upstream, UpstreamFailed
from k8e.policy import Address, HostEntry, HostList

MAX_MESSAGE = 65535
REMEMBERED = 10.0  # seconds within which a client goes through its search list
MAX_REMEMBERED = 64

# Awaited before an answer leaves, so that the kernel knows an address first. Any exception means that it does not.
AdmitAddresses = Callable[[str, HostEntry, str, Sequence[Address], float], Awaitable[None]]
ReportRefusal = Callable[[str, str, str, str], None]  # sandbox, name, reason, the name's address or nothing

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Client:
    """One sandbox, with its list, its allowance and its sockets."""

    sandbox: str
    hosts: HostList
    hostname: str
    allowance: Allowance
    throttle: Throttle
    listeners: list[Listener] = field(default_factory=list)
    complained: bool = False
    refused: dict[str, float] = field(default_factory=dict)  # names of the last moments, the newest last

    def remember(self, name: str, now: float) -> None:
        self.refused.pop(name, None)
        self.refused[name] = now
        while len(self.refused) > MAX_REMEMBERED:
            del self.refused[next(iter(self.refused))]

    def refused_lately(self, now: float) -> frozenset[str]:
        return frozenset(name for name, at in self.refused.items() if now - at < REMEMBERED)


class NameServer:
    """One per engine."""

    def __init__(
        self,
        upstream: Upstream,
        admit: AdmitAddresses,
        refused: ReportRefusal,
        mirrors: Callable[[], frozenset[str]],
        *,
        port: int = PORT,
        redirected_port: int | None = REDIRECTED_PORT,
    ) -> None:
        self._upstream = upstream
        self._admit = admit
        self._refused = refused
        self._mirrors = mirrors
        self._port = port
        self._redirected_port = redirected_port
        self._load = Load()
        self._clients: dict[str, _Client] = {}

    async def serve(
        self,
        sandbox: str,
        addresses: Sequence[Address],
        hosts: HostList,
        *,
        hostname: str = "sandbox",
        device: str = "",
    ) -> None:
        """Listens on these addresses, for packets of that device only. OSError when one of them cannot be bound, and
        then on none."""
        if sandbox in self._clients:
            raise ValueError(f"{sandbox} is served already")
        opened = []
        try:
            for address in addresses:
                opened.append(open_sockets(address, self._port, device, self._redirected_port))
        except OSError:
            for pair in opened:
                for sock in pair:
                    sock.close()
            raise
        now = asyncio.get_running_loop().time()
        throttle = Throttle(UPSTREAM, UPSTREAM_AT_ONCE, self._load)
        client = self._clients[sandbox] = _Client(
            sandbox, hosts, hostname.lower(), Allowance(self._load, now), throttle
        )

        async def answer(wire: bytes, stream: bool) -> bytes:
            return await self._answer(client, wire, stream)

        client.listeners = [Listener(pair, client.allowance, answer) for pair in opened]

    def set_hosts(self, sandbox: str, hosts: HostList) -> None:
        """From the next query on, and for those under way from their next step on. Fine for one that is not
        served."""
        if client := self._clients.get(sandbox):
            client.hosts = hosts

    async def leave(self, sandbox: str) -> None:
        """Fine for one that is not served."""
        if client := self._clients.pop(sandbox, None):
            for listener in client.listeners:
                listener.stop()
            for listener in client.listeners:
                await listener.finish()

    async def close(self) -> None:
        for sandbox in list(self._clients):
            await self.leave(sandbox)
        await self._upstream.close()

    async def _answer(self, client: _Client, wire: bytes, stream: bool) -> bytes:
        query = read_query(wire)
        if isinstance(query, Mistake):
            return query.reply
        try:
            reply = await self._resolve(client, query)
            return encode_reply(reply, MAX_MESSAGE if stream else query.room)
        except Exception:  # no query may end the resolver
            log.exception("names: a query of %s failed: type %d of %s", client.sandbox, query.kind, query.shown)
            return encode_reply(build_reply(query, dns.rcode.SERVFAIL), query.room)

    async def _resolve(self, client: _Client, query: Query) -> dns.message.Message:
        resolution = answer_query(query, lambda: self._rules(client))
        result: Result = None
        while True:
            try:
                step = resolution.send(result)
            except StopIteration as end:
                reply: dns.message.Message = end.value
                return reply
            result = await self._take(client, step)

    async def _take(self, client: _Client, step: Step) -> Result:
        match step:
            case AskUpstream(name, kind):
                if not self._upstream.remembers(name, kind):
                    await client.throttle.take()
                try:
                    return await self._upstream.ask(name, kind)
                except UpstreamFailed as error:
                    return Failure(str(error))
            case Admit(entry, name, addresses, seconds):
                try:
                    await self._admit(client.sandbox, entry, name, addresses, seconds)
                except Exception:  # whatever it was, the kernel may not know: fail closed
                    if not client.complained:  # once: a sandbox may be able to make it happen as often as it likes
                        log.exception("names: %s: the addresses of %s could not be admitted", client.sandbox, name)
                    client.complained = True
                    return Failure("the addresses could not be admitted")
            case Tell(name, reason, address):
                client.remember(name, asyncio.get_running_loop().time())
                self._refused(client.sandbox, name, reason, address)
        return None

    def _rules(self, client: _Client) -> Rules:
        lately = client.refused_lately(asyncio.get_running_loop().time())
        return Rules(client.hosts, self._mirrors(), client.hostname, self._upstream.configuration.search, lately)
