"""Who comes over HTTP: whether they are let in, and whose connection a request belongs to.

Each connection has the SDK's own session manager to itself, so that the end of a connection is the end of everything of
it. The newest protocol has no connections: every request stands for itself (PassingGuest).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

import mcp_types as types
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from k8e.core.model import Caller
from k8e.doors.mcp.desk import Desk
from k8e.doors.mcp.guest import Guest, PassingGuest, Service, destroy_all, invent_name
from k8e.doors.mcp.sse import EventStream, refuse

PATH: Final = "/mcp"
BODY: Final = 16 << 20
CONNECTIONS: Final = 1000
IDLE: Final = 1800.0  # without a request, before a connection counts as over
ABANDONED: Final = 10.0  # the same after a client broke off and left no other request open
_SESSION: Final = "mcp-session-id"

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Reception:
    def __init__(self, service: Service, caller: Caller, tenant: str, port: int, spawn: Spawn) -> None:
        self._service = service
        self._caller = caller
        self._tenant = tenant
        self._spawn = spawn
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self._visits: dict[str, Visit] = {}
        self._streams: dict[str, EventStream] = {}
        self._handles: set[str] = set()  # sessions that only their own names lead to
        self._shared: Guest | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        if problem := self._examine(scope, headers):
            await problem(scope, receive, send)
            return
        token = headers.get(_SESSION, "")
        if scope["method"] == "GET" and not token:
            await self._stream(scope, receive, send)
        elif scope["method"] == "POST" and (stream := self._streams.get(token)):
            await stream.take(scope, receive, send, answers=True)
        elif scope["method"] == "POST" and (stream := self._streams.get(_query(scope))):
            await stream.take(scope, receive, send, answers=False)
        elif headers.get("mcp-protocol-version", HANDSHAKE_PROTOCOL_VERSIONS[0]) not in HANDSHAKE_PROTOCOL_VERSIONS:
            await self._pass(scope, receive, send)
        elif token and token not in self._visits:
            await refuse(404, types.INVALID_REQUEST, "Session not found")(scope, receive, send)
        elif token:
            await self._visits[token].handle(scope, receive, send)
        else:
            await self._admit(scope, receive, send)

    def _examine(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Web pages are kept out: neither under another name of ours nor from another place."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if host.lower() not in self._hosts:
            return _problem(421, "host_refused", "this is not the host you are looking for", "Host: 127.0.0.1")
        if origin is not None and origin.lower() not in {f"http://{name}" for name in self._hosts}:
            return _problem(403, "origin_refused", "web pages may not call this", "call it from a program")
        if scope["path"] != PATH:
            return _problem(404, "no_such_endpoint", "there is nothing at this address", PATH)
        opens = _SESSION not in headers and not _query(scope)
        if opens and len(self._visits) + len(self._streams) >= CONNECTIONS:
            return _problem(503, "too_many_connections", "too many agents are connected", "try again later")
        return None

    def _greet(self) -> Guest:
        return Guest(self._service, self._caller, self._tenant, known=False)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        guest = self._greet()
        visit = Visit(guest, self._know, self._forget)
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

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        guest: Guest = PassingGuest(self._service, self._caller, self._handles.add)
        if self._tenant:  # whose sessions are to be found again without being named
            guest = self._shared = self._shared or self._greet()
        manager = make_manager(guest)
        try:
            async with manager.run():
                await manager.handle_request(scope, receive, send)
        finally:
            if not self._tenant:
                self._spawn(guest.leave())

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        guest = self._greet()
        token = invent_name()
        stream = self._streams[token] = EventStream(token, Desk(guest), PATH)
        try:
            await stream.serve(receive, send)
        finally:
            del self._streams[token]
            self._spawn(guest.leave())

    async def close(self) -> None:
        for visit in list(self._visits.values()):
            visit.close()
        if self._shared is not None:
            await self._shared.leave()
        for each in await self._service.sessions(Caller(self._caller.uid)):
            if each.tenant in self._handles:
                await destroy_all(self._service, Caller(each.owner, each.tenant, confined=True), each.tenant)


class Visit:
    """A connection of Streamable HTTP, from its first request until it is taken back, broken off or forgotten."""

    def __init__(self, guest: Guest, know: Callable[[Visit], None], forget: Callable[[Visit], None]) -> None:
        self.guest = guest
        self.token = ""
        self._know = know
        self._manager = make_manager(guest)
        self._forget = forget
        self._over = asyncio.Event()
        self._open = 0
        self._patience: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        ready = asyncio.Event()
        self._running = asyncio.create_task(self._run(ready))
        await ready.wait()

    async def _run(self, ready: asyncio.Event) -> None:
        try:
            async with self._manager.run():
                ready.set()
                await self._over.wait()
        finally:
            self._forget(self)

    def close(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._over.set()

    def _start(self, status: int, token: str) -> None:
        if not self.token and status < 400 and token:
            self.token = token
            self._know(self)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._patience is not None:
            self._patience.cancel()
        watch = Watch(receive, send, self._start)
        self._open += 1
        try:
            await self._manager.handle_request(scope, watch.receive, watch.send)
        finally:
            self._open -= 1
            if not self._open and not self._over.is_set():
                loop = asyncio.get_running_loop()
                self._patience = loop.call_later(ABANDONED if watch.broken else IDLE, self.close)
        if watch.broken and watch.request_id is not None:
            await self._cancel(scope, watch.request_id)
        if scope["method"] == "DELETE" and watch.status == 200:
            self.close()

    async def _cancel(self, scope: Scope, request_id: object) -> None:
        """Nobody can come back for the answer, since nothing is kept to be sent again: then nothing has to run for it.
        Told to the SDK as the client would have done."""
        params = {"requestId": request_id}
        body = json.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}).encode()
        pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return pieces.pop() if pieces else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            pass

        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        await self._manager.handle_request({**scope, "headers": headers}, receive, send)


class Watch:
    """Looks at a request as it passes: which it is, how it is answered, and whether the client stays for it."""

    def __init__(self, receive: Receive, send: Send, start: Callable[[int, str], None]) -> None:
        self.status = 0
        self._start = start
        self.broken = False
        self.request_id: object = None
        self._receive = receive
        self._send = send
        self._body = bytearray()
        self._finished = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.broken |= not self._finished
        elif len(self._body) < BODY:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                with contextlib.suppress(ValueError, RecursionError):
                    content = json.loads(self._body) if self._body else None
                    self.request_id = content.get("id") if isinstance(content, dict) and "method" in content else None
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._start(self.status, Headers(raw=message["headers"]).get(_SESSION, ""))
        elif not message.get("more_body"):
            self._finished = True
        await self._send(message)


def make_manager(guest: Guest) -> StreamableHTTPSessionManager:
    """Hosts and origins are examined before; how long it waits is ours to say."""
    return StreamableHTTPSessionManager(
        app=Desk(guest).server, session_idle_timeout=None, max_request_body_size=BODY, max_sessions=1
    )


def _query(scope: Scope) -> str:
    return Request(scope).query_params.get("session_id", "")


def _problem(status: int, code: str, error: str, hint: str) -> JSONResponse:
    return JSONResponse({"error": error, "detail": "", "code": code, "hint": hint}, status_code=status)
