"""Terminals over gRPC: what is typed and sizes come in, what is shown goes out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Final

from k8e.core.contract import LiveTerminal, TerminalService
from k8e.core.model import Chunk
from k8e.doors.errors import invalid
from k8e.doors.grpc import answers, requests
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.call import Call, Handler
from k8e.doors.grpc.errors import malformed
from k8e.doors.run_stream import stream_run

SECONDS: Final = 30 * 86_400.0  # of one connection; its certificate ends earlier
INPUT_PIECE: Final = 1 << 20


class TerminalHandlers:
    def __init__(self, terminals: TerminalService) -> None:
        self._terminals = terminals

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {"OpenTerminal": Handler(self._open, SECONDS)}

    async def _open(self, call: Call) -> None:
        """Ends with the terminal's command, or when the client leaves, which does not end the command."""
        first = await call.read_one(pb.OpenTerminalRequest)
        if first.WhichOneof("part") != "options":
            raise malformed("the first message has no options")
        with call.idle():
            live = await self._terminals.open(call.caller, requests.read_terminal_spec(first.options))

            async def begin() -> None:
                await call.write(pb.OpenTerminalResponse(opened=answers.show_terminal(live)))

            async def send(chunk: Chunk) -> None:
                await call.write(pb.OpenTerminalResponse(output=chunk.data))

            result = await stream_run(live, send, stdin=_take_input(call, live), begin=begin)
            await call.write(pb.OpenTerminalResponse(result=answers.show_run(result)))


async def _take_input(call: Call, live: LiveTerminal) -> AsyncGenerator[bytes, None]:
    """Yields what is typed; sizes are set on the way."""
    while (message := await call.read_idly(pb.OpenTerminalRequest)) is not None:
        part = message.WhichOneof("part")
        if part == "size":
            await live.resize(message.size.rows, message.size.columns)
        elif part != "input":
            raise malformed("a later message has no input and no size")
        elif len(message.input) > INPUT_PIECE:
            raise invalid("input", f"{len(message.input)} bytes at once, the limit is {INPUT_PIECE}")
        else:
            yield message.input
