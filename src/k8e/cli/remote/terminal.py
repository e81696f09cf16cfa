"""A terminal in a sandbox, through a gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import grpc

from k8e.cli.client import Answer, SessionName
from k8e.cli.process import Failure
from k8e.cli.remote import messages
from k8e.cli.remote.calls import write
from k8e.cli.remote.messages import readable
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.http import answers

if TYPE_CHECKING:
    from k8e.cli.client.service import Wanted


class RemoteTerminal:
    """Implements `service.TerminalStream`. `begin` makes the call with what is to be sent."""

    def __init__(
        self,
        session: SessionName,
        wanted: Wanted,
        begin: Callable[[Iterator[pb.OpenTerminalRequest]], Any],
        explain: Callable[[Any], Failure],
    ) -> None:
        self._sent: SimpleQueue[pb.OpenTerminalRequest | None] = SimpleQueue()
        self._explain = explain
        self.result = Answer(b"")
        self._sent.put(pb.OpenTerminalRequest(options=describe(session, wanted)))
        self._call = begin(iter(self._sent.get, None))
        try:
            opened = next(self._call).opened
        except grpc.RpcError as error:
            self._sent.put(None)  # no thread of gRPC waits for more
            raise explain(error) from error
        self.run_id, self.resumed, self.started = opened.run_id, opened.resumed, opened.started
        self.others = list(opened.others)

    def output(self) -> Iterator[bytes]:
        try:
            for frame in self._call:
                if frame.HasField("output"):
                    yield frame.output
                elif frame.HasField("result"):
                    result = messages.read_run(frame.result)
                    self.result = write(answers.show_run_summary(result), result.exit_code)
                    return
        except grpc.RpcError as error:
            raise self._explain(error) from error
        cause = "the gateway's answer ended without a result"
        raise Failure("answer_unusable", cause, hint="is the gateway of this version?")

    def heed_signals(self) -> None:
        """gRPC's waits end every tenth of a second, for signals."""

    def write(self, keys: bytes) -> None:
        self._sent.put(pb.OpenTerminalRequest(input=keys))

    def resize(self, rows: int, columns: int) -> None:
        self._sent.put(pb.OpenTerminalRequest(size=pb.TerminalSize(rows=rows, columns=columns)))

    def close(self) -> None:
        self._call.cancel()


def describe(session: SessionName, wanted: Wanted) -> pb.TerminalOptions:
    own = wanted["terminal"]
    return pb.TerminalOptions(
        session_id=readable(session.session_id),
        **messages.split_text("command", wanted.get("command", "")),
        user=readable(wanted.get("user", "")),
        run_id=readable(wanted.get("run_id", "")),
        new=wanted.get("new", False),
        size=pb.TerminalSize(rows=own["rows"], columns=own["columns"]),
        term=readable(own["term"]),
    )
