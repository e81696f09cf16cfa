"""Whose connection a request over HTTP belongs to, once somebody was let in (entrance.py).

Each connection has the SDK's own session manager to itself, so that the end of a connection is the end of everything of
it. The newest protocol has no connections: every request stands for itself (PassingGuest).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, Final

import mcp_types as types
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from k8e.core.access.access import find_payer
from k8e.core.errors import Fault, Kind
from k8e.core.model import Caller
from k8e.doors.addresses import name_source
from k8e.doors.http.errors import HttpRefusal
from k8e.doors.mcp.desk import Desk
from k8e.doors.mcp.doorkeeper import Connection
from k8e.doors.mcp.entrance import PATH, Entrance, Visitor, explain
from k8e.doors.mcp.guest import Guest, PassingGuest, Service, destroy_all, invent_name
from k8e.doors.mcp.sse import EventStream, refuse
from k8e.doors.mcp.visits import BODY, SESSION, Visit, make_manager
from k8e.doors.request_memory import Allocation, RequestMemory

CONNECTIONS: Final = 1000
CONNECTIONS_PER_KEY: Final = 200
BODY_PATIENCE: Final = 300.0  # for all of a request's body

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Reception:
    def __init__(self, service: Service, entrance: Entrance, tenant: str, spawn: Spawn, memory: RequestMemory) -> None:
        self._memory = memory
        self._service = service
        self._entrance = entrance
        self._tenant = tenant
        self._spawn = spawn
        self._visits: dict[str, Visit] = {}
        self._streams: dict[str, tuple[str, EventStream]] = {}  # with whose they are
        self._handles: set[str] = set()  # tenants of sessions that only their own names lead to
        self._shared: dict[str, Guest] = {}
        self._keyed: dict[str, set[asyncio.Task[None]]] = {}  # requests under way, by the key they came with

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        connection = Connection.of(scope)
        with ExitStack() as held:
            await self._receive(connection, held, scope, receive, send)

    async def _receive(
        self, connection: Connection | None, held: ExitStack, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """`held` is what has to be given back, however this ends."""
        try:
            visitor = await self._entrance.admit(scope)
            payer = find_payer(visitor.caller.uid, visitor.caller.tenant)
            if connection and not connection.admit(payer):
                raise HttpRefusal(
                    503, "too_many_connections", "you have too many connections", hint="use fewer at once"
                )
            self._make_room(scope, visitor)
            load = self._memory.allocate(payer)
            held.callback(load.free)
            receive = await read_whole(receive, load)
        except (Fault, HttpRefusal) as problem:
            held.close()
            sent = Headers(scope=scope).getlist("authorization")
            response = explain(problem, sent)
            if connection and response.status_code in (401, 403, 404, 421):
                connection.distrust()
            if response.status_code in (401, 403):
                source = name_source(str((scope.get("client") or ("unknown",))[0]))
                self._service.turn_away("nobody", f"{scope['method']} {PATH}", problem.code, source)
            await response(scope, receive, send)
            return
        if visitor.identity:
            await self._serve_key(visitor, scope, receive, send)
        else:
            await self._serve(visitor, scope, receive, send)

    def _make_room(self, scope: Scope, visitor: Visitor) -> None:
        if SESSION in Headers(scope=scope) or _query(scope):
            return
        owners = [visit.visitor.identity for visit in self._visits.values()]
        owners += [owner for owner, _ in self._streams.values()]
        crowded = visitor.identity and owners.count(visitor.identity) >= CONNECTIONS_PER_KEY
        if crowded or len(owners) >= CONNECTIONS:
            raise HttpRefusal(503, "too_many_connections", "too many agents are connected", hint="try again later")

    async def _serve_key(self, visitor: Visitor, scope: Scope, receive: Receive, send: Send) -> None:
        """Until it is answered, or the key is worth nothing any more."""
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        task = asyncio.create_task(self._serve(visitor, scope, receive, note))
        tasks = self._keyed.setdefault(visitor.identity, set())
        tasks.add(task)
        seconds = None if visitor.expires == float("inf") else max(0.0, visitor.expires - time.time())
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            tasks.discard(task)
            if not tasks:
                self._keyed.pop(visitor.identity, None)
            cut = task.cancel()
            await asyncio.wait({task})
        if not task.cancelled() and not cut:
            task.result()
        elif not begun:
            gone = Fault(Kind.UNAUTHENTICATED, "key_revoked", "the key is not good any more", hint="Use another key.")
            await explain(gone, "sent")(scope, receive, send)

    def withdraw(self, identity: str) -> None:
        """What came with this key ends at once."""
        for visit in list(self._visits.values()):
            if visit.visitor.identity == identity:
                visit.close()
        for task in list(self._keyed.get(identity, ())):
            task.cancel()

    async def _serve(self, visitor: Visitor, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        token = headers.get(SESSION, "")
        version = headers.get("mcp-protocol-version", HANDSHAKE_PROTOCOL_VERSIONS[0])
        if scope["method"] == "GET" and not token:
            await self._stream(visitor, receive, send)
        elif scope["method"] == "POST" and (stream := self._find_stream(visitor, token)):
            await stream.take(scope, receive, send, answers=True)
        elif scope["method"] == "POST" and (stream := self._find_stream(visitor, _query(scope))):
            await stream.take(scope, receive, send, answers=False)
        elif version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await self._pass(visitor, scope, receive, send)
        elif token:
            visit = self._visits.get(token)
            if visit is None or visit.visitor.identity != visitor.identity:
                await refuse(404, types.INVALID_REQUEST, "Session not found")(scope, receive, send)
            else:
                await visit.handle(scope, receive, send)
        else:
            await self._admit(visitor, scope, receive, send)

    def _find_stream(self, visitor: Visitor, token: str) -> EventStream | None:
        owner, stream = self._streams.get(token, ("", None))
        return stream if owner == visitor.identity else None

    def _greet(self, visitor: Visitor) -> Guest:
        return Guest(self._service, visitor.caller, self._tenant, known=False)

    async def _admit(self, visitor: Visitor, scope: Scope, receive: Receive, send: Send) -> None:
        visit = Visit(visitor, self._greet(visitor), self._know, self._forget)
        await visit.open()
        try:
            await visit.handle(scope, receive, send)
        finally:
            if not visit.token:
                visit.close()

    def _know(self, visit: Visit) -> None:
        """Before the client does, who may use it at once."""
        self._visits[visit.token] = visit

    def _forget(self, visit: Visit) -> None:
        self._visits.pop(visit.token, None)
        self._spawn(visit.guest.leave())

    async def _pass(self, visitor: Visitor, scope: Scope, receive: Receive, send: Send) -> None:
        guest: Guest = PassingGuest(self._service, visitor.caller, self._handles.add)
        if self._tenant:  # whose sessions are to be found again without being named
            guest = self._shared.setdefault(visitor.identity, self._greet(visitor))
        manager = make_manager(guest)
        try:
            async with manager.run():
                await manager.handle_request(scope, receive, send)
        finally:
            if not self._tenant:
                self._spawn(guest.leave())

    async def _stream(self, visitor: Visitor, receive: Receive, send: Send) -> None:
        guest = self._greet(visitor)
        token = invent_name()
        stream = EventStream(token, Desk(guest), PATH)
        self._streams[token] = (visitor.identity, stream)
        try:
            await stream.serve(receive, send)
        finally:
            del self._streams[token]
            self._spawn(guest.leave())

    async def close(self) -> None:
        for visit in list(self._visits.values()):
            visit.close()
        for guest in self._shared.values():
            await guest.leave()
        for each in await self._service.sessions.list(Caller(0)):
            if each.tenant in self._handles:
                await destroy_all(self._service, Caller(each.owner, each.tenant, confined=True), each.tenant)


async def read_whole(receive: Receive, load: Allocation) -> Receive:
    """The body of a request, which the SDK wants whole anyway; the way to read it there, and what comes after it."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_PATIENCE):
            while (message := await receive())["type"] == "http.request":
                piece = message.get("body", b"")
                await load.add(len(piece))
                body += piece
                if len(body) > BODY:
                    raise HttpRefusal(
                        413, "message_too_large", f"a message has more than {BODY} bytes", hint="send less"
                    )
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise HttpRefusal(408, "too_slow", "the request's body did not come", hint="send it without pauses") from None
    last: Message = {"type": "http.request", "body": bytes(body), "more_body": False}
    pending = [last] if message["type"] == "http.request" else [message]

    async def read() -> Message:
        return pending.pop() if pending else await receive()

    return read


def _query(scope: Scope) -> str:
    return Request(scope).query_params.get("session_id", "")
