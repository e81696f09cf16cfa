"""The process around a command: its errors, its exit code, its standard streams, and its end by a signal."""

from __future__ import annotations

import os
import sys

from k8e.errors import ExplainedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

UNREACHABLE = 2
FAILED = 1
SIGINT, SIGPIPE = 2, 13
EBADF = 9
CLOSED_STREAM = "it was closed: leave `>&-` out, or send it to /dev/null"

_json = False  # whatever reads our output


class Failure(ExplainedError):
    """Ends the command. `status` is the exit code; `more` has further members of the body."""

    def __init__(
        self,
        code: str,
        error: str,
        *,
        detail: str = "",
        hint: str,
        status: int = FAILED,
        more: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(code, error, detail=detail, hint=hint)
        self.status = status
        self.more = more or {}

    @property
    def body(self) -> dict[str, Any]:
        return super().body | self.more


class ServiceError(Failure):
    """The daemon or the gateway answered with this error: the request arrived, and was refused or failed."""


class OutputLost(Exception):
    """Standard output or error cannot be written, for another reason than a closed pipe: a full disk, or the caller
    closed it (`>&-`)."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        hint = CLOSED_STREAM if error.errno == EBADF else "is the disk full?"
        self.failure = Failure("output_lost", "the output cannot be written", detail=error.strerror or "", hint=hint)


def run_command(command: Callable[[list[str]], int], arguments: list[str]) -> NoReturn:
    """Ends with the exit code. An error is printed as one JSON object; for a person at a terminal, as text on stderr.

    Without Python's own end: that takes a sixth of the time of its start, and a process that has used gRPC can hang in
    it. Python stops gRPC's threads wherever they are, also with a lock that a destructor waits for."""
    status = run_to_end(command, arguments)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # closed, or never opened
            pass
    os._exit(status)


def run_to_end(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    open_standard_streams()
    try:
        try:
            return command(arguments)
        except ExplainedError as error:
            from k8e.cli.view import show_error

            show_error(error.body)
            return getattr(error, "status", FAILED)
    except KeyboardInterrupt:
        die_of(SIGINT)
    except BrokenPipeError:
        die_of(SIGPIPE)
    except OutputLost as lost:
        return report_lost_output(lost)


def report_lost_output(lost: OutputLost) -> int:
    """On stderr: stdout is the stream that failed."""
    try:
        print_json(lost.failure.body, 2)
    except (OSError, OutputLost):
        pass
    return lost.failure.status


def want_json() -> None:
    """Prints JSON from now on, also at a terminal: `--json` was given."""
    global _json
    _json = True


def is_for_person(descriptor: int = 1) -> bool:
    """Whether a person reads that stream, at a terminal; programs get JSON."""
    return not _json and os.isatty(descriptor)


def print_json(value: object, descriptor: int = 1) -> None:
    from k8e.profiles.text import to_json

    write_all(descriptor, to_json(value))


def has_terminal() -> bool:
    """Whether a person is there: at a terminal, which is our input and our output."""
    return os.isatty(0) and os.isatty(1)


def stdin_is_null() -> bool:
    """Whether stdin is /dev/null, or was closed."""
    found = os.fstat(0)
    return found.st_mode & 0o170000 == 0o020000 and found.st_rdev == os.makedev(1, 3)


def open_standard_streams() -> None:
    """Opens /dev/null for each that a shell has closed; else the next file we open would take its number. For reading
    only: what is written to a closed stream is lost, and that is an error."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)


def die_of(number: int) -> NoReturn:
    """Dies of the signal as if it had never been caught, so that a shell sees it: `$?` is 128 + number, and its loop
    ends too. The kernel closes our connection, and the daemon ends the command."""
    import signal

    sys.stdout = sys.stderr = None
    if os.name == "posix":
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 + number)  # in case it is blocked, or there are no signals


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # Another process that shares the terminal or pipe made it non-blocking.
            import select

            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        except BrokenPipeError:
            raise
        except OSError as error:
            if descriptor not in (1, 2):
                raise
            raise OutputLost(error) from error


def read_some(descriptor: int) -> bytes:
    """Returns what can be read now; b"" at the end."""
    while True:
        try:
            return os.read(descriptor, 256 << 10)
        except BlockingIOError:
            import select

            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        except OSError as error:
            hint = "give it a file, a pipe or /dev/null: `< FILE`"
            raise Failure("stdin_unreadable", "standard input cannot be read", detail=str(error), hint=hint) from error


def read_all(descriptor: int, limit: int) -> bytes:
    pieces = []
    size = 0
    while piece := read_some(descriptor):
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise Failure(
                "message_too_large",
                f"standard input has more than {limit} bytes",
                hint="send it in parts: `k8e sandbox write --mode a` appends",
            )
    return b"".join(pieces)
