"""Parked interpreters as the agent sees them: what waits is played by scripts, which say and do what a loader might."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from k8e.conformance.registry import check
from k8e.conformance.subject import Subject, command, ended, equal, finish, holds, python, refused
from k8e.link.errors import Code
from k8e.link.model import AGENT, ExecSpec

LOADER = b"/no/such/loader.so"  # the linker says so on stderr and goes on
# Hears a program; `taken` becomes it.
_HEAR = """
import os, struct
def hear(count):
    got = b""
    while len(got) < count and (more := os.read(63, count - len(got))): got += more
    return got
os.write(63, b"P")
quiet, cwd, code = struct.unpack("<3I", hear(12))
cwd, code = hear(cwd), hear(code)
"""
_TAKE = _HEAR + 'os.write(63, b"T"); os.close(63); os.chdir(cwd); exec(code)'
_DECLINE = _HEAR + 'os.write(63, b"N")'
_DIE = _HEAR + "os.kill(os.getpid(), 9)"
_IGNORE = _HEAR + "import time; time.sleep(600)"
# Says that it makes copies, and hears of the first.
_FORKS = """
import os, socket, struct, time
own = socket.socket(fileno=63)
own.send(b"F")
_, files, _, _ = socket.recv_fds(own, 1, 4)
def claim(pid): os.write(files[3], b"P" + struct.pack("<i", pid)); time.sleep(600)
"""


async def park(subject: Subject, script: str, *, keep: float | None = None) -> None:
    await subject.sandbox.park(python(subject, script), LOADER, keep=keep)


async def start(subject: Subject, spec: ExecSpec, stdin: bytes = b"") -> tuple[bytes, int | None, bool]:
    process = await subject.sandbox.start(replace(spec, parked=True))
    done = await finish(process, stdin)
    return done.stdout, done.outcome.exit_code, process.handed_over


@check()
async def check_a_program_is_handed_over_once(subject: Subject) -> None:
    await park(subject, _TAKE)
    equal("commands while one waits", await subject.sandbox.commands(), [])
    spec = python(subject, "import os, sys; print(os.getcwd(), sys.stdin.read(), os.getppid() > 0); sys.exit(5)")
    expected = subject.directory + b" input True\n"
    equal("handed over", await start(subject, spec, b"input"), (expected, 5, True))
    equal("the plain way", await start(subject, spec, b"input"), (expected, 5, False))


@check()
async def check_one_that_declines_or_dies_loses_nothing(subject: Subject) -> None:
    spec = python(subject, "import sys; print(len(sys.stdin.read()))")
    for what, script in (("declined", _DECLINE), ("died", _DIE)):
        await park(subject, script)
        equal(what, await start(subject, spec, b"x" * 200_000), (b"200000\n", 0, False))


@check()
async def check_one_that_does_not_answer_is_not_waited_for_long(subject: Subject) -> None:
    await park(subject, _IGNORE)
    equal("ignored", await start(subject, python(subject, "print(input())"), b"in\n"), (b"in\n", 0, False))


@check()
async def check_only_what_is_the_same_is_handed_over(subject: Subject) -> None:
    spec = python(subject, "print(1)")
    await park(subject, _TAKE)
    for other in (
        replace(spec, env=(*spec.env, (b"MORE", b"1"))),
        replace(spec, umask=0o077),
        replace(spec, identity=AGENT),
        replace(spec, argv=(*spec.argv, b"more")),
    ):
        equal(f"another {other}", await start(subject, other), (b"1\n", 0, False))
    process = await subject.sandbox.start(spec)  # which did not ask for it
    equal("unasked", process.handed_over, False)
    ended("unasked", await finish(process), exit_code=0)
    equal("the same", await start(subject, replace(spec, stdin=False, timeout=30.0)), (b"1\n", 0, True))


@check()
async def check_what_does_not_wait_is_not_parked(subject: Subject) -> None:
    await refused("it ends", park(subject, "pass"), Code.UNSUPPORTED)
    await refused("it says something else", park(subject, "import os; os.write(63, b'x')"), Code.UNSUPPORTED)
    missing = subject.sandbox.park(command(subject, "no-such-program", "-c", "x"), LOADER)
    await refused("there is none", missing, Code.UNSUPPORTED, Code.NOT_FOUND)


@check()
async def check_a_copy_is_a_child_of_its_supervisor(subject: Subject) -> None:
    """A loader may say whatever it likes of other processes: it is not believed, and ends none of them."""
    other = await subject.sandbox.start(command(subject, "sleep", "600"))
    for claim in (
        f"claim({other.pid})",
        "claim(1)",
        "claim(os.getpid())",
        "claim(os.getppid())",
        "claim(-1)",
        "claim(0)",
    ):
        await refused(claim, park(subject, _FORKS + claim), Code.UNSUPPORTED)
    # What was never a command's leaves nothing behind, either: the process that this one makes ends with it.
    child = "pid = os.fork() or time.sleep(600)\nclaim(pid)"
    await refused("a child of its own", park(subject, _FORKS + child), Code.UNSUPPORTED)
    await refused("it ends", park(subject, _FORKS), Code.UNSUPPORTED)
    await refused("it says something else", park(subject, _FORKS + "os.write(files[3], b'T')"), Code.UNSUPPORTED)
    equal("the rest goes on", await start(subject, python(subject, "print(1)")), (b"1\n", 0, False))
    await other.end(5)
    ended("the other process", await finish(other), signal=15)


@check()
async def check_one_that_nobody_needs_goes_after_its_time(subject: Subject) -> None:
    await park(subject, _TAKE, keep=0.1)
    async with asyncio.timeout(20):
        while (done := await start(subject, python(subject, "print(1)")))[2]:
            await park(subject, _TAKE, keep=0.1)  # it was quicker than that
            await asyncio.sleep(0.2)
    equal("after its time", done, (b"1\n", 0, False))


@check()
async def check_its_time_counts_from_its_program_on(subject: Subject) -> None:
    await park(subject, _TAKE)
    spec = python(subject, "import time; print('on', flush=True); time.sleep(600)", timeout=0.3, grace=0.1)
    process = await subject.sandbox.start(replace(spec, parked=True))
    done = await finish(process)
    holds("handed over", process.handed_over, done)
    ended("timed out", done, signal=15)
    equal("output", done.stdout, b"on\n")
