"""Runs with open input. Generated from _async_interactive.py by scripts/unasync.py: change that one."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Self

import grpc

from sandbox_client import _requests as requests
from sandbox_client import sandbox_pb2 as pb
from sandbox_client._errors import Effect, InvalidArgument, RunLost, translate
from sandbox_client._model import Chunk, ChunkReader, RunResult

_AHEAD: Final = 4  # pieces that wait for the network; a writer waits behind them


class InteractiveRun:
    """A run whose input stays open until `close_stdin`: a block of `with`, in which pieces are written and the output
    is read as it comes. Leaving the block ends the command, if it still runs.

    `write` waits while the command does not read. A command that answers a lot while it is written to is read from at
    the same time, in another task or thread.
    """

    def __init__(
        self,
        request: pb.ExecRequest,
        begin: Callable[[pb.ExecRequest, Iterator[pb.ExecInput]], Any],
    ) -> None:
        self.run_id = ""
        self._request = request
        self._begin = begin
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_AHEAD)
        self._closed = False
        self._over = False
        self._call: Any = None
        self._frames: Any = None
        self._result: RunResult | None = None

    def __enter__(self) -> Self:
        self._call = self._begin(self._request, self._inputs())
        # However the call ends: gRPC then takes no more pieces, and a writer would wait for ever.
        self._call.add_done_callback(lambda _: self._end())
        self._frames = iter(self._call)
        try:
            first = next(self._frames, None)
        except grpc.RpcError as error:
            self._end()
            raise translate(error, Effect.RUNS) from error
        if first is None:
            raise self._describe_loss()
        self.run_id = first.started.run_id
        return self

    def __exit__(
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

    def write(self, data: str | bytes) -> None:
        """Writes text or bytes of any size. What a command does not read that has ended is dropped."""
        if self._closed:
            hint = "write before close_stdin()"
            raise InvalidArgument("the input is closed", code="invalid_argument", field="stdin", hint=hint)
        content = memoryview(data.encode() if isinstance(data, str) else data)
        for start in range(0, len(content), requests.PIECE):
            if not self._over:
                self._pieces.put(bytes(content[start : start + requests.PIECE]))

    def close_stdin(self) -> None:
        """The command sees the end of its input. Fine to call twice."""
        if not self._closed:
            self._closed = True
            if not self._over:
                self._pieces.put(None)

    def _inputs(self) -> Iterator[pb.ExecInput]:
        yield pb.ExecInput(start=self._request)
        while not self._over and (piece := self._pieces.get()) is not None:
            yield pb.ExecInput(stdin=piece)

    def __iter__(self) -> Iterator[Chunk]:
        reader = ChunkReader()
        try:
            for frame in self._frames:
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
        with contextlib.suppress(queue.Empty):
            while True:
                self._pieces.get_nowait()
        with contextlib.suppress(queue.Full):
            self._pieces.put_nowait(None)
