"""A foreground run as if its command were a process of this machine: its streams are ours, and so are its signals, its
terminal and its exit code.

The request's body goes on while its answer comes: a thread sends stdin, the main thread writes what arrives. Signals
and sizes go over connections of their own, because on the first one they would wait behind input that the command does
not read.
"""

from __future__ import annotations

from _signal import SIG_IGN, signal  # type: ignore[import-not-found] # the C inside `signal`

from k8e.cli.agentkernel.output import say
from k8e.cli.client import LocalClient
from k8e.cli.process import Failure, die_of, has_terminal, stdin_is_null, write_all
from k8e.cli.terminal import SignalWait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.client.streams import LocalStream
    from k8e.cli.denials import Advise
    from k8e.cli.terminal import Terminal

HUP, INT, QUIT, USR1, USR2, TERM, CONT, TTIN, WINCH = 1, 2, 3, 10, 12, 15, 18, 21, 28
CANNOT_RUN = 125


class ForegroundRun:
    """Follows one run to its end. `advise` words the hints of denials in a sandbox that is made for this run."""

    def __init__(self, stream: LocalStream, terminal: Terminal | None, advise: Advise | None = None) -> None:
        self._stream = stream
        self._terminal = terminal
        self._advise = advise
        self._sent: set[int] = set()

    def follow(self) -> int:
        """Returns the exit code: the command's own, or CANNOT_RUN when it is unknown."""
        try:
            stream = self._stream
            stream.response.wait = SignalWait(stream.response.descriptor).wait
            self._begin()
            for descriptor, data in stream.output():
                write_all(descriptor, data)
        finally:
            self._restore_terminal()
        result = stream.result
        if b'"denied": []' not in result.text:
            from k8e.cli.denials import list_denials

            for line in list_denials(result.parse(), self._advise):
                say(line)
        if reason := result.reason:
            say(reason)
        if b'"status": "oom_killed"' in result.text:
            more = (
                "a larger --memory gives it more"
                if self._advise
                else "a sandbox that is created with a larger --memory has more"
            )
            say(f"the sandbox was out of memory: {more}")
        return CANNOT_RUN if result.exit_code is None else result.exit_code

    def _begin(self) -> None:
        for number in (HUP, INT, QUIT, TERM, USR1, USR2):
            signal(number, self._pass_on)
        if self._terminal is not None:
            self._terminal.hand_over()
            signal(WINCH, self._resize)
            signal(CONT, self._resume)
            self._resize()  # it may have changed while the sandbox was made
        if not stdin_is_null():
            from _thread import start_new_thread

            # A background process that reads its terminal is stopped; the command goes on, without input.
            signal(TTIN, SIG_IGN)
            start_new_thread(self._stream.feed, (0,))

    # Signal handlers; Python calls them between two steps of the main thread

    def _pass_on(self, number: int, _frame: object) -> None:
        """The same signal a second time ends this process too, and the daemon ends the command."""
        if number in self._sent and number not in (USR1, USR2):
            self._restore_terminal()
            die_of(number)
        self._sent.add(number)
        try:
            LocalClient().signal_run(self._stream.run_id, number)
        except (Failure, OSError):
            pass  # without a daemon, the main thread fails to read its answer, and says so
        if number == HUP and self._terminal is not None and not has_terminal():
            die_of(HUP)  # the terminal is gone for good

    def _resize(self, *_: object) -> None:
        from k8e.cli.terminal import measure

        try:
            LocalClient().resize_run(self._stream.run_id, *measure())
        except (Failure, OSError):
            pass

    def _resume(self, *_: object) -> None:
        """The shell under which we were stopped has set the terminal to its own mode."""
        if self._terminal is not None:
            self._terminal.hand_over()
            self._resize()

    def _restore_terminal(self) -> None:
        if self._terminal is not None:
            self._terminal.take_back()
