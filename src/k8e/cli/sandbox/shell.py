"""`k8e sandbox shell`: the user's terminal is that of a shell in a session, until the shell ends or the user leaves.

A thread sends what is typed, the main thread writes what comes. However this process ends, the shell runs on, unless it
has ended itself; and the user's terminal is as it was before.
"""

from __future__ import annotations

import os
from _signal import signal  # type: ignore[import-not-found] # the C inside `signal`

from k8e.cli import terminal
from k8e.cli.client import open_client
from k8e.cli.process import FAILED, Failure, ServiceError, die_of, read_some, write_all
from k8e.cli.sandbox.sessions import name_session
from k8e.profiles.text import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from k8e.cli.client.service import TerminalStream

HUP, INT, QUIT, TERM, CONT, WINCH = 1, 2, 3, 15, 18, 28
STDERR = 2
LEAVE = "ctrl-p ctrl-q leaves it running"
# What a program in the sandbox may have set and cannot take back any more: colours, keys, mouse, paste, cursor, screen.
PLAIN = b"\x1b[0m\x1b[?1l\x1b>\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1047l\x1b[?25h"


def shell(options: argparse.Namespace) -> int:
    terminal.require("a shell", f"k8e sandbox run -i COMMAND --session-id {options.sid} works as part of a pipe")
    wanted: dict[str, Any] = {"terminal": terminal.describe()}
    given = {"command": options.command, "user": options.user, "run_id": options.attach, "new": options.new}
    wanted |= {name: value for name, value in given.items() if value}
    stream = open_client().open_terminal(name_session(options), wanted)
    return Visit(stream, options.sid).follow()


class Visit:
    """A user's time at a terminal in a sandbox."""

    def __init__(self, stream: TerminalStream, sid: str) -> None:
        self._stream = stream
        self._sid = clean(sid)
        self._own = terminal.Terminal()
        self._left = False  # by the keys for it

    def follow(self) -> int:
        """Returns the exit code: the shell's own, 0 if the user left it running, 1 when it is unknown."""
        self._greet()
        try:
            self._begin()
            for piece in self._stream.output():
                write_all(terminal.OUTPUT, piece)
        except Failure as failure:
            self._restore(plain=True)
            if not self._left:
                raise self._explain(failure) from None
            say(f"detached; `k8e sandbox shell {self._sid}` comes back, until the session ends or expires")
            return 0
        finally:
            self._restore()
        result = self._stream.result
        if b'"denied": []' not in result.text:
            from k8e.cli.denials import list_denials

            for line in list_denials(result.parse()):
                say(line)
        if reason := result.reason:
            say(reason)
        return FAILED if result.exit_code is None else result.exit_code

    def _greet(self) -> None:
        stream = self._stream
        if stream.resumed:
            from k8e.cli.view.table import show_age

            what = f"back at {clean(stream.run_id)}, started {show_age(stream.started)}; --new opens another one"
        else:
            what = f"{clean(stream.run_id)} in {self._sid}"
        say(f"{what}; {LEAVE}")
        if stream.others:
            say(f"open elsewhere: {clean(', '.join(stream.others))}; --attach RUN-ID takes one over")

    def _explain(self, failure: Failure) -> Failure:
        """Says that the shell runs on: only the way to it was lost."""
        failure.more.setdefault("run_id", self._stream.run_id)
        if not isinstance(failure, ServiceError):
            failure.hint = f"the shell runs on: `k8e sandbox shell {self._sid}` comes back; {failure.hint}"
        return failure

    def _begin(self) -> None:
        for number in (HUP, INT, QUIT, TERM):
            signal(number, self._die)
        self._stream.heed_signals()
        self._own.hand_over()
        signal(WINCH, self._resize)
        signal(CONT, self._resume)
        self._resize()  # it may have changed meanwhile
        from _thread import start_new_thread

        start_new_thread(self._type, ())

    def _type(self) -> None:
        """In a thread. Sends what is typed."""
        from select import POLLIN, poll

        keyboard = poll()
        keyboard.register(terminal.INPUT, POLLIN)
        keys = LeavingKeys()
        try:
            while not self._left:
                if keyboard.poll(keys.patience):
                    piece = read_some(terminal.INPUT)
                    if not piece:
                        return  # the terminal is gone, and the main thread has a signal
                    typed, self._left = keys.take(piece)
                else:
                    typed = keys.give_up()
                if typed:
                    self._stream.write(typed)
            self._stream.close()
        except (Failure, OSError):
            pass  # the main thread says why

    # Signal handlers; Python calls them between two steps of the main thread

    def _die(self, number: int, _frame: object) -> None:
        self._restore(plain=True)
        die_of(number)

    def _resize(self, *_: object) -> None:
        try:
            self._stream.resize(*terminal.measure())
        except (Failure, OSError):
            pass

    def _resume(self, *_: object) -> None:
        """The shell under which we were stopped has set the terminal to its own mode."""
        self._own.hand_over()
        self._resize()

    def _restore(self, *, plain: bool = False) -> None:
        """`plain`: in the middle of what the shell shows."""
        if plain:
            try:
                os.write(terminal.OUTPUT, (PLAIN if os.environ.get("TERM", "dumb") != "dumb" else b"") + b"\r\n")
            except OSError:
                pass  # it is gone
        self._own.take_back()


class LeavingKeys:
    """Finds ctrl-p ctrl-q in what is typed. A ctrl-p is held back for a moment: the shell must not see the first half
    of it, and a user who means the shell's ctrl-p does not wait long."""

    FIRST, BOTH = b"\x10", b"\x10\x11"
    MOMENT = 500  # milliseconds

    def __init__(self) -> None:
        self._held = b""

    @property
    def patience(self) -> int | None:
        return self.MOMENT if self._held else None

    def take(self, piece: bytes) -> tuple[bytes, bool]:
        """Returns the keys for the shell, and whether the user leaves."""
        before, found, _ = (self._held + piece).partition(self.BOTH)
        self._held = self.FIRST if not found and before.endswith(self.FIRST) else b""
        return before.removesuffix(self._held) if self._held else before, bool(found)

    def give_up(self) -> bytes:
        held, self._held = self._held, b""
        return held


def say(line: str) -> None:
    write_all(STDERR, f"k8e: {line}\n".encode("utf-8", "backslashreplace"))
