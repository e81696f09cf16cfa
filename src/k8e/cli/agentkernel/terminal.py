"""The user's terminal, handed to a command: raw while the command has it, as it was before and after."""

from __future__ import annotations

import os
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INPUT, OUTPUT = 0, 1
IFLAG, OFLAG, CFLAG, LFLAG, CC = 0, 1, 2, 3, 6


def is_there() -> bool:
    return os.isatty(INPUT) and os.isatty(OUTPUT)


def require() -> None:
    """For -t."""
    if not is_there():
        from k8e.cli.process import Failure

        error, hint = "-t needs a terminal, and stdin or stdout is none", "leave -t out: both are the command's anyway"
        raise Failure("terminal_needed", error, hint=hint)


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
