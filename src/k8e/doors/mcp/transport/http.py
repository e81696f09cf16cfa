"""The HTTP endpoint `/mcp`: authenticates each request and finds the session that it belongs to.

Streamable HTTP and the older SSE have sessions. The newest protocol version has none: each of its requests is a client
of its own (StatelessClient).
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import mcp_types as types
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from k8e.core.access.access import find_payer
from k8e.core.access.keys import Admission
from k8e.core.contract import WholeService
from k8e.core.errors import Fault, Kind
from k8e.doors.addresses import name_source
from k8e.doors.http.errors import HttpRefusal, describe
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.wire import Head
from k8e.doors.mcp.authentication import PATH, Authenticator, challenge
from k8e.doors.mcp.clients import McpClient, StatelessClient, make_secret_name
from k8e.doors.mcp.errors import refuse_message
from k8e.doors.mcp.handles import Handles, Spawn
from k8e.doors.mcp.protocol import ProtocolServer
from k8e.doors.mcp.resources import OutputResources
from k8e.doors.mcp.transport.asgi import SESSION, AsgiCall
from k8e.doors.mcp.transport.connection import HttpCall, PeerConnection
from k8e.doors.mcp.transport.sse import JSON, SseTransport
from k8e.doors.mcp.transport.streamable_http import BODY, StreamableHttpSession, make_manager
from k8e.doors.request_memory import RequestMemory
from k8e.profiles.text import to_json

SESSIONS: Final = 1000
SESSIONS_PER_KEY: Final = 200


class HttpTransport:
    def __init__(
        self,
        service: WholeService,
        authenticator: Authenticator,
        tenant: str,
        spawn: Spawn,
        memory: RequestMemory,
        *,
        succeeded: bool = False,
    ) -> None:
        """`succeeded`: another gateway serves the same clients after this one."""
        self._service = service
        self._authenticator = authenticator
        self._tenant = tenant
        self._spawn = spawn
        self._succeeded = succeeded
        self.memory = memory
        self._sessions: dict[str, StreamableHttpSession] = {}
        self._streams: dict[str, SseTransport] = {}
        self._handles = Handles(service, spawn)
        self._outputs: dict[str, OutputResources] = {}  # of stateless clients, by identity
        self._shared: dict[str, McpClient] = {}  # stateless clients of a named tenant, by identity
        self._keyed: dict[str, set[asyncio.Task[None]]] = {}  # requests under way, by the identity of their key

    async def answer(self, head: Head, exchange: Exchange, connection: PeerConnection) -> None:
        call = HttpCall(head, Request.of(head, strict=False), exchange, connection)
        try:
            admission = await self._authenticator.authenticate(call)
            if call.method == "HEAD":
                raise HttpRefusal(405, "method_not_allowed", "HEAD is no method of MCP", hint="use POST or GET")
            payer = find_payer(admission.caller.uid, admission.caller.tenant)
            if not connection.authenticate(payer):
                raise HttpRefusal(
                    503, "too_many_connections", "you have too many connections", hint="use fewer at once"
                )
            self._check_sessions(call, admission.identity)
            exchange.allocation = self.memory.allocate(payer)
            call.body = await exchange.read_body(call.request, BODY)
        except (Fault, HttpRefusal) as problem:
            exchange.allocation.free()
            await self._refuse(call, problem)
            return
        if admission.identity:
            await self._serve_key(admission, call)
        else:
            await self._serve(admission, call)

    async def _refuse(self, call: HttpCall, problem: Fault | HttpRefusal) -> None:
        status, _ = describe(problem)
        if status in (401, 403, 404, 421):
            call.connection.deauthenticate()
        if status in (401, 403):
            source = name_source(call.connection.peer_address[0])
            self._service.turn_away("nobody", f"{call.method} {PATH}", problem.code, source)
        call.exchange.skip_body()
        await _explain(call, problem)

    def _check_sessions(self, call: HttpCall, identity: str) -> None:
        if SESSION in call.request.headers or _find_token(call):
            return
        sessions = (session.identity for session in self._sessions.values())
        identities = [*sessions, *(stream.identity for stream in self._streams.values())]
        too_many = identity and identities.count(identity) >= SESSIONS_PER_KEY
        if too_many or len(identities) >= SESSIONS:
            raise HttpRefusal(503, "too_many_connections", "too many agents are connected", hint="try again later")

    async def _serve_key(self, admission: Admission, call: HttpCall) -> None:
        """Serves until the call is answered, or the key is revoked or expires."""
        task = asyncio.create_task(self._serve(admission, call))
        tasks = self._keyed.setdefault(admission.identity, set())
        tasks.add(task)
        seconds = None if admission.expires == float("inf") else max(0.0, admission.expires - time.time())
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            tasks.discard(task)
            if not tasks:
                self._keyed.pop(admission.identity, None)
            cut = task.cancel()
            await asyncio.wait({task})
        if not task.cancelled() and not cut:
            task.result()
        elif not call.exchange.status:
            error = "the key is not good any more"
            await _explain(call, Fault(Kind.UNAUTHENTICATED, "key_revoked", error, hint="Use another key."))

    def revoke(self, identity: str) -> None:
        """Ends the sessions and requests of a key, and what is kept for it."""
        for session in list(self._sessions.values()):
            if session.identity == identity:
                session.close()
        for task in list(self._keyed.get(identity, ())):
            task.cancel()
        if (outputs := self._outputs.pop(identity, None)) is not None:
            outputs.close()

    async def _serve(self, admission: Admission, call: HttpCall) -> None:
        token = call.header(SESSION) or ""
        version = call.header(b"mcp-protocol-version") or HANDSHAKE_PROTOCOL_VERSIONS[0]
        if call.method == "GET" and not token:
            await self._serve_sse(admission, call)
        elif call.method == "POST" and (stream := self._find_stream(admission, token)):
            await stream.post(call.exchange, call.body, answers=True)
        elif call.method == "POST" and (stream := self._find_stream(admission, _find_token(call))):
            await stream.post(call.exchange, call.body, answers=False)
        elif version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await self._serve_stateless(admission, call)
        elif token:
            session = self._sessions.get(token)
            if session is None or session.identity != admission.identity:
                refusal = refuse_message(types.INVALID_REQUEST, "Session not found")
                body = refusal.model_dump_json(by_alias=True, exclude_unset=True)
                await call.exchange.send_bytes(404, body.encode(), JSON)
            else:
                await session.handle(call)
        else:
            await self._open_session(admission, call)

    def _find_stream(self, admission: Admission, token: str) -> SseTransport | None:
        stream = self._streams.get(token)
        return stream if stream is not None and stream.identity == admission.identity else None

    def _make_client(self, admission: Admission) -> McpClient:
        return McpClient(self._service, admission.caller, self._tenant, known=False)

    async def _open_session(self, admission: Admission, call: HttpCall) -> None:
        client = self._make_client(admission)
        session = StreamableHttpSession(admission.identity, client, self._add_session, self._remove_session)
        await session.open()
        try:
            await session.handle(call)
        finally:
            if not session.token:
                session.close()

    def _add_session(self, session: StreamableHttpSession) -> None:
        self._sessions[session.token] = session

    def _remove_session(self, session: StreamableHttpSession) -> None:
        self._sessions.pop(session.token, None)
        self._spawn(session.client.close())

    async def _serve_stateless(self, admission: Admission, call: HttpCall) -> None:
        if self._tenant:  # its sessions are found without their names
            await self._answer_once(self._shared.setdefault(admission.identity, self._make_client(admission)), call)
            return
        outputs = self._outputs.setdefault(admission.identity, OutputResources(shared=True))
        client = StatelessClient(self._service, admission.caller, self._handles, outputs)
        answered = False
        try:
            answered = await self._answer_once(client, call)
        finally:
            client.leave(answered=answered)

    async def _answer_once(self, client: McpClient, call: HttpCall) -> bool:
        """Whether the client has the answer."""
        manager = make_manager(client)
        asgi = AsgiCall(call)
        async with manager.run():
            await asgi.run(manager.handle_request)
        return not asgi.broken

    async def _serve_sse(self, admission: Admission, call: HttpCall) -> None:
        client = self._make_client(admission)
        token = make_secret_name()
        stream = self._streams[token] = SseTransport(admission.identity, token, ProtocolServer(client), PATH)
        try:
            await stream.serve(call.exchange, call.connection.gone)
        finally:
            del self._streams[token]
            self._spawn(client.close())

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            session.close()
        for client in self._shared.values():
            await client.close()
        for outputs in self._outputs.values():
            outputs.close()
        if self._succeeded:
            self._handles.leave()
        else:
            await self._handles.close()


async def _explain(call: HttpCall, problem: Fault | HttpRefusal) -> None:
    status, body = describe(problem)
    content = b"" if call.method == "HEAD" else to_json(body)
    await call.exchange.send_bytes(status, content, JSON, challenge(problem, status, call.authorization))


def _find_token(call: HttpCall) -> str:
    """Of an SSE session, in the query."""
    return call.request.query.get("session_id", "")
