"""What a gateway answered, as the commands know it from the daemon of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from k8e.cli.remote import messages
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.http import answers

STARTED, RESULT, ERROR = 4, 5, 6  # kinds of frames


class Reply:
    """An answer that came whole. Has what the commands use of `Response`."""

    def __init__(self, status: int, body: bytes, exit_code: int | None = None) -> None:
        self.status = status
        self.exit_code = exit_code
        self._body = body

    def read(self) -> bytes:
        return self._body

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """None: all of it is in `read`."""
        return iter(())


class LiveReply(Reply):
    """A command whose output is still coming."""

    def __init__(self, call: Any, explain: Callable[[grpc.RpcError], Reply]) -> None:
        super().__init__(200, b"")
        self._call = call
        self._explain = explain
        # Until it runs, an error is the whole answer.
        self._first: pb.ExecFrame = next(call)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        started = {"run_id": self._first.started.run_id, "session_id": self._first.started.session_id}
        yield STARTED, answers.encode(started)
        try:
            for frame in self._call:
                if frame.HasField("output"):
                    yield frame.output.stream, frame.output.data
                else:
                    result = messages.read_run(frame.result)
                    self.exit_code = result.exit_code
                    yield RESULT, answers.encode(answers.show_run_summary(result))
                    return
        except grpc.RpcError as error:
            yield ERROR, self._explain(error).read()
