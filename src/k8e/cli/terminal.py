"""The user's terminal, handed to a command: raw while the command has it, as it was before and after. For both command
lines."""

from __future__ import annotations

import os
import termios
from _signal import set_wakeup_fd  # type: ignore[import-not-found] # the C inside `signal`
from select import POLLIN, poll

from k8e.cli.client import find_patience
from k8e.cli.process import has_terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INPUT, OUTPUT = 0, 1
IFLAG, OFLAG, CFLAG, LFLAG, CC = 0, 1, 2, 3, 6


def require(what: str, hint: str) -> None:
    if not has_terminal():
        from k8e.cli.process import Failure

        raise Failure("terminal_needed", f"{what} needs a terminal, and stdin or stdout is none", hint=hint)


def describe() -> dict[str, object]:
    """As a request has it."""
    rows, columns = measure()
    return {"rows": rows, "columns": columns, "term": os.environ.get("TERM", "")}


def measure() -> tuple[int, int]:
    """Rows and columns."""
    try:
        columns, rows = os.get_terminal_size(OUTPUT)
    except OSError:  # it is gone
        return 24, 80
    return rows, columns


class Terminal:
    def __init__(self) -> None:
        self._before: list[Any] | None = None

    def hand_over(self) -> None:
        """Sends every key to the command from now on, ^C too."""
        try:
            self._before = self._before or termios.tcgetattr(INPUT)
            mode = [*self._before[:CC], list(self._before[CC])]
            mode[IFLAG] &= ~(termios.BRKINT | termios.ICRNL | termios.INPCK | termios.ISTRIP | termios.IXON)
            mode[OFLAG] &= ~termios.OPOST
            mode[CFLAG] = mode[CFLAG] & ~(termios.CSIZE | termios.PARENB) | termios.CS8
            mode[LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
            mode[CC][termios.VMIN], mode[CC][termios.VTIME] = 1, 0
            termios.tcsetattr(INPUT, termios.TCSADRAIN, mode)
        except termios.error:
            pass  # it is gone

    def take_back(self) -> None:
        if self._before is not None:
            try:
                termios.tcsetattr(INPUT, termios.TCSADRAIN, self._before)
            except termios.error:
                pass
            self._before = None


class SignalWait:
    """Waits for the daemon and for signals alike. A signal that comes just before a plain recv would be handled only
    after it: Python notes a signal at once, but acts on it between two steps."""

    def __init__(self, descriptor: int) -> None:
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
