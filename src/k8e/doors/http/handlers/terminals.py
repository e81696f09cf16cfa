"""Terminals over HTTP: the request's body is what is typed, the answer's is what is shown."""

from __future__ import annotations

from k8e.core.contract import TerminalService
from k8e.core.model import Chunk
from k8e.doors.http import answers, frames, requests
from k8e.doors.http.exchange import Exchange, Request
from k8e.doors.http.fields import Fields, decode_object
from k8e.doors.http.frames import FrameKind
from k8e.doors.http.handlers.runs import Incoming, take_stdin
from k8e.doors.http.routes import SESSIONS, Route
from k8e.doors.run_stream import stream_run
from k8e.profiles.text import to_json


class TerminalHandlers:
    def __init__(self, terminals: TerminalService) -> None:
        self._terminals = terminals

    @property
    def routes(self) -> tuple[Route, ...]:
        return (Route("POST", (*SESSIONS, "*", "terminals"), self.open, (frames.CONTENT_TYPE,)),)

    async def open(self, exchange: Exchange, request: Request) -> None:
        """Ends with the terminal's command, or when the client leaves, which does not end the command."""
        incoming = Incoming(exchange)
        first = await incoming.read_first()
        spec = requests.read_terminal_spec(request.path[2], Fields(decode_object(first.data)))
        live = await self._terminals.open(exchange.caller, spec)

        async def begin() -> None:
            await exchange.start_frames()
            await exchange.send_frame(FrameKind.STARTED, to_json(answers.show_terminal(live)))

        async def send(chunk: Chunk) -> None:
            await exchange.send_frame(FrameKind.STDOUT, *chunk.pieces)

        result = await stream_run(live, send, stdin=take_stdin(b"", incoming), begin=begin)
        await exchange.send_frame(FrameKind.RESULT, to_json(answers.show_run_summary(result)))
        await exchange.end_frames(answers.exit_header(result.exit_code))
