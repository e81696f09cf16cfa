"""The bridge between an AI agent's pipes and the service, which outlives its connection: when the daemon ends, the next
message of the agent goes to the next daemon.

For that it knows a little of what it carries: the handshake, which it repeats to the next daemon, and the requests
without an answer. A daemon that is told to stop answers every request that it has read, and then ends the connection in
order: requests without an answer were not read, and are sent to the next daemon. So does one that has no memory for a
request, after it has said so: then they are refused, as the next daemon has no more. A connection that breaks says
nothing: each such request may have run, is never sent again, and the agent is told. `json` takes longer to import than
everything else here; `_json` is the C inside it.
"""

from __future__ import annotations

import time
from _json import make_scanner
from _thread import allocate_lock

from k8e.cli.process import UNREACHABLE, Failure, OutputLost, ServiceError, print_json, read_some, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, Protocol

    class Link(Protocol):
        """One connection to the service."""

        def send(self, data: bytes) -> None:
            """Raises OSError when the connection has ended."""

        def end_input(self) -> None: ...
        def receive(self) -> Iterable[bytes]:
            """Ends when the daemon ends the connection in order. Raises Failure."""

        def shut_down(self) -> None: ...


MARK = b"\x1e"
AGAIN = MARK + b'{"again": true}\n'
LONGEST = 64 << 20  # bytes of a line; the daemon refuses longer ones, which are passed on in pieces
PATIENCE = 20.0  # seconds for the next daemon
PAUSE = 0.1
CLOSED = -32000  # JSON-RPC's code for a connection that has ended
# The daemon is about to end, or does not run yet: nothing was done.
NOT_YET = ("daemon_stopping", "daemon_not_running", "unreachable")
NO_ROOM = "too_many_bytes"
LOST = Failure(
    "connection_lost",
    "the daemon went away before it had answered",
    hint="this call may have run; the sessions of this connection are gone, and the next call goes to the next daemon",
)


class Syntax:
    """As `json.loads` reads it."""

    strict, object_hook, object_pairs_hook, memo = True, None, None, None
    parse_float, parse_int, parse_constant = float, int, float


scan = make_scanner(Syntax())  # type: ignore[arg-type]


def read_message(line: bytes) -> dict[str, Any]:
    """Empty: no message, which the daemon explains. SystemError: the error itself would be made by `json.decoder`."""
    try:
        message, _ = scan(line.decode().strip(), 0)
    except (ValueError, StopIteration, RecursionError, SystemError):
        return {}
    return message if isinstance(message, dict) else {}


class Ledger:
    """The messages that have to be known when a connection ends."""

    def __init__(self) -> None:
        self.pending: dict[str, bytes] = {}  # requests without an answer, by id
        self.unsent: set[str] = set()  # those that no daemon has got
        self.refusal: Failure | None = None  # of a request that the daemon has not read to its end, and so has no id
        self._handshake: dict[str, bytes] = {}  # by method
        self._asked = ""  # the id of the handshake
        self._repeated = False  # the next answer to the handshake is not for the agent

    def note_sent(self, line: bytes) -> str:
        """Returns the id of a request; empty: it is no request."""
        message = read_message(line)
        method = message.get("method")
        if method in ("initialize", "notifications/initialized"):
            self._handshake[method] = line
        if method == "notifications/cancelled" and isinstance(message.get("params"), dict):
            self.pending.pop(repr(message["params"].get("requestId")), None)
        if not method or message.get("id") is None:
            return ""
        number = repr(message["id"])
        self.pending[number] = line
        if method == "initialize":
            self._asked = number
        return number

    def note_received(self, line: bytes) -> bool:
        """Whether the line is for the agent."""
        message = read_message(line)
        if "method" in message or message.get("id") is None:
            self.refusal = read_refusal(message) or self.refusal
            return True
        number = repr(message["id"])
        if self._repeated and number == self._asked:
            self._repeated = False
            return False
        self.pending.pop(number, None)
        return True

    def repeat(self) -> list[bytes]:
        """The lines with which the next connection begins. Requests without an answer are sent now."""
        lines = []
        if self._asked and self._asked not in self.pending:
            self._repeated = True
            lines = list(self._handshake.values())
        self.unsent.clear()
        self.refusal = None
        return [*lines, *self.pending.values()]


