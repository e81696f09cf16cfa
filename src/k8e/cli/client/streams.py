"""Answers of the daemon that come in frames: the output of a run, and the progress of long requests."""

from __future__ import annotations

from k8e.cli.client import Answer, LocalClient
from k8e.cli.client.http import Connection
from k8e.cli.client.response import Response, nonsense

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8e.cli.client import Show

STDOUT, STDERR, STARTED, RESULT, ERROR, PROGRESS = 1, 2, 4, 5, 6, 7  # kinds of frames


class LocalStream:
    def __init__(self, response: Response, connection: Connection) -> None:
        self.response = response
        self._connection = connection
        self._frames = response.frames()
        self._result = b""
        kind, data = next(self._frames, (0, b""))
        if kind != STARTED:
            raise nonsense("a run that has not started")
        self.run_id, self.session_id = find_text(data, b"run_id"), find_text(data, b"session_id")

    @property
    def result(self) -> Answer:
        return Answer(self._result, self.response.exit_code)

    def output(self) -> Iterator[tuple[int, bytes]]:
        for kind, data in self._frames:
            if kind in (STDOUT, STDERR):
                yield kind, data
            elif kind == RESULT:
                self._result = data
            elif kind == ERROR:
                from k8e.cli.client.failures import read_error

                raise read_error(data)
        if not self._result:
            raise nonsense("a run without a result")

    def feed(self, descriptor: int) -> None:
        self._connection.feed(descriptor)


class LocalTerminal:
    """Implements `service.TerminalStream`."""

    def __init__(self, response: Response, connection: Connection) -> None:
        from k8e.cli.client.failures import parse_object

        self._response = response
        self._connection = connection
        self._frames = response.frames()
        self._result = b""
        kind, data = next(self._frames, (0, b""))
        if kind != STARTED:
            raise nonsense("a terminal that was not opened")
        about = parse_object(data)
        self.run_id, self.others = str(about.get("run_id", "")), [str(each) for each in about.get("others", ())]
        self.resumed, self.started = bool(about.get("resumed")), float(about.get("started", 0))

    @property
    def result(self) -> Answer:
        return Answer(self._result, self._response.exit_code)

    def output(self) -> Iterator[bytes]:
        for kind, data in self._frames:
            if kind == STDOUT:
                yield data
            elif kind == RESULT:
                self._result = data
            elif kind == ERROR:
                from k8e.cli.client.failures import read_error

                raise read_error(data)
        if not self._result:
            raise nonsense("a terminal without a result")

    def heed_signals(self) -> None:
        from k8e.cli.terminal import SignalWait

        self._response.wait = SignalWait(self._response.descriptor).wait

    def write(self, keys: bytes) -> None:
        self._connection.type(keys)

    def resize(self, rows: int, columns: int) -> None:
        """On a connection of its own: on this one it would wait behind what the command does not read."""
        LocalClient().resize_run(self.run_id, rows, columns)

    def close(self) -> None:
        self._connection.shut()


class LocalPort:
    """A connection to a server inside a sandbox. One thread reads, another one writes."""

    def __init__(self, response: Response, connection: Connection) -> None:
        self._response = response
        self._connection = connection

    def pieces(self) -> Iterator[bytes]:
        """Yields what the server sends, to its end. Raises Failure when the connection breaks off."""
        return self._response.pieces()

    def write(self, piece: bytes) -> None:
        self._connection.write(piece)

    def close_write(self) -> None:
        self._connection.end_body()

    def close(self) -> None:
        self._connection.close()


def follow(response: Response, show: Show) -> Answer:
    from k8e.cli.client.failures import lost, parse_object, read_error

    result: Answer | None = None
    for kind, data in response.frames():
        if kind == PROGRESS:
            show(parse_object(data))
        elif kind == ERROR:
            raise read_error(data)
        elif kind == RESULT:
            result = Answer(data)
    if result is None:
        raise lost()
    return result


def find_text(content: bytes, name: bytes) -> str:
    """A member of an object that the daemon wrote, whose value needs no escapes."""
    return content.partition(b'"%b": "' % name)[2].partition(b'"')[0].decode("ascii", "replace")
