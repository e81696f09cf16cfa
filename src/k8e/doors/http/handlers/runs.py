"""Runs over HTTP: to their end, streamed, or in the background."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator

from k8e.core.contract import LiveRun, SandboxService
from k8e.core.model import MAX_MESSAGE, Chunk, RunResult
from k8e.doors.errors import invalid
from k8e.doors.http import answers, frames, requests
from k8e.doors.http.exchange import BODY_PATIENCE, Exchange, Request
from k8e.doors.http.fields import Fields, decode_object
from k8e.doors.http.frames import HEADER, BadFrame, Frame, FrameKind, FrameReader
from k8e.doors.http.routes import JSON, RUNS, SESSIONS, Route
from k8e.doors.run_stream import stream_run
from k8e.profiles.text import to_json

STDIN_FRAME = 1 << 20
LINGER = 600.0  # seconds for which a session of one command waits for its client to leave


class RunHandlers:
    def __init__(self, service: SandboxService) -> None:
        self._service = service

    @property
    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", (*SESSIONS, "*", "runs"), self.run, (JSON, frames.CONTENT_TYPE)),
            Route("GET", (*SESSIONS, "*", "runs"), self.list),
            Route("GET", (*SESSIONS, "*", "processes"), self.list_processes),
            Route("POST", RUNS, self.run_once, (JSON, frames.CONTENT_TYPE)),
            Route("GET", (*RUNS, "*"), self.poll),
            Route("POST", (*RUNS, "*", "kill"), self.kill, (JSON,)),
            Route("POST", (*RUNS, "*", "signal"), self.signal, (JSON,)),
            Route("POST", (*RUNS, "*", "resize"), self.resize, (JSON,)),
        )

    async def run(self, exchange: Exchange, request: Request) -> None:
        fields, incoming = await self._read_run(exchange, request)
        stream = fields.take_flag("stream") or incoming is not None
        spec = requests.read_run_spec(request.path[2], fields)
        if stream:
            live = await self._service.runs.start(exchange.caller, dataclasses.replace(spec, stdin=b""))
            return await self._stream(exchange, live, spec.stdin, incoming)
        return await self._send_run(exchange, await self._service.runs.run(exchange.caller, spec))

    async def run_once(self, exchange: Exchange, request: Request) -> None:
        """Runs a command in a session of its own."""
        fields, incoming = await self._read_run(exchange, request)
        stream = fields.take_flag("stream") or incoming is not None
        linger, keep = fields.take_flag("linger"), fields.take_flag("keep")
        session = await requests.read_new_session(fields.take_fields("session"), self._service.default_limits)
        spec = requests.read_run_spec("", fields)
        if stream:
            unfed = dataclasses.replace(spec, stdin=b"")
            with _until_left(linger) as until:
                live = await self._service.runs.start_once(exchange.caller, session, unfed, keep=keep, until=until)
                await self._stream(exchange, live, spec.stdin, incoming)
                return await exchange.wait_left(LINGER) if linger else None
        return await self._send_run(
            exchange, await self._service.runs.run_once(exchange.caller, session, spec, keep=keep)
        )

    async def _send_run(self, exchange: Exchange, result: RunResult) -> None:
        await exchange.send_json(200, answers.show_run(result), answers.exit_header(result.exit_code))

    async def _read_run(self, exchange: Exchange, request: Request) -> tuple[Fields, Incoming | None]:
        """Reads a run as JSON; or from a first frame, which frames of the command's stdin follow."""
        if request.content_type != frames.CONTENT_TYPE:
            return await exchange.read_fields(request), None
        incoming = Incoming(exchange)
        first = await incoming.read_first()
        return Fields(decode_object(first.data)), incoming

    async def _stream(self, exchange: Exchange, live: LiveRun, stdin: bytes, incoming: Incoming | None) -> None:
        async def begin() -> None:
            await exchange.start_frames()
            started = {"run_id": live.run_id, "session_id": live.session_id}
            await exchange.send_frame(FrameKind.STARTED, to_json(started))

        async def send(chunk: Chunk) -> None:
            await exchange.send_frame(FrameKind(chunk.stream), *chunk.pieces)

        result = await stream_run(live, send, stdin=take_stdin(stdin, incoming), begin=begin)
        await exchange.send_frame(FrameKind.RESULT, to_json(answers.show_run_summary(result)))
        await exchange.end_frames(answers.exit_header(result.exit_code))

    async def list(self, exchange: Exchange, request: Request) -> None:
        runs = await self._service.runs.list(exchange.caller, request.path[2])
        await exchange.send_json(200, {"runs": [answers.show_run_summary(run) for run in runs]})

    async def list_processes(self, exchange: Exchange, request: Request) -> None:
        commands = await self._service.runs.commands(exchange.caller, request.path[2])
        await exchange.send_json(200, {"processes": [answers.show_command(command) for command in commands]})

    async def poll(self, exchange: Exchange, request: Request) -> None:
        texts = request.read_query(stdout_from="0", stderr_from="0", wait="0")
        try:
            stdout_from, stderr_from, wait = int(texts[0]), int(texts[1]), float(texts[2])
        except ValueError:
            raise invalid(
                "wait", "stdout_from, stderr_from and wait are numbers", hint="bytes, bytes, seconds"
            ) from None
        run = await self._service.runs.poll(
            exchange.caller, request.path[2], stdout_from=stdout_from, stderr_from=stderr_from, wait=wait
        )
        await exchange.send_json(200, answers.show_run(run), answers.exit_header(run.exit_code))

    async def kill(self, exchange: Exchange, request: Request) -> None:
        (await exchange.read_fields(request)).finish()
        had_ended = await self._service.runs.kill(exchange.caller, request.path[2])
        await exchange.send_json(200, {"ok": True, "had_ended": had_ended})

    async def signal(self, exchange: Exchange, request: Request) -> None:
        """Is a request of its own: in the run's it would wait behind input that the command does not read."""
        number = requests.read_signal(await exchange.read_fields(request))
        await self._service.runs.signal(exchange.caller, request.path[2], number)
        await exchange.send_json(200, {"ok": True})

    async def resize(self, exchange: Exchange, request: Request) -> None:
        size = requests.read_size(await exchange.read_fields(request))
        await self._service.runs.resize(exchange.caller, request.path[2], *size)
        await exchange.send_json(200, {"ok": True})


