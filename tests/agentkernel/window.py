"""A window with a terminal, whose streams all belong to one program; and a user who types."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cli.machine import DEADLINE, Machine, wait_until


class Window:
    def __init__(self, process: subprocess.Popen[bytes], keyboard: int, mode_before: list[object]) -> None:
        self.process = process
        self.screen = b""
        self.before = b""  # what was on the screen before what was last waited for
        self.mode_before = mode_before
        self._keyboard = keyboard
        self._lock = threading.Lock()  # what the reader adds is not lost while a test cuts
        self._reader = threading.Thread(target=self._watch)
        self._reader.start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # the last program that had it open is gone
            while piece := os.read(self._keyboard, 65536):
                with self._lock:
                    self.screen += piece

    def wait_for(self, text: bytes) -> None:
        """Until it is on the screen; what came before it is forgotten."""
        wait_until(lambda: text in self.screen or self.process.poll() is not None)
        assert text in self.screen, self.screen
        with self._lock:
            self.before, _, self.screen = self.screen.partition(text)

    def type(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def mode(self) -> list[object]:
        return termios.tcgetattr(self._keyboard)

    @mode.setter
    def mode(self, mode: list[object]) -> None:
        termios.tcsetattr(self._keyboard, termios.TCSANOW, mode)  # type: ignore[arg-type]

    def finish(self) -> int:
        code = self.process.wait(DEADLINE)
        self._reader.join()
        return code


@contextlib.contextmanager
def open_window(
    machine: Machine, command: Sequence[str | Path], rows: int = 33, columns: int = 101
) -> Iterator[Window]:
    keyboard, device = os.openpty()
    fcntl.ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    mode_before = termios.tcgetattr(keyboard)
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],
        stdin=device,
        stdout=device,
        stderr=device,
        env={**machine.env, "TERM": "xterm-color"},
        cwd=machine.home,
    )
    os.close(device)
    window = Window(process, keyboard, mode_before)
    try:
        yield window
    finally:
        if process.poll() is None:
            process.kill()
        window.finish()
        os.close(keyboard)
