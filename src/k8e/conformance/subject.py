"""The sandbox that a check runs against, and the functions with which checks use it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, Unpack

from k8e.link.errors import AgentError, BrokenInput, Code, NotStarted, Stage
from k8e.link.model import (
    ByteReader,
    Completed,
    ExecSpec,
    Identity,
    Process,
    Rlimit,
    Sandbox,
    TerminalSize,
)

DEFAULT_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LinkControl(Protocol):
    """Lets the test harness cut the connection to the sandbox."""

    async def drop(self) -> None:
        """Cuts the connection, wherever it is in a frame. It may come back at once."""

    def hold(self) -> AbstractAsyncContextManager[None]:
        """Cuts the connection and keeps it from coming back inside the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    sandbox: Sandbox
    directory: bytes  # empty, for this check alone, owned by `user` and writable for all users
    user: Identity  # not root
    path: bytes = DEFAULT_PATH
    bulk: int = 256 << 20  # bytes in the largest streams
    link: LinkControl | None = None  # "link": the connection can be cut
    small: bytes | None = None  # "small": a directory on a filesystem of its own with at most 4 MiB
    read_only: bytes | None = None  # "read_only": a directory on a read-only filesystem
    inotify_limit: int | None = None  # "inotify_limit": length of the kernel's queue of events, when it has one

    @property
    def provides(self) -> frozenset[str]:
        offers = {
            "link": self.link,
            "small": self.small,
            "read_only": self.read_only,
            "inotify_limit": self.inotify_limit,
        }
        return frozenset(name for name, offer in offers.items() if offer is not None)

    def inside(self, *names: bytes) -> bytes:
        return b"/".join((self.directory, *names))


class Options(TypedDict, total=False):
    """The fields of ExecSpec that checks set; see there."""

    env: tuple[tuple[bytes, bytes], ...]
    cwd: bytes
    identity: Identity
    stdin: bool
    terminal: TerminalSize | None
    timeout: float | None
    grace: float
    drain: float
    window: int
    umask: int
    rlimits: tuple[Rlimit, ...]
    detached: bool


def command(subject: Subject, *argv: str | bytes, **options: Unpack[Options]) -> ExecSpec:
    """A command of the unprivileged user in the check's directory, unless told otherwise."""
    words = tuple(word.encode() if isinstance(word, str) else word for word in argv)
    usual = ExecSpec(argv=words, env=((b"PATH", subject.path),), cwd=subject.directory, identity=subject.user)
    return replace(usual, **options)


def python(subject: Subject, code: str, *argv: str | bytes, **options: Unpack[Options]) -> ExecSpec:
    # -S -E: half the start-up time, and nothing of the image's own set-up in the way.
    return command(subject, "python3", "-S", "-E", "-c", code, *argv, **options)


async def read_all(reader: ByteReader) -> bytes:
    chunks = []
    while chunk := await reader.read():
        chunks.append(chunk)
    return b"".join(chunks)


async def read_until(reader: ByteReader, count: int) -> bytes:
    """Reads on until at least `count` bytes have come or the stream ends."""
    got = b""
    while len(got) < count and (chunk := await reader.read()):
        got += chunk
    return got


async def read_through(reader: ByteReader, end: bytes) -> bytes:
    got = b""
    while end not in got and (chunk := await reader.read()):
        got += chunk
    return got


async def feed(process: Process, content: bytes) -> None:
    """Writes all of stdin and closes it; a command that wants less of it is not an error here."""
    with contextlib.suppress(BrokenInput):
        if content:
            await process.write(content)
        await process.close_stdin()


async def finish(process: Process, stdin: bytes = b"") -> Completed:
    """Feeds it, reads both streams to their ends, and waits."""
    outputs = {}

    async def keep(name: str, reader: ByteReader) -> None:
        outputs[name] = await read_all(reader)

    await together(feed(process, stdin), keep("stdout", process.stdout), keep("stderr", process.stderr))
    return Completed(await process.wait(), outputs["stdout"], outputs["stderr"])


