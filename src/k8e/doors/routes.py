"""Which request is which call of the service."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from k8e.core.model import MAX_MESSAGE, Caller, Chunk, LiveRun, RunResult, SandboxService
from k8e.doors import frames, shapes, specs
from k8e.doors.approvals import Approvals
from k8e.doors.exchange import Exchange, Request
from k8e.doors.following import follow
from k8e.doors.frames import BadFrame, Frame, FrameKind, FrameReader
from k8e.doors.identities import Identities
from k8e.doors.images import Images
from k8e.doors.problems import Refusal
from k8e.doors.trees import Trees
from k8e.doors.warm import Warm

JSON = "application/json"
BYTES = "application/octet-stream"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
LINES = "application/x-ndjson"
STDIN_FRAME = 1 << 20

Handler = Callable[[Exchange, Request], Awaitable[None]]


class Agents(Protocol):
    """Who speaks the Model Context Protocol (k8e.doors.mcp)."""

    async def connect(self, exchange: Exchange, request: Request) -> None: ...
    async def listen(self, exchange: Exchange, request: Request) -> None: ...


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: tuple[str, ...]  # "*" is any one part
    handler: Handler
    takes: tuple[str, ...] = ()  # content types; a form's are never among them

    def fits(self, path: tuple[str, ...]) -> bool:
        return len(path) == len(self.path) and all(
            part in ("*", given) for part, given in zip(self.path, path, strict=True)
        )


class Routes:
    def __init__(
        self,
        service: SandboxService,
        render_metrics: Callable[[], str],
        identities: Identities | None = None,
        agents: Agents | None = None,
        approvals: Approvals | None = None,
        images: Images | None = None,
        warm: Warm | None = None,
    ) -> None:
        self._service = service
        self._render_metrics = render_metrics
        self._identities = identities
        sessions, runs = ("v1", "sessions"), ("v1", "runs")
        trees = Trees(service)
        self._table: tuple[Route, ...] = (
            Route("GET", ("healthz",), self._tell_health),
            Route("GET", ("metrics",), self._tell_metrics),
            Route("GET", ("v1", "status"), self._tell_status),
            Route("POST", sessions, self._create, (JSON,)),
            Route("GET", sessions, self._list_sessions),
            Route("GET", (*sessions, "*"), self._get_session),
            Route("DELETE", (*sessions, "*"), self._destroy),
            Route("POST", (*sessions, "*", "subagents"), self._run_subagent, (JSON,)),
            Route("POST", (*sessions, "*", "stop"), self._stop, (JSON,)),
            Route("POST", (*sessions, "*", "start"), self._start, (JSON,)),
            Route("GET", (*sessions, "*", "hosts"), self._get_hosts),
            Route("POST", (*sessions, "*", "hosts"), self._set_hosts, (JSON,)),
            Route("POST", (*sessions, "*", "runs"), self._run, (JSON, frames.CONTENT_TYPE)),
            Route("GET", (*sessions, "*", "runs"), self._list_runs),
            Route("GET", (*sessions, "*", "processes"), self._list_processes),
            Route("GET", (*sessions, "*", "files"), self._read_file),
            Route("PUT", (*sessions, "*", "files"), self._write_file, (BYTES,)),
            Route("GET", (*sessions, "*", "entries"), self._list_files),
            Route("GET", (*sessions, "*", "tree"), trees.look),
            Route("PUT", (*sessions, "*", "folder"), trees.make_folder, (BYTES,)),
            Route("GET", (*sessions, "*", "content"), trees.read),
            Route("PUT", (*sessions, "*", "content"), trees.write, (BYTES,)),
            Route("POST", runs, self._run_once, (JSON, frames.CONTENT_TYPE)),
            Route("GET", (*runs, "*"), self._poll),
            Route("POST", (*runs, "*", "kill"), self._kill, (JSON,)),
            Route("POST", (*runs, "*", "signal"), self._signal, (JSON,)),
            Route("POST", (*runs, "*", "resize"), self._resize, (JSON,)),
        )
        if identities is not None:
            self._table += (
                Route("POST", ("v1", "login"), identities.login, (JSON,)),
                Route("POST", ("v1", "keys"), identities.create, (JSON,)),
                Route("GET", ("v1", "keys"), identities.list),
                Route("DELETE", ("v1", "keys", "*"), identities.delete),
            )

        if agents is not None:
            self._table += (
                Route("POST", ("v1", "mcp"), agents.connect, (LINES,)),
                Route("POST", ("v1", "mcp", "listen"), agents.listen, (JSON,)),
            )
        if warm is not None:
            self._table += (
                Route("GET", ("v1", "pool"), warm.tell),
                Route("POST", ("v1", "pool"), warm.reserve, (JSON,)),
            )
        if approvals is not None:
            self._table += (
                Route("POST", (*sessions, "*", "approvals"), approvals.ask, (JSON,)),
                Route("GET", ("v1", "approvals"), approvals.list),
                Route("GET", ("v1", "approvals", "*"), approvals.get),
                Route("POST", ("v1", "approvals", "*"), approvals.answer, (JSON,)),
            )

        if images is not None:
            self._table += (
                Route("GET", ("v1", "images"), images.list),
                Route("DELETE", ("v1", "images"), images.remove),
                Route("POST", ("v1", "images", "pull"), images.pull, (JSON,)),
                Route("POST", ("v1", "images", "import"), images.add, (BYTES,)),
                Route("POST", ("v1", "images", "base"), images.build_base, (JSON,)),
                Route("POST", ("v1", "images", "prune"), images.prune, (JSON,)),
            )

    def turn_away(self, caller: Caller, call: str, refusal: Refusal) -> None:
        self._service.turn_away(caller.label, call, refusal.code)

    async def answer(self, exchange: Exchange, request: Request) -> None:
        candidates = [route for route in self._table if route.fits(request.path)]
        if not candidates:
            raise Refusal(
                404, "no_such_endpoint", "there is nothing at this address", hint="docs/http-api.md lists them"
            )
        for route in candidates:
            if route.method == request.method:
                break
        else:
            raise Refusal(405, "method_not_allowed", f"{request.method} is not possible here")
        if route.takes and request.content_type not in route.takes:
            wanted = " or ".join(route.takes)
            raise Refusal(415, "content_type", "the request's content type is not taken here", hint=f"send {wanted}")
        if not route.takes:
            await exchange.read_body(request, limit=0)
        await route.handler(exchange, request)

    # --- the service itself ------------------------------------------------------------------------------------------

    async def _tell_health(self, exchange: Exchange, request: Request) -> None:
        await exchange.send_json(200, {"ok": True})

    async def _tell_metrics(self, exchange: Exchange, request: Request) -> None:
        await exchange.send_bytes(200, self._render_metrics().encode(), PROMETHEUS)

    async def _tell_status(self, exchange: Exchange, request: Request) -> None:
        status = shapes.shape_status(await self._service.status(exchange.caller))
        gateway = {"gateway": self._identities.gateway.describe()} if self._identities else {}
        await exchange.send_json(200, {**status, **gateway})

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def _create(self, exchange: Exchange, request: Request) -> None:
        fields = specs.Fields(specs.decode_object(await exchange.read_body(request)))
        # In a thread, because a large manifest takes its time.
        spec = await asyncio.to_thread(specs.read_session_spec, fields, self._service.default_limits)
        session = await self._service.create(exchange.caller, spec)
        await exchange.send_json(201, shapes.shape_created(session))

    async def _list_sessions(self, exchange: Exchange, request: Request) -> None:
        query = specs.Fields(request.query)
        phase = query.take_text("phase", "active")
        query.finish()
        if phase not in ("active", "all"):
            raise specs.invalid("phase", f"{phase!r} is no choice of phases", hint="active or all")
        sessions = await self._service.sessions(exchange.caller, all_phases=phase == "all")
        await exchange.send_json(200, {"sessions": [shapes.shape_session(session) for session in sessions]})

    async def _get_session(self, exchange: Exchange, request: Request) -> None:
        session = await self._service.get(exchange.caller, request.path[2])
        await exchange.send_json(200, shapes.shape_session_closely(session))

    async def _run_subagent(self, exchange: Exchange, request: Request) -> None:
        spec = specs.read_child_spec(specs.Fields(specs.decode_object(await exchange.read_body(request))))
        child = await self._service.subagent(exchange.caller, request.path[2], spec)
        await exchange.send_json(201, shapes.shape_child(child))

    async def _get_hosts(self, exchange: Exchange, request: Request) -> None:
        session = await self._service.get(exchange.caller, request.path[2])
        await exchange.send_json(200, shapes.shape_hosts(session))

    async def _set_hosts(self, exchange: Exchange, request: Request) -> None:
        change = specs.read_hosts_change(specs.Fields(specs.decode_object(await exchange.read_body(request))))
        session = await self._service.set_hosts(exchange.caller, request.path[2], change)
        await exchange.send_json(200, shapes.shape_hosts(session))

    async def _destroy(self, exchange: Exchange, request: Request) -> None:
        await self._service.destroy(exchange.caller, request.path[2])
        await exchange.send_json(200, {"ok": True})

    async def _stop(self, exchange: Exchange, request: Request) -> None:
        specs.Fields(specs.decode_object(await exchange.read_body(request))).finish()
        session = await self._service.stop_session(exchange.caller, request.path[2])
        await exchange.send_json(200, shapes.shape_session(session))

    async def _start(self, exchange: Exchange, request: Request) -> None:
        fields = specs.Fields(specs.decode_object(await exchange.read_body(request)))
        env, secrets = specs.read_start(fields)
        session = await self._service.start_session(exchange.caller, request.path[2], env=env, secrets=secrets)
        await exchange.send_json(200, shapes.shape_session(session))

    # --- runs --------------------------------------------------------------------------------------------------------

    async def _run(self, exchange: Exchange, request: Request) -> None:
        fields, incoming = await self._read_run(exchange, request)
        stream = fields.take_flag("stream") or incoming is not None
        spec = specs.read_run_spec(request.path[2], fields)
        if stream:
            live = await self._service.start(exchange.caller, dataclasses.replace(spec, stdin=b""))
            return await self._follow(exchange, live, spec.stdin, incoming)
        return await self._tell_run(exchange, await self._service.run(exchange.caller, spec))

    async def _run_once(self, exchange: Exchange, request: Request) -> None:
        """In a session of its own."""
        fields, incoming = await self._read_run(exchange, request)
        stream = fields.take_flag("stream") or incoming is not None
        limits = self._service.default_limits
        session, spec, keep = await asyncio.to_thread(specs.read_once_spec, fields, limits)
        if stream:
            unfed = dataclasses.replace(spec, stdin=b"")
            live = await self._service.start_once(exchange.caller, session, unfed, keep=keep)
            return await self._follow(exchange, live, spec.stdin, incoming)
        return await self._tell_run(exchange, await self._service.run_once(exchange.caller, session, spec, keep=keep))

    async def _tell_run(self, exchange: Exchange, result: RunResult) -> None:
        await exchange.send_json(200, shapes.shape_run(result), shapes.exit_header(result.exit_code))

    async def _read_run(self, exchange: Exchange, request: Request) -> tuple[specs.Fields, Incoming | None]:
        """As JSON; or the same in a first frame, and then the command's stdin as it comes."""
        if request.content_type != frames.CONTENT_TYPE:
            return specs.Fields(specs.decode_object(await exchange.read_body(request))), None
        incoming = Incoming(exchange)
        first = await incoming.read_first()
        return specs.Fields(specs.decode_object(first.data)), incoming

    async def _follow(self, exchange: Exchange, live: LiveRun, stdin: bytes, incoming: Incoming | None) -> None:
        async def begin() -> None:
            await exchange.start_frames()
            started = {"run_id": live.run_id, "session_id": live.session_id}
            await exchange.send_frame(FrameKind.STARTED, shapes.encode(started))

        async def send(chunk: Chunk) -> None:
            await exchange.send_frame(FrameKind(chunk.stream), chunk.data)

        result = await follow(live, take_stdin(stdin, incoming), begin, send)
        await exchange.send_frame(FrameKind.RESULT, shapes.encode(shapes.shape_run_summary(result)))
        await exchange.end_frames(shapes.exit_header(result.exit_code))

    async def _list_runs(self, exchange: Exchange, request: Request) -> None:
        runs = await self._service.log(exchange.caller, request.path[2])
        await exchange.send_json(200, {"runs": [shapes.shape_run_summary(run) for run in runs]})

    async def _list_processes(self, exchange: Exchange, request: Request) -> None:
        commands = await self._service.ps(exchange.caller, request.path[2])
        await exchange.send_json(200, {"processes": [shapes.shape_command(command) for command in commands]})

    async def _poll(self, exchange: Exchange, request: Request) -> None:
        run = await self._service.poll(exchange.caller, request.path[2])
        await exchange.send_json(200, shapes.shape_run(run), shapes.exit_header(run.exit_code))

    async def _kill(self, exchange: Exchange, request: Request) -> None:
        specs.Fields(specs.decode_object(await exchange.read_body(request))).finish()
        await self._service.kill(exchange.caller, request.path[2])
        await exchange.send_json(200, {"ok": True})

    async def _signal(self, exchange: Exchange, request: Request) -> None:
        """A request of its own: within the run's it would wait behind input that the command does not take."""
        number = specs.read_signal(specs.Fields(specs.decode_object(await exchange.read_body(request))))
        await self._service.signal(exchange.caller, request.path[2], number)
        await exchange.send_json(200, {"ok": True})

    async def _resize(self, exchange: Exchange, request: Request) -> None:
        size = specs.read_size(specs.Fields(specs.decode_object(await exchange.read_body(request))))
        await self._service.resize(exchange.caller, request.path[2], *size)
        await exchange.send_json(200, {"ok": True})

    # --- files -------------------------------------------------------------------------------------------------------

    async def _read_file(self, exchange: Exchange, request: Request) -> None:
        query = specs.Fields(request.query)
        path = query.take_text("path")
        query.finish()
        content = await self._service.read_file(exchange.caller, request.path[2], path)
        if request.headers.get(b"accept") == BYTES.encode():
            await exchange.send_bytes(200, content, BYTES)
        else:
            await exchange.send_json(200, shapes.shape_file(path, content))

    async def _write_file(self, exchange: Exchange, request: Request) -> None:
        query = specs.Fields(request.query)
        path, mode = query.take_text("path"), query.take_text("mode", "w")
        query.finish()
        if mode not in ("w", "a"):
            raise specs.invalid("mode", f"{mode!r} is no way to write", hint="w replaces, a appends")
        content = await exchange.read_body(request, MAX_MESSAGE)
        size = await self._service.write_file(exchange.caller, request.path[2], path, content, append=mode == "a")
        await exchange.send_json(200, {"ok": True, "path": path, "bytes": size})

    async def _list_files(self, exchange: Exchange, request: Request) -> None:
        query = specs.Fields(request.query)
        path, text = query.take_text("path"), query.take_text("since", "0")
        query.finish()
        try:
            since = float(text)
        except ValueError:
            raise specs.invalid("since", f"{text!r} is no point in time", hint="unix seconds") from None
        entries = await self._service.list_files(exchange.caller, request.path[2], path, since=since)
        await exchange.send_json(200, {"files": [shapes.shape_entry(entry) for entry in entries]})


class Incoming:
    """The frames of a request's body, read when they are wanted."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._reader = FrameReader(MAX_MESSAGE)  # the first is the request, and that may have as much as any other
        self._ready: collections.deque[Frame] = collections.deque()

    async def read_first(self) -> Frame:
        first = await self.read()
        if first is None or first.kind is not FrameKind.REQUEST:
            raise BadFrame("the first frame is not the request")
        self._reader.limit = STDIN_FRAME
        return first

    async def read(self) -> Frame | None:
        while not self._ready:
            piece = await self._exchange.read_piece()
            if piece is None:
                if not self._reader.between_frames:
                    raise BadFrame("the request ends inside a frame")
                return None
            self._ready.extend(self._reader.feed(piece))
        return self._ready.popleft()


async def take_stdin(content: bytes, incoming: Incoming | None) -> AsyncGenerator[bytes, None]:
    """What the request brought, and what comes after it."""
    if content:
        yield content
    while incoming and (frame := await incoming.read()):
        if frame.kind is not FrameKind.STDIN:
            raise BadFrame(f"{frame.kind.name} is nothing to send to a running command")
        yield frame.data
