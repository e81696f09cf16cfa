"""When the SDK is loaded: some time after the daemon is ready, or when the first agent comes. It takes a second or two,
and so it happens in a thread; nothing heavy is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from k8e.core.access.access import find_payer, may_see
from k8e.core.access.keys import Keys
from k8e.core.checks import check_name
from k8e.core.errors import Fault, Kind
from k8e.core.log.daemon_log import format_event
from k8e.core.model import REMOTE, Caller
from k8e.doors.addresses import list_names
from k8e.doors.connection_limits import ConnectionLimits
from k8e.doors.errors import invalid
from k8e.doors.http.answers import encode
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.fields import Fields, decode_object
from k8e.doors.http.routes import JSON, LINES, Route
from k8e.doors.request_memory import RequestMemory

if TYPE_CHECKING:
    from k8e.doors.mcp.bridge import Bridge
    from k8e.doors.mcp.certificates import Certificates
    from k8e.doors.mcp.fronts import Front, Surroundings
    from k8e.doors.mcp.guest import Guest, Service
    from k8e.doors.mcp.listener import Listener
    from k8e.doors.mcp.stream import Pieces, Stream

PATIENCE: Final = 5.0  # before it is loaded though nobody has come
LITTLE: Final = 64 << 10
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

log = logging.getLogger("k8e.doors.mcp")


class Opening:
    """Where agents come in at the HTTP door."""

    def __init__(
        self,
        service: Service,
        keys: Keys,
        names: Sequence[str] = (),
        connection_limits: ConnectionLimits | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """`names`: what other machines call this one, besides what it calls itself."""
        self._memory = memory or RequestMemory()
        self._connection_limits = connection_limits or ConnectionLimits()
        self._service = service
        self._keys = keys
        self._names = names
        keys.watch(self._withdraw)
        self._loading = asyncio.Lock()
        self._loaded = False
        self._open: set[Stream | Listener] = set()
        self._listeners: set[Listener] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fewer = asyncio.Event()

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", ("v1", "mcp"), self.connect, (LINES,)),
            Route("POST", ("v1", "mcp", "listen"), self.listen, (JSON,)),
        )

    async def prepare(self, seconds: float = PATIENCE) -> None:
        from k8e.doors.mcp.guest import reclaim

        try:
            await reclaim(self._service)
        except Fault as fault:
            log.warning("%s", format_event(fault.code, {"cause": fault.error, "detail": fault.detail}))
        await asyncio.sleep(seconds)
        await self._load()

    async def _load(self) -> None:
        async with self._loading:
            if not self._loaded:
                await asyncio.to_thread(load_sdk)
                self._loaded = True

    async def connect(self, exchange: Exchange, request: Request) -> None:
        """One agent, for as long as its lines come."""
        query = Fields(request.query)
        tenant, name = query.take_text("tenant_id"), query.take_text("front", "k8e")
        cwd, home = query.take_text("cwd"), query.take_text("home")
        answers = query.take_text("answers") == "1"
        query.finish()
        await self._load()
        from k8e.doors.mcp.bridge import Bridge
        from k8e.doors.mcp.fronts import FRONTS, Surroundings
        from k8e.doors.mcp.guest import KeepingGuest

        if name not in FRONTS:
            raise invalid("front", f"{name[:64]!r} is no front", hint=f"one of: {', '.join(FRONTS)}")
        front = FRONTS[name]
        guest = await self.greet(exchange.caller, tenant)
        if front.keeps:
            guest = KeepingGuest(self._service, exchange.caller, tenant, front.name)
        await exchange.start_pieces(LINES)
        bridge = Bridge(exchange, exchange.allocation) if answers else None
        try:
            await self.attend(guest, bridge or exchange, front, Surroundings(cwd, home), bridge)
        finally:
            if bridge is not None:
                bridge.close()
        await exchange.end_frames()

    async def greet(self, caller: Caller, tenant: str) -> Guest:
        """Refuses a tenant that cannot be, or is not the caller's."""
        await self._load()
        from k8e.doors.mcp.guest import Guest

        if tenant:
            check_name("tenant_id", tenant)  # a part of one is not to be had by naming it
        if tenant and not may_see(caller, caller.uid, tenant):
            raise Fault(Kind.DENIED, "wrong_tenant", "this is another tenant's", field="tenant_id")
        guest = Guest(self._service, caller, tenant, known=caller.uid != REMOTE)
        await self._service.sessions.list(guest.caller)
        return guest

    async def attend(
        self,
        guest: Guest,
        pieces: Pieces,
        front: Front | None = None,
        surroundings: Surroundings | None = None,
        bridge: Bridge | None = None,
    ) -> None:
        """Until it has no more to say, or is cancelled. Then everything of it ends."""
        from k8e.doors.mcp.desk import Desk
        from k8e.doors.mcp.fronts import K8E, NOWHERE
        from k8e.doors.mcp.stream import Stream

        load = self._memory.allocate(find_payer(guest.caller.uid, guest.caller.tenant))
        stream = Stream(pieces, Desk(guest, front or K8E, surroundings or NOWHERE, bridge), load)
        self._open.add(stream)
        try:
            await stream.serve()
        finally:
            self._open.discard(stream)
            self._fewer.set()
            self._spawn(guest.leave())

    async def listen(self, exchange: Exchange, request: Request) -> None:
        """Many agents, on an address, for as long as the request is held open."""
        fields = Fields(decode_object(await exchange.read_body(request, LITTLE)))
        address, tenant = fields.take_text("http_addr"), fields.take_text("tenant_id")
        brought = (fields.take_text("certificate"), fields.take_text("key"))
        fields.finish()
        await self._load()
        from k8e.doors.mcp.entrance import Entrance, House
        from k8e.doors.mcp.listener import Listener, bind, name_url, read_address
        from k8e.doors.mcp.reception import Reception

        await self.greet(exchange.caller, tenant)
        ip, port = read_address(address)
        certificates = await self._find_certificates(str(ip), brought, needed=not ip.is_loopback)
        bound = bind(ip, port, exchange.caller)
        if not ip.is_loopback:
            self._service.expose()
        house = House(
            port=bound.getsockname()[1],
            names=(*(certificates.names if certificates else ()), *(LOOPBACK if ip.is_loopback else ())),
            secure=certificates is not None,
            host=exchange.caller if ip.is_loopback else None,
            tenant=tenant,
        )
        reception = Reception(self._service, Entrance(house, self._keys), tenant, self._spawn, self._memory)
        listener = Listener(reception, bound, certificates, self._connection_limits)
        self._open.add(listener)
        self._listeners.add(listener)
        told = {"listening": name_url(bound, house.scheme), "key_needed": house.host is None}
        if certificates is not None and not brought[0]:
            told["ca_certificate"] = str(self._keys.authority_file)
        try:
            await exchange.start_pieces(LINES)
            await exchange.send_piece(encode(told))
            await listener.serve()
            await exchange.end_frames()
        finally:
            self._open.discard(listener)
            self._listeners.discard(listener)
            self._fewer.set()

    async def _find_certificates(self, host: str, brought: tuple[str, str], *, needed: bool) -> Certificates | None:
        """What was brought along, else our own where a key is sent over a network; never nothing there."""
        from k8e.doors.mcp.certificates import BroughtCertificates, OwnCertificates

        if any(brought):
            return BroughtCertificates(*brought)
        if not needed:
            return None
        authority, _ = await self._keys.open()
        return OwnCertificates(authority, list_names(host, self._names))

    def _withdraw(self, identity: str) -> None:
        for listener in list(self._listeners):
            listener.withdraw(identity)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside a connection that has ended, or is being cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._fewer.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s", format_event("not_left_well", {"cause": repr(error)}))

    async def close(self, grace: float) -> None:
        """Ends all connections, and what ends with them."""
        for each in list(self._open):
            each.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._open or self._tasks:
                    self._fewer.clear()
                    await self._fewer.wait()


def load_sdk() -> None:
    import k8e.doors.mcp.listener
    import k8e.doors.mcp.stream  # noqa: F401 - and with them everything

    # They name what they serve, and names of connections are secrets.
    for name in ("mcp", "uvicorn", "sse_starlette"):
        logging.getLogger(name).setLevel(logging.ERROR)
