"""Runs with open input, written once: _sync_interactive.py is generated from this file (scripts/unasync.py)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

import grpc

from sandbox_client import _requests as requests
from sandbox_client import sandbox_pb2 as pb
from sandbox_client._errors import Effect, InvalidArgument, RunLost, translate
from sandbox_client._model import Chunk, ChunkReader, RunResult

_AHEAD: Final = 4  # pieces that wait for the network; a writer waits behind them


class AsyncInteractiveRun:
    """A run whose input stays open until `close_stdin`: a block of `with`, in which pieces are written and the output
    is read as it comes. Leaving the block ends the command, if it still runs.

    `write` waits while the command does not read. A command that answers a lot while it is written to is read from at
    the same time, in another task or thread.
    """

    def __init__(
        self,
        request: pb.ExecRequest,
        begin: Callable[[pb.ExecRequest, AsyncIterator[pb.ExecInput]], Awaitable[Any]],
    ) -> None:
        self.run_id = ""
        self._request = request
        self._begin = begin
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_AHEAD)
        self._closed = False
        self._over = False
        self._call: Any = None
        self._frames: Any = None
        self._result: RunResult | None = None

    async def __aenter__(self) -> Self:
        self._call = await self._begin(self._request, self._inputs())
        # However the call ends: gRPC then takes no more pieces, and a writer would wait for ever.
        self._call.add_done_callback(lambda _: self._end())
        self._frames = aiter(self._call)
        try:
            first = await anext(self._frames, None)
        except grpc.RpcError as error:
            self._end()
            raise translate(error, Effect.RUNS) from error
        if first is None:
            raise self._describe_loss()
        self.run_id = first.started.run_id
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._call.cancel()  # after the end it has no effect

    @property
    def result(self) -> RunResult:
        """The result without output, which was streamed."""
        if self._result is None:
            raise RuntimeError("the run has not ended: read its output to the end first")
        return self._result

    async def write(self, data: str | bytes) -> None:
        """Writes text or bytes of any size. What a command does not read that has ended is dropped."""
        if self._closed:
            hint = "write before close_stdin()"
            raise InvalidArgument("the input is closed", code="invalid_argument", field="stdin", hint=hint)
        content = memoryview(data.encode() if isinstance(data, str) else data)
        for start in range(0, len(content), requests.PIECE):
            if not self._over:
                await self._pieces.put(bytes(content[start : start + requests.PIECE]))

    async def close_stdin(self) -> None:
        """The command sees the end of its input. Fine to call twice."""
        if not self._closed:
            self._closed = True
            if not self._over:
                await self._pieces.put(None)

    async def _inputs(self) -> AsyncIterator[pb.ExecInput]:
        yield pb.ExecInput(start=self._request)
        while not self._over and (piece := await self._pieces.get()) is not None:
            yield pb.ExecInput(stdin=piece)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        reader = ChunkReader()
        try:
            async for frame in self._frames:
                if frame.HasField("output"):
                    yield reader.read(frame.output)
                elif frame.HasField("result"):
                    self._result = RunResult.read(frame.result)
        except grpc.RpcError as error:
            raise translate(error, Effect.RUNS, self.run_id) from error
        finally:
            self._end()
        for chunk in reader.rest():
            yield chunk
        if self._result is None:
            raise self._describe_loss()

    def _describe_loss(self) -> RunLost:
        hint = "look at log() of the session"
        return RunLost("the stream ended before the run did", code="run_lost", hint=hint, run_id=self.run_id)

    def _end(self) -> None:
        """Wakes a writer, and what takes pieces to the network."""
        self._over = True
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                self._pieces.get_nowait()
        with contextlib.suppress(asyncio.QueueFull):
            self._pieces.put_nowait(None)
