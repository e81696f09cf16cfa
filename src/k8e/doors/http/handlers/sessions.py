"""Sessions over HTTP: created, shown, changed, stopped, started, destroyed."""

from __future__ import annotations

from k8e.core.contract import SandboxService
from k8e.doors.http import answers, requests
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.routes import JSON, SESSIONS, Route
from k8e.doors.requests import read_all


class SessionHandlers:
    def __init__(self, service: SandboxService) -> None:
        self._service = service

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", SESSIONS, self.create, (JSON,)),
            Route("GET", SESSIONS, self.list),
            Route("GET", (*SESSIONS, "*"), self.get),
            Route("DELETE", (*SESSIONS, "*"), self.destroy),
            Route("POST", (*SESSIONS, "*", "subagents"), self.run_subagent, (JSON,)),
            Route("POST", (*SESSIONS, "*", "stop"), self.stop, (JSON,)),
            Route("POST", (*SESSIONS, "*", "start"), self.start, (JSON,)),
            Route("GET", (*SESSIONS, "*", "hosts"), self.get_hosts),
            Route("POST", (*SESSIONS, "*", "hosts"), self.set_hosts, (JSON,)),
        )

    async def create(self, exchange: Exchange, request: Request) -> None:
        fields = await exchange.read_fields(request)
        spec = await requests.read_new_session(fields, self._service.default_limits)
        session = await self._service.sessions.create(exchange.caller, spec)
        await exchange.send_json(201, answers.show_created(session))

    async def list(self, exchange: Exchange, request: Request) -> None:
        phase, load = request.read_query(phase="active", load="")
        all_phases = read_all("phase", phase, "active", "phases")
        sessions = await self._service.sessions.list(exchange.caller, all_phases=all_phases, loads=bool(load))
        await exchange.send_json(200, {"sessions": [answers.show_session(session) for session in sessions]})

    async def get(self, exchange: Exchange, request: Request) -> None:
        session = await self._service.sessions.get(exchange.caller, request.path[2])
        await exchange.send_json(200, answers.show_session_with_denials(session))

    async def run_subagent(self, exchange: Exchange, request: Request) -> None:
        spec = requests.read_child_spec(await exchange.read_fields(request))
        child = await self._service.sessions.create_child(exchange.caller, request.path[2], spec)
        await exchange.send_json(201, answers.show_child(child))

    async def get_hosts(self, exchange: Exchange, request: Request) -> None:
        session = await self._service.sessions.get(exchange.caller, request.path[2])
        await exchange.send_json(200, answers.show_hosts(session))

    async def set_hosts(self, exchange: Exchange, request: Request) -> None:
        change = requests.read_hosts_change(await exchange.read_fields(request))
        session = await self._service.sessions.set_hosts(exchange.caller, request.path[2], change)
        await exchange.send_json(200, answers.show_hosts(session))

    async def destroy(self, exchange: Exchange, request: Request) -> None:
        await self._service.sessions.destroy(exchange.caller, request.path[2])
        await exchange.send_json(200, {"ok": True})

    async def stop(self, exchange: Exchange, request: Request) -> None:
        (await exchange.read_fields(request)).finish()
        session = await self._service.sessions.stop(exchange.caller, request.path[2])
        await exchange.send_json(200, answers.show_session(session))

    async def start(self, exchange: Exchange, request: Request) -> None:
        fields = await exchange.read_fields(request)
        env, secrets = requests.read_start(fields)
        session = await self._service.sessions.start(exchange.caller, request.path[2], env=env, secrets=secrets)
        await exchange.send_json(200, answers.show_session(session))
