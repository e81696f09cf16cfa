"""Runs the system's tools (runc, mkfs, apt-get): exact argv, a deadline, errors that say what was tried.

A tool must not go on building a sandbox after the daemon that asked for it was killed, because its successor is taking
the same sandbox down. `setpriv --pdeathsig` has the kernel kill it with the daemon from the moment it is called; a
daemon that died before that moment is noticed by the shell after it, whose parent is then another process. The image of
a node's helper has neither program: there Python does both, which takes 33 ms instead of 4.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8e.engine import EngineError
from k8e.engine.local.system.calls import seccomp
from k8e.engine.tasks import finish

_CHECK_PARENT = 'test "$PPID" = "$0" && exec "$@"'
_CHECK_PARENT_IN_PYTHON = (
    "import ctypes, os, signal, sys\n"
    "if ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)  # 1: PR_SET_PDEATHSIG
_SHOWN = 2000  # bytes of a tool's complaint
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENV = {"PATH": _PATH, "LC_ALL": "C", "HOME": "/root"}


@dataclass(frozen=True, slots=True)
class ToolResult:
    argv: tuple[str, ...]
    status: int
    output: str  # standard error, or standard output when captured

    @property
    def complaint(self) -> str:
        return self.output.strip() or f"exit status {self.status}"


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=_PATH)


def bound_to(parent: int, words: Sequence[str]) -> list[str]:
    """Returns the command as a child that never outlives that process: it is killed with it, or never starts."""
    if find_tool("setpriv") is None:
        return [sys.executable, "-I", "-S", "-c", _CHECK_PARENT_IN_PYTHON, str(parent), *words]
    return ["setpriv", "--pdeathsig", "KILL", "--", "/bin/sh", "-c", _CHECK_PARENT, str(parent), *words]


async def try_tool(
    *argv: str | Path,
    deadline: float = 30.0,
    capture: bool = False,
    env: Mapping[str, str] | None = None,
) -> ToolResult:
    """Runs it to its end."""
    words = tuple(str(word) for word in argv)
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *bound_to(os.getpid(), words),
        stdin=null,
        stdout=pipe if capture else null,
        stderr=null if capture else pipe,
        env={**_ENV, **(env or {})},
        cwd="/",
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(deadline):
            out, err = await process.communicate()
    except BaseException as error:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if isinstance(error, TimeoutError):
            raise EngineError(os.path.basename(words[0]), f"no end after {deadline:g} s: {' '.join(words)}") from error
        raise
    text = out if capture else (err or b"")[-_SHOWN:]
    status = process.returncode if process.returncode is not None else -1
    return ToolResult(words, status, text.decode(errors="replace"))


async def try_runtime(
    *argv: str | Path, deadline: float, program: bytes | None = None, stdin: int = subprocess.DEVNULL
) -> ToolResult:
    """Runs it to its end, without any pipe: what a runtime starts would keep one open for good. `program`: a filter of
    the machine's kernel, under which it runs, and all that it starts. `stdin`: a descriptor for what it starts.

    A filter belongs to a thread, and a process inherits that of the thread that starts it: so one is made for that. It
    stays until the end of the tool, which is killed with its parent, and that is a thread, too. (asyncio's own way to
    start a process has such a thread as well, and costs more around it.)
    """
    loop, words = asyncio.get_running_loop(), tuple(str(word) for word in argv)
    ended: asyncio.Future[int] = loop.create_future()
    processes: list[subprocess.Popen[bytes]] = []

    def run() -> None:
        try:
            if program is not None:
                seccomp(program)
            processes.append(_start_quietly(words, stdin))
            settle(ended.set_result, processes[0].wait())
        except BaseException as error:  # noqa: BLE001 - all of them are for the caller, who waits
            settle(ended.set_exception, error)

    def settle(tell: Callable[[Any], None], outcome: object) -> None:
        # A caller who was cancelled waits in `finally`, for the thread's end.
        loop.call_soon_threadsafe(lambda: None if ended.done() else tell(outcome))

    thread = threading.Thread(target=run, name="k8e-runtime")
    thread.start()
    try:
        async with asyncio.timeout(deadline):
            status = await ended
    except TimeoutError as error:
        raise EngineError(os.path.basename(words[0]), f"no end after {deadline:g} s: {' '.join(words)}") from error
    finally:
        if not ended.done() or ended.cancelled():
            await finish(asyncio.to_thread(_end, thread, processes))
    return ToolResult(words, status, "")


def _start_quietly(words: Sequence[str], stdin: int) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen(
        bound_to(os.getpid(), words), stdin=stdin, stdout=null, stderr=null, env=_ENV, cwd="/", start_new_session=True
    )


def _end(thread: threading.Thread, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    while thread.is_alive():
        for process in processes:
            process.kill()  # nothing when it has ended
        thread.join(0.05)


async def run_tool(
    *argv: str | Path, deadline: float = 30.0, capture: bool = False, env: Mapping[str, str] | None = None
) -> str:
    finished = await try_tool(*argv, deadline=deadline, capture=capture, env=env)
    if finished.status != 0:
        raise EngineError(os.path.basename(finished.argv[0]), finished.complaint)
    return finished.output
