"""Sessions over gRPC: created, shown, changed, stopped, started, destroyed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from k8e.core.contract import SandboxService
from k8e.doors.grpc import answers, requests
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import LONG, Call, Handler
from k8e.doors.requests import read_all


class SessionHandlers:
    def __init__(self, service: SandboxService) -> None:
        self._service = service

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {
            "CreateSession": Handler(self._create, LONG),
            "GetSession": Handler(self._get),
            "ListSessions": Handler(self._list),
            "DestroySession": Handler(self._destroy, 120.0),
            "StopSession": Handler(self._stop, 120.0),
            "StartSession": Handler(self._start, 300.0),
            "UpdateAllowedHosts": Handler(self._update_hosts),
            "RunSubAgent": Handler(self._run_subagent, LONG),
        }

    async def _create(self, call: Call) -> None:
        request = await call.read_one(pb.CreateSessionRequest)
        # In a thread, because a large manifest takes long.
        spec = await asyncio.to_thread(requests.read_session_spec, request, self._service.default_limits)
        session = answers.show_session(await self._service.sessions.create(call.caller, spec))
        answer = pb.CreateSessionResponse(
            session_id=session.session_id, runtime_class=session.runtime_class, session=session
        )
        await call.write(answer)

    async def _get(self, call: Call) -> None:
        request = await call.read_one(pb.GetSessionRequest)
        session = await self._service.sessions.get(call.caller, request.session_id)
        await call.write(pb.GetSessionResponse(session=answers.show_session(session)))

    async def _list(self, call: Call) -> None:
        request = await call.read_one(pb.ListSessionsRequest)
        all_phases = read_all("phase", request.phase or "active", "active", "phases")
        sessions = await self._service.sessions.list(call.caller, all_phases=all_phases, loads=request.load)
        await call.write(pb.ListSessionsResponse(sessions=map(answers.show_session, sessions)))

    async def _destroy(self, call: Call) -> None:
        request = await call.read_one(pb.DestroySessionRequest)
        await self._service.sessions.destroy(call.caller, request.session_id)
        await call.write(pb.DestroySessionResponse())

    async def _stop(self, call: Call) -> None:
        request = await call.read_one(pb.StopSessionRequest)
        session = await self._service.sessions.stop(call.caller, request.session_id)
        await call.write(pb.StopSessionResponse(session=answers.show_session(session)))

    async def _start(self, call: Call) -> None:
        request = await call.read_one(pb.StartSessionRequest)
        env = requests.read_env(request.env, request.env_bytes)
        secrets = requests.read_env(request.secrets, request.secrets_bytes, "secrets")
        session = await self._service.sessions.start(call.caller, request.session_id, env=env, secrets=secrets)
        await call.write(pb.StartSessionResponse(session=answers.show_session(session)))

    async def _update_hosts(self, call: Call) -> None:
        request = await call.read_one(pb.UpdateAllowedHostsRequest)
        change = requests.read_hosts_change(request)
        session = await self._service.sessions.set_hosts(call.caller, request.session_id, change)
        await call.write(pb.UpdateAllowedHostsResponse(allowed_hosts=session.hosts.texts))

    async def _run_subagent(self, call: Call) -> None:
        request = await call.read_one(pb.RunSubAgentRequest)
        spec = requests.read_child_spec(request)
        child = await self._service.sessions.create_child(call.caller, request.parent_session_id, spec)
        await call.write(pb.RunSubAgentResponse(session_id=child.session_id, session=answers.show_session(child)))