class Bridge:
    """The main thread reads from the service, another one from the agent."""

    def __init__(self, connect: Callable[[], Link], answer: Callable[[bytes], bytes] | None = None) -> None:
        """`answer` answers a request of the daemon to the bridge."""
        self._connect = connect
        self._answer = answer
        self._ledger = Ledger()
        self._link: Link | None = None
        self._sending = allocate_lock()  # held by the thread that uses the link or replaces it
        self._writing = allocate_lock()
        self._wake = allocate_lock()  # released when the main thread has something to do
        self._ended = False  # the agent sends no more
        self._left = False  # the agent reads no more
        self._deadline = 0.0  # for the next daemon; 0: none is waited for

    def run(self) -> int:
        """Raises Failure when the first connection is refused."""
        from _thread import start_new_thread

        link: Link | None = self._connect()
        self._link = link
        self._wake.acquire()
        start_new_thread(self._carry, ())
        first = True
        while link is not None:
            failure = self._read(link, first=first)
            first = False
            with self._sending:
                self._link = None
                if self._left:
                    return 0
                ended = self._ended
                self._settle(failure)
            link = self._wait()
            if link is None and ended and failure is not None:
                raise failure
        return 0

    def _wait(self) -> Link | None:
        """Returns the next connection, once the agent asks for something; None when it asks no more. Connections are
        made by the main thread: the others must not be the first to import `threading`, which would wait for them."""
        while True:
            with self._sending:
                if self._link is None and self._ledger.pending:
                    self._open()
                if self._link is not None or self._ended:
                    return self._link
            self._wake.acquire()

    # From the service to the agent

    def _read(self, link: Link, *, first: bool) -> Failure | None:
        """Returns why the connection ended. None: the daemon ended it in order."""
        try:
            for line in split_lines(link.receive()):
                self._deadline = 0.0
                if line.startswith(MARK):
                    self._reply(link, line)
                elif self._ledger.note_received(line):
                    self._write(line)
        except Failure as failure:
            later = not first and (isinstance(failure, ServiceError) or is_early(failure))
            if self._left or later or failure.code in ("connection_lost", "daemon_stopping"):
                return failure
            raise
        return None

    def _reply(self, link: Link, request: bytes) -> None:
        """In a thread: an answer takes its time."""
        from _thread import start_new_thread

        answer = self._answer
        if answer is None:
            return

        def reply() -> None:
            line = MARK + answer(request[len(MARK) :]) + b"\n"
            with self._sending:
                if self._link is link:
                    try:
                        link.send(line)
                    except OSError:
                        pass  # the main thread notices

        start_new_thread(reply, ())

    def _settle(self, failure: Failure | None) -> None:
        """Answers or sends again what was pending when a connection ended."""
        ledger = self._ledger
        if failure is None and ledger.refusal is not None:
            for number in list(ledger.pending):  # it was for one of them, and nothing was done for any
                self._refuse(number, ledger.refusal)
        elif failure is not None and is_early(failure) and self._is_patient():
            time.sleep(PAUSE)
        elif failure is not None:
            told = LOST if failure.code == "connection_lost" else failure
            for number in [each for each in ledger.pending if each not in ledger.unsent]:
                self._refuse(number, told)
        if ledger.pending:
            self._open()

    def _is_patient(self) -> bool:
        """Whether there is still time for the next daemon."""
        self._deadline = self._deadline or time.monotonic() + PATIENCE
        return time.monotonic() < self._deadline

    # From the agent to the service

    def _carry(self) -> None:
        """Sends standard input to its end, then waits until the agent closes our standard output: answers may come
        until then, and the connection ends after it."""
        try:
            for line in split_lines(read_pieces(), rest=True):
                if MARK in line:  # only the bridge sends marked lines; as MARK is no JSON, the line stays invalid
                    line = line.replace(MARK, b"\x1f")
                with self._sending:
                    self._send(line)
        except Failure as failure:
            print_json(failure.body, 2)
        with self._sending:
            self._ended = True
            if self._link is None:
                self._rouse()
                return
            try:
                self._link.end_input()
            except OSError:
                pass  # the main thread notices
        import select

        poll = select.poll()
        poll.register(1, 0)
        poll.poll()
        with self._sending:
            self._left = True
            if self._link is not None:
                self._link.shut_down()

    def _send(self, line: bytes) -> None:
        number = self._ledger.note_sent(line)
        if self._link is None:
            if number:  # a notification is about a connection that has ended
                self._rouse()
            return
        try:
            self._link.send(line)
        except OSError:
            self._ledger.unsent.add(number)

    def _rouse(self) -> None:
        if self._wake.locked():
            self._wake.release()

    def _open(self) -> None:
        """Connects to the next daemon, or tells the agent why not."""
        while True:
            try:
                link = self._connect()
                try:
                    link.send(b"".join([AGAIN, *self._ledger.repeat()]))
                    if self._ended:
                        link.end_input()
                except OSError:
                    pass  # a part may have been read: how the connection ended says what to do
                self._link = link
                return
            except OSError as error:  # it ended at once: nothing was read
                hint = "nothing was done: try again"
                failure = Failure("daemon_unreachable", "the daemon cannot be reached", detail=str(error), hint=hint)
                passing = True
            except Failure as refusal:
                failure, passing = refusal, is_early(refusal)
            if not (passing and self._is_patient()):
                self._deadline = 0.0
                for number in list(self._ledger.pending):
                    self._refuse(number, failure)
                return
            time.sleep(PAUSE)

    # Answers of the bridge itself

    def _refuse(self, number: str, failure: Failure) -> None:
        line = self._ledger.pending.pop(number, None)
        if line is not None:
            try:
                self._write(write_error(line, failure))
            except (OSError, OutputLost):
                pass  # the agent has left

    def _write(self, line: bytes) -> None:
        with self._writing:
            write_all(1, line)


