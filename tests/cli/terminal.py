"""A window with a terminal, and one command in it. Two of them are two windows of one person."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cli.machine import DEADLINE, Done, Machine, wait_until


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], keyboard: int) -> None:
        self.process = process
        self._keyboard = keyboard
        self.screen = b""  # what was written to the terminal itself
        self.stderr = b""
        self._readers = [threading.Thread(target=self._watch_screen), threading.Thread(target=self._watch_stderr)]
        for reader in self._readers:
            reader.start()

    def _watch_screen(self) -> None:
        with contextlib.suppress(OSError):  # the last program that had it open is gone
            while piece := os.read(self._keyboard, 4096):
                self.screen += piece

    def _watch_stderr(self) -> None:
        assert self.process.stderr is not None
        while piece := os.read(self.process.stderr.fileno(), 4096):
            self.stderr += piece

    def type(self, text: str, *, after: bytes = b"") -> None:
        wait_until(lambda: after in self.screen or self.process.poll() is not None)
        os.write(self._keyboard, text.encode())

    def wait_for_stderr(self, text: bytes) -> bytes:
        wait_until(lambda: text in self.stderr or self.process.poll() is not None)
        return self.stderr

    def finish(self) -> Done:
        assert self.process.stdout is not None
        stdout = self.process.stdout.read()
        code = self.process.wait(DEADLINE)
        for reader in self._readers:
            reader.join()
        return Done(code, stdout, self.stderr)


@contextlib.contextmanager
def open_terminal(machine: Machine, *command: str | Path, **settings: Any) -> Iterator[Terminal]:
    keyboard, device = os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],
        stdin=device,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=machine.env,
        cwd=machine.home,
        **settings,
    )
    os.close(device)
    terminal = Terminal(process, keyboard)
    try:
        yield terminal
    finally:
        if process.poll() is None:
            process.kill()
        terminal.finish()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        os.close(keyboard)
