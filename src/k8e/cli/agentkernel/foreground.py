"""A command in a sandbox as if it were one of this machine: its streams are ours, and so are its signals, its terminal
and its exit code.

The request's body goes on while its answer comes: a thread sends stdin, the main one writes what arrives. Signals and
sizes go over connections of their own, because on the first one they would wait behind input that the command does
not read.
"""

from __future__ import annotations

import os
from _signal import SIG_IGN, set_wakeup_fd, signal  # type: ignore[import-not-found] # the C inside `signal`

from k8e.cli.agentkernel.output import say, tell
from k8e.cli.client.http import JSON, Client, find_patience, quote
from k8e.cli.client.response import nonsense, read_object
from k8e.cli.process import Failure, die_of, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.agentkernel.terminal import Console
    from k8e.cli.client.response import Response

STDOUT, STDERR, STARTED, RESULT, ERROR = 1, 2, 4, 5, 6
HUP, INT, QUIT, USR1, USR2, TERM, CONT, TTIN, WINCH = 1, 2, 3, 10, 12, 15, 18, 21, 28
ONCE = "/v1/runs"  # a session for one command
CANNOT_RUN, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127
CODES = {"program_not_found": NOT_FOUND, "program_not_executable": NOT_EXECUTABLE}


class Refused(Exception):
    """Nothing was run; the body says why."""

    def __init__(self, body: dict[str, str]) -> None:
        self.body = body
        super().__init__(body["code"])

    @property
    def status(self) -> int:
        return CODES.get(self.body["code"], CANNOT_RUN)


class Attention:
    """Waits for the daemon and for signals alike. One that comes just before a plain recv would be heard only after it:
    Python notes a signal at once, but acts on it between two steps."""

    def __init__(self, descriptor: int) -> None:
        from select import POLLIN, poll

        self._signals, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._poll = poll()
        self._patience = find_patience() / 3 * 1000
        for each in (descriptor, self._signals):
            self._poll.register(each, POLLIN)

    def wait(self) -> None:
        """Raises BlockingIOError when nothing came for a while, as a receive does."""
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll(self._patience)]
            if self._signals in ready:
                os.read(self._signals, 64)
            elif ready:
                return
            else:
                raise BlockingIOError


class Follower:
    """One run, from its request to its end."""

    def __init__(self, target: str, console: Console | None) -> None:
        self.session_id = ""
        self._target = target
        self._console = console
        self._run_id = ""
        self._sent: set[int] = set()
        self._client = Client()

    def start(self, members: str) -> Response:
        """`members` are those of the request's JSON object. Raises Refused."""
        if stdin_is_nothing():
            body = f'{{{members}, "stream": true}}'.encode("ascii")
            response = self._client.request("POST", self._target, body, JSON)
        else:
            response = self._client.upload(self._target, f"{{{members}}}".encode("ascii"))
        if response.status != 200:
            raise Refused(Failure.of(read_object(response)).body)
        return response

    def follow(self, response: Response) -> int:
        """The exit code: the command's own, or one of ours when it is not known."""
        try:
            return self._follow(response)
        finally:
            self._take_back()

    def _follow(self, response: Response) -> int:
        result = b""
        for kind, data in response.frames():
            if kind in (STDOUT, STDERR):
                write_all(kind, data)
            elif kind == STARTED:
                response.wait = Attention(response.descriptor).wait
                self._begin(data)
            elif kind == RESULT:
                result = data
            elif kind == ERROR:
                from k8e.cli.client.failures import parse_answer

                self._take_back()
                tell(Failure.of(parse_answer(data)).body)
                return CANNOT_RUN
        self._take_back()
        if not result:
            raise nonsense("a run without a result")
        if b'"denied": []' not in result:
            tell_denied(result, once=self._target == ONCE)
        if b'"status": "oom_killed"' in result:
            say("the sandbox was out of memory: --memory gives it more")
        return CANNOT_RUN if response.exit_code is None else response.exit_code

    def _begin(self, started: bytes) -> None:
        self._run_id, self.session_id = find_text(started, b"run_id"), find_text(started, b"session_id")
        for number in (HUP, INT, QUIT, TERM, USR1, USR2):
            signal(number, self._pass_on)
        if self._console is not None:
            self._console.hand_over()
            signal(WINCH, self._resize)
            signal(CONT, self._resume)
            self._resize()  # it may have changed while the sandbox was made
        if not stdin_is_nothing():
            from _thread import start_new_thread

            # Not the foreground's business, and no reason to stop the command: reading then simply ends.
            signal(TTIN, SIG_IGN)
            start_new_thread(self._feed, ())

    def _feed(self) -> None:
        try:
            self._client.feed(0)
        except Failure:  # unreadable, such as a terminal from the background: the command sees the end of its input
            self._client.end_feed()

    # Signals; Python calls these between two steps of the main thread

    def _pass_on(self, number: int, _frame: object) -> None:
        """A second time the same one means it: we go as the signal wants it, and the daemon ends the command."""
        if number in self._sent and number not in (USR1, USR2):
            self._take_back()
            die_of(number)
        self._sent.add(number)
        self._order("signal", f'{{"signal": {number:d}}}')
        if number == HUP and self._console is not None:
            from k8e.cli.agentkernel.terminal import is_there

            if not is_there():
                die_of(HUP)  # nobody sits there any more, and nobody will

    def _resize(self, *_: object) -> None:
        from k8e.cli.agentkernel.terminal import measure

        rows, columns = measure()
        self._order("resize", f'{{"rows": {rows}, "columns": {columns}}}')

    def _resume(self, *_: object) -> None:
        """The shell we were stopped under set the terminal as it likes it."""
        if self._console is not None:
            self._console.hand_over()
            self._resize()

    def _order(self, verb: str, body: str) -> None:
        try:
            Client().request("POST", f"/v1/runs/{quote(self._run_id)}/{verb}", body.encode(), JSON).read()
        except (Failure, OSError):
            pass  # no daemon: whoever reads its answer hears of that

    def _take_back(self) -> None:
        if self._console is not None:
            self._console.take_back()


def stdin_is_nothing() -> bool:
    """/dev/null, or what we were given instead of a closed one."""
    found = os.fstat(0)
    return found.st_mode & 0o170000 == 0o020000 and found.st_rdev == os.makedev(1, 3)


def find_text(content: bytes, name: bytes) -> str:
    """A member of an object that the daemon wrote, whose value needs no escapes."""
    return content.partition(b'"%b": "' % name)[2].partition(b'"')[0].decode("ascii")


def tell_denied(result: bytes, *, once: bool) -> None:
    """What the network refused to the command, a line each, after its last output. A sandbox that is gone (`once`) can
    be given nothing any more; the next one can."""
    from k8e.cli.client.failures import parse_answer

    content = parse_answer(result)
    for denial in content.get("denied", []):
        address = f"({denial['address']})" if denial["host"] and denial["address"] else denial["address"]
        where = " ".join(part for part in (denial["host"], address) if part)
        port = f":{denial['port']}" if denial["port"] else ""
        hint = f"--allowed-hosts {denial['host']}" if once and "allow-hosts" in denial["hint"] else denial["hint"]
        say(f"denied {where}{port}: {denial['reason']}; {hint}")
    if content.get("denied_more"):
        say(f"denied {content['denied_more']} more")
