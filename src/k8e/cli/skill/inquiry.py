"""Asks an AI agent's own program, after an installation, whether it knows the server and can connect to it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from typing import Final

from k8e.cli.process import Failure
from k8e.profiles.text import clean

# Each prints a line for each server that it is configured with. The first two also connect to it.
QUESTIONS: Final = {
    "claude": ("claude", "mcp", "list"),
    "gemini": ("gemini", "mcp", "list"),
    "codex": ("codex", "mcp", "list"),
}
PATIENCE: Final = 90.0  # for a program that starts all of its servers
CONNECTED, LISTED, WAITING, FAILED, UNKNOWN, SILENT = (
    "connected",
    "listed",  # in the program's configuration; it does not say whether it can connect
    "waiting",  # for the user's consent
    "failed",
    "unknown",  # the program does not know the server
    "silent",  # no answer, or none that tells
)
# Words of the programs, for the state that they report of a server. The first that is found counts.
STATES: Final = (
    (WAITING, re.compile(r"pending|approv|untrusted|disabled", re.IGNORECASE)),
    (FAILED, re.compile(r"✗|✘|disconnected|fail|error", re.IGNORECASE)),
    (CONNECTED, re.compile(r"✓|✔|connected", re.IGNORECASE)),
)
COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Answer:
    program: str
    folder: str  # in which it was asked
    status: str = SILENT
    said: str = ""

    @property
    def body(self) -> dict[str, str]:
        body = {"program": self.program, "status": self.status, "said": self.said}
        return {**body, "hint": self.hint} if self.hint else body

    @property
    def hint(self) -> str:
        if self.status != WAITING:
            return ""
        return f"start {os.path.basename(self.program)} in {self.folder}, trust the folder and allow the server"

    def find_problem(self, agent: str, server: str) -> Failure | None:
        """The error that the program's answer means; the files were written."""
        if self.status == UNKNOWN:
            return Failure(
                "server_not_listed",
                f"{agent} does not list {server}, which was installed for it",
                detail=f"{self.program}: {self.said}",
                hint="another configuration may be in use: look at the variables of that program",
            )
        if self.status == FAILED:
            return Failure(
                "server_not_connected",
                f"{agent} cannot connect to {server}, which was installed for it",
                detail=self.said,
                hint="k8e sandbox status says whether the daemon answers this user",
            )
        return None


def ask(agent: str, server: str, folder: str) -> Answer | None:
    """None: there is no program to ask. `folder` is where the program is started."""
    words = QUESTIONS.get(agent)
    program = shutil.which(words[0]) if words else None
    if words is None or program is None:
        return None
    answer = Answer(program, folder)
    for _ in range(2):  # the first try may have started the daemon, for which some programs do not wait long enough
        output = run([program, *words[1:]], folder)
        answer = Answer(program, folder, *(read_state(output, server) if output is not None else ()))
        if answer.status != FAILED:
            break
    return answer


def read_state(output: str, server: str) -> tuple[str, str]:
    lines = [clean(line).strip() for line in COLOURS.sub("", output).splitlines()]
    said = [line for line in lines if line]
    for line in said:
        if re.match(rf"\W*{re.escape(server)}(?![\w-])", line):
            # What stands before the server's name or behind its command: the command itself may have any word.
            before, _, after = line.partition(server)
            state = before + after.rpartition(" - ")[2]
            return next((name for name, words in STATES if words.search(state)), LISTED), line
    return (UNKNOWN, said[-1]) if said else (SILENT, "")


def run(argv: list[str], folder: str) -> str | None:
    """Returns what the program prints; None if it fails, or has no end. The servers that it starts end with it."""
    try:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**os.environ, "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return output.decode(errors="replace") if process.returncode == 0 else None