@contextlib.contextmanager
def _until_left(linger: bool) -> Iterator[asyncio.Future[None] | None]:
    """Yields what is done at the end of the block."""
    left: asyncio.Future[None] | None = asyncio.get_running_loop().create_future() if linger else None
    try:
        yield left
    finally:
        if left is not None:
            left.set_result(None)


class Incoming:
    """Reads the frames of a request's body, each when it is asked for."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._reader = FrameReader(MAX_MESSAGE)  # the first is the request, as large as any other
        self._ready: collections.deque[Frame] = collections.deque()
        self._given = 0  # bytes of the frame before, freed with the next read

    async def read_first(self) -> Frame:
        first = await self.read(BODY_PATIENCE)
        self._given = 0  # it stays in memory
        if first is None or first.kind is not FrameKind.REQUEST:
            raise BadFrame("the first frame is not the request")
        self._reader.limit = STDIN_FRAME
        return first

    async def read(self, patience: float | None = None) -> Frame | None:
        self._exchange.allocation.remove(self._given)
        self._given = 0
        while not self._ready:
            piece = await self._exchange.read_piece(patience)
            if piece is None:
                if not self._reader.between_frames:
                    raise BadFrame("the request ends inside a frame")
                return None
            await self._exchange.allocation.add(len(piece), long_lived=patience is None)
            self._ready.extend(self._reader.feed(piece))
        frame = self._ready.popleft()
        self._given = HEADER + len(frame.data)
        return frame


async def take_stdin(content: bytes, incoming: Incoming | None) -> AsyncGenerator[bytes, None]:
    """Yields the stdin of the request, and then that of the frames."""
    if content:
        yield content
    while incoming and (frame := await incoming.read()):
        if frame.kind is not FrameKind.STDIN:
            raise BadFrame(f"{frame.kind.name} is nothing to send to a running command")
        yield frame.data
