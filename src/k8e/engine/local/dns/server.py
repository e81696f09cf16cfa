"""The resolver of every sandbox: listens for them, holds their conversations, and keeps one from disturbing another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import dns.message
import dns.rcode

from k8e.engine.local.dns.allowance import UPSTREAM, UPSTREAM_AT_ONCE, Allowance, Crowd, Pace
from k8e.engine.local.dns.answers import build_reply, encode_reply
from k8e.engine.local.dns.dialogue import Admit as AdmitStep
from k8e.engine.local.dns.dialogue import AskUpstream, Failure, Result, Step, Tell, answer_query
from k8e.engine.local.dns.listeners import Listener, open_sockets
from k8e.engine.local.dns.queries import Mistake, Query, read_query
from k8e.engine.local.dns.resolv_conf import LED_PORT, PORT
from k8e.engine.local.dns.upstream import Upstream, UpstreamFailed
from k8e.engine.local.dns.verdicts import Rules
from k8e.policy import Address, HostEntry, HostList

MAX_MESSAGE = 65535
REMEMBERED = 10.0  # seconds within which a client goes through its search list
MAX_REMEMBERED = 64

# Awaited before an answer leaves, so that the kernel knows an address first. Any exception means that it does not.
Admit = Callable[[str, HostEntry, str, Sequence[Address], float], Awaitable[None]]
Refused = Callable[[str, str, str, str], None]  # sandbox, name, reason, the address to which it leads or nothing

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Desk:
    """Where one sandbox asks."""

    sandbox: str
    hosts: HostList
    hostname: str
    allowance: Allowance
    pace: Pace
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
        admit: Admit,
        refused: Refused,
        mirrors: Callable[[], frozenset[str]],
        *,
        port: int = PORT,
        led_port: int | None = LED_PORT,
    ) -> None:
        self._upstream = upstream
        self._admit = admit
        self._refused = refused
        self._mirrors = mirrors
        self._port = port
        self._led_port = led_port
        self._crowd = Crowd()
        self._desks: dict[str, _Desk] = {}

    async def serve(
        self,
        sandbox: str,
        addresses: Sequence[Address],
        hosts: HostList,
        *,
        hostname: str = "sandbox",
        device: str = "",
    ) -> None:
        """Listens on these addresses, for what comes in on that device only. OSError when one cannot be had, and then
        on none."""
        if sandbox in self._desks:
            raise ValueError(f"{sandbox} is served already")
        opened = []
        try:
            for address in addresses:
                opened.append(open_sockets(address, self._port, device, self._led_port))
        except OSError:
            for pair in opened:
                for sock in pair:
                    sock.close()
            raise
        now = asyncio.get_running_loop().time()
        pace = Pace(UPSTREAM, UPSTREAM_AT_ONCE, self._crowd)
        desk = self._desks[sandbox] = _Desk(sandbox, hosts, hostname.lower(), Allowance(self._crowd, now), pace)

        async def answer(wire: bytes, stream: bool) -> bytes:
            return await self._answer(desk, wire, stream)

        desk.listeners = [Listener(pair, desk.allowance, answer) for pair in opened]

    def set_hosts(self, sandbox: str, hosts: HostList) -> None:
        """From the next question on, and for those under way from their next step on. Fine for one that is not
        served."""
        if desk := self._desks.get(sandbox):
            desk.hosts = hosts

    async def leave(self, sandbox: str) -> None:
        """Fine for one that is not served."""
        if desk := self._desks.pop(sandbox, None):
            for listener in desk.listeners:
                listener.stop()
            for listener in desk.listeners:
                await listener.finish()

    async def close(self) -> None:
        for sandbox in list(self._desks):
            await self.leave(sandbox)
        await self._upstream.close()

    async def _answer(self, desk: _Desk, wire: bytes, stream: bool) -> bytes:
        query = read_query(wire)
        if isinstance(query, Mistake):
            return query.reply
        try:
            reply = await self._converse(desk, query)
            return encode_reply(reply, MAX_MESSAGE if stream else query.room)
        except Exception:  # one question, however strange, must not be the last one
            log.exception("names: a question of %s failed: type %d of %s", desk.sandbox, query.kind, query.shown)
            return encode_reply(build_reply(query, dns.rcode.SERVFAIL), query.room)

    async def _converse(self, desk: _Desk, query: Query) -> dns.message.Message:
        conversation = answer_query(query, lambda: self._rules(desk))
        result: Result = None
        while True:
            try:
                step = conversation.send(result)
            except StopIteration as end:
                reply: dns.message.Message = end.value
                return reply
            result = await self._take(desk, step)

    async def _take(self, desk: _Desk, step: Step) -> Result:
        match step:
            case AskUpstream(name, kind):
                if not self._upstream.remembers(name, kind):
                    await desk.pace.take()
                try:
                    return await self._upstream.ask(name, kind)
                except UpstreamFailed as error:
                    return Failure(str(error))
            case AdmitStep(entry, name, addresses, seconds):
                try:
                    await self._admit(desk.sandbox, entry, name, addresses, seconds)
                except Exception:  # whatever it was, the kernel may not know: fail closed
                    if not desk.complained:  # once: a sandbox may be able to make it happen as often as it likes
                        log.exception("names: %s: the addresses of %s could not be admitted", desk.sandbox, name)
                    desk.complained = True
                    return Failure("the addresses could not be admitted")
            case Tell(name, reason, address):
                desk.remember(name, asyncio.get_running_loop().time())
                self._refused(desk.sandbox, name, reason, address)
        return None

    def _rules(self, desk: _Desk) -> Rules:
        lately = desk.refused_lately(asyncio.get_running_loop().time())
        return Rules(desk.hosts, self._mirrors(), desk.hostname, self._upstream.configuration.search, lately)