def is_early(failure: Failure) -> bool:
    """Whether nothing was done, and the next daemon may be there soon. A daemon that was killed takes connections until
    its last thread has ended; the kernel then resets them."""
    reset = failure.code == "connection_lost" and failure.status == UNREACHABLE
    return reset or failure.code in NOT_YET


def read_refusal(message: dict[str, Any]) -> Failure | None:
    """The error with which a daemon that has no memory for a request ends the connection."""
    error = message.get("error")
    data = error.get("data") if isinstance(error, dict) else None
    if not (isinstance(error, dict) and isinstance(data, dict) and data.get("code") == NO_ROOM):
        return None
    return Failure(NO_ROOM, error["message"], detail=data["detail"], hint=data["hint"])


def write_error(request: bytes, failure: Failure) -> bytes:
    """The answer to a request that has no other."""
    import json

    error = {"code": CLOSED, "message": f"{failure.error}: {failure.hint}", "data": failure.body}
    return json.dumps({"jsonrpc": "2.0", "id": read_message(request)["id"], "error": error}).encode("ascii") + b"\n"


def read_pieces() -> Iterator[bytes]:
    while piece := read_some(0):
        yield piece


def split_lines(pieces: Iterable[bytes], *, rest: bool = False) -> Iterator[bytes]:
    """Whole lines; one that is too long comes in pieces. `rest`: the last line needs no end, and gets one."""
    begun: list[bytes] = []
    size = 0
    for piece in pieces:
        *ends, last = piece.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end, b"\n"])
            begun, size = [], 0
        if last:
            begun.append(last)
            size += len(last)
        if size > LONGEST:
            yield b"".join(begun)
            begun, size = [], 0
    if rest and begun:
        yield b"".join(begun) + b"\n"
