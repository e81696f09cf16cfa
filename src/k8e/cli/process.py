"""How the process ends: with the right code, quickly, and as a signal wants it."""

from __future__ import annotations

import os
import sys

from k8e.errors import ExplainedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

UNREACHABLE = 2
FAILED = 1
SIGINT, SIGPIPE = 2, 13


class Failure(ExplainedError):
    """The request failed, or never reached the service. `status` is the exit code."""

    def __init__(self, code: str, error: str, *, detail: str = "", hint: str = "", status: int = FAILED) -> None:
        super().__init__(code, error, detail=detail, hint=hint)
        self.status = status
        self._answer: dict[str, str] | None = None

    @classmethod
    def of(cls, answer: dict[str, str], status: int = FAILED) -> Failure:
        """Takes over the error that the daemon or the gateway answered, with every member it has."""
        if not all(isinstance(answer.get(name), str) for name in ("code", "error")):
            from k8e.cli.client.failures import nonsense

            return nonsense("an error without a code")
        failure = cls(answer["code"], answer["error"], status=status)
        failure._answer = answer
        return failure

    @property
    def body(self) -> dict[str, str]:
        return self._answer or super().body


class OutputLost(Exception):
    """Standard output or error takes nothing any more, for another reason than that its reader left: a full disk."""


def ending_well(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    open_standard_streams()
    try:
        try:
            return command(arguments)
        except ExplainedError as error:
            from k8e.profiles.text import to_json

            write_all(1, to_json(error.body))
            return getattr(error, "status", FAILED)
    except KeyboardInterrupt:
        die_of(SIGINT)
    except BrokenPipeError:
        die_of(SIGPIPE)
    except OutputLost as lost:
        return tell_of_lost_output(str(lost))


def tell_of_lost_output(cause: str) -> int:
    """On stderr, which is what is left."""
    import json

    failure = Failure("output_lost", "the output cannot be written", detail=cause, hint="is the disk full?")
    try:
        os.write(2, json.dumps(failure.body).encode() + b"\n")
    except OSError:
        pass
    return failure.status


def open_standard_streams() -> None:
    """A shell can start us without some of them, and what we open next would be taken for one."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def die_of(number: int) -> NoReturn:
    """As if we had never caught it, so that a shell sees what happened: `$?` is 128 + number, and its loop ends too.

    The kernel closes our connection, and the daemon ends the command.
    """
    import signal

    sys.stdout = sys.stderr = None
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # in case it is blocked


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # Somebody we share the terminal or pipe with made it non-blocking.
            import select

            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        except BrokenPipeError:
            raise
        except OSError as error:
            if descriptor not in (1, 2):
                raise
            raise OutputLost(error.strerror) from error


def read_some(descriptor: int) -> bytes:
    """Nothing at the end."""
    while True:
        try:
            return os.read(descriptor, 256 << 10)
        except BlockingIOError:
            import select

            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        except OSError as error:
            raise Failure("stdin_unreadable", "standard input cannot be read", detail=str(error)) from error


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