async def together(*parts: Coroutine[Any, Any, object]) -> None:
    """All at once. The first error is the error, by itself, and the others do not go on behind it."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def complete(subject: Subject, spec: ExecSpec, stdin: bytes = b"") -> Completed:
    return await finish(await subject.sandbox.start(spec), stdin)


async def run(subject: Subject, *argv: str | bytes, **options: Unpack[Options]) -> Completed:
    return await complete(subject, command(subject, *argv, **options))


async def run_python(subject: Subject, code: str, *argv: str | bytes, **options: Unpack[Options]) -> Completed:
    return await complete(subject, python(subject, code, *argv, **options))


async def prepare(subject: Subject, *argv: str | bytes, **options: Unpack[Options]) -> bytes:
    """Runs what a check needs before it begins: it must simply work. Returns its output."""
    done = await run(subject, *argv, **options)
    equal(f"exit code of {argv[0]!r} (stderr {shown(done.stderr)})", done.outcome.exit_code, 0)
    return done.stdout


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-100:]} ({len(text)} characters)"


def equal(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise AssertionError(f"{what}: expected {shown(expected)}, got {shown(got)}")


def holds(what: str, condition: bool, got: object) -> None:
    if not condition:
        raise AssertionError(f"{what}, but got {shown(got)}")


def ended(what: str, done: Completed, *, exit_code: int | None = None, signal: int | None = None) -> None:
    """The command ended like this and in no other way."""
    got = (done.outcome.exit_code, done.outcome.signal)
    if got != (exit_code, signal):
        raise AssertionError(
            f"{what}: expected (exit code, signal) {(exit_code, signal)}, got {got}, "
            f"stdout {shown(done.stdout)}, stderr {shown(done.stderr)}"
        )


async def refused(what: str, attempt: Awaitable[object], *codes: Code) -> AgentError:
    """The agent refuses the attempt with one of the codes."""
    expected = " or ".join(code.name for code in codes)
    try:
        result = await attempt
    except AgentError as error:
        holds(f"{what}: expected {expected}", error.code in codes, f"{error.code.name} ({error})")
        return error
    raise AssertionError(f"{what}: expected {expected}, got {shown(result)}")


async def not_started(subject: Subject, spec: ExecSpec, stage: Stage, *codes: Code) -> None:
    """The command does not start, for one of these reasons, and that is said."""
    what = f"starting {shown(spec.argv[0])}"
    expected = " or ".join(code.name for code in codes)
    try:
        process = await subject.sandbox.start(spec)
    except NotStarted as error:
        holds(f"{what}: expected {expected}", error.code in codes, f"{error.code.name} ({error})")
        equal(f"{what}: stage", error.stage.name, stage.name)
        return
    done = await finish(process)
    raise AssertionError(f"{what}: expected NotStarted, {expected} at {stage.name}, got {shown(done)}")


def unique_mark() -> bytes:
    """An argument that finds a process again in /proc; also a number that `sleep` takes."""
    return b"0.%015d" % secrets.randbelow(10**15)


FIND_MARK = """
import os
mark = os.environb[b"MARK"]
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            cmdline = file.read()
    except OSError:
        continue
    if mark in cmdline.split(b"\\0"):
        print(pid)
"""


async def find_processes(subject: Subject, mark: bytes) -> list[int]:
    """The processes inside the sandbox that carry the mark. It travels as env, so the search is not in its result."""
    done = await run_python(subject, FIND_MARK, env=((b"PATH", subject.path), (b"MARK", mark)))
    ended("looking for processes", done, exit_code=0)
    return [int(pid) for pid in done.stdout.split()]


async def one_process(subject: Subject, what: str, mark: bytes) -> None:
    """Exactly one carries the mark. A child that its parent left behind may not have become what it is to be yet."""
    end = time.monotonic() + 10
    while not (found := await find_processes(subject, mark)) and time.monotonic() < end:
        pass
    equal(what, len(found), 1)


async def no_process(subject: Subject, what: str, mark: bytes) -> None:
    """None carries the mark any more. Who was killed by others than the agent may need a moment to be gone."""
    end = time.monotonic() + 10
    while (found := await find_processes(subject, mark)) and time.monotonic() < end:
        pass
    equal(what, found, [])


async def kill_processes(subject: Subject, mark: bytes) -> None:
    for pid in await find_processes(subject, mark):
        await run(subject, "kill", "-9", str(pid))
