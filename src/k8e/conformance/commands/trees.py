"""Ending a command ends everything that descends from it, however it hides, and nothing else.

Each tree is proved to stand first (every process says so) and to be gone afterwards, twice: no process carries the
tree's mark, and a file lock that all of them inherited is free. The lock also finds what has no command line left.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from k8e.conformance.registry import check
from k8e.conformance.subject import (
    Subject,
    complete,
    ended,
    equal,
    find_processes,
    finish,
    holds,
    python,
    read_until,
    run_python,
    together,
    unique_mark,
)
from k8e.link.model import Cause, Process

# Arguments: the mark. Standard output gets one dot from each process when it stands.
PRELUDE = """
import ctypes, fcntl, os, platform, signal, sys, threading, time
lock = os.open(sys.argv[1] + ".lock", os.O_CREAT | os.O_RDWR, 0o666)
fcntl.flock(lock, fcntl.LOCK_SH)
def stand():
    os.write(1, b".")
def rest():
    while True:
        time.sleep(1000)
def stubborn():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
def be_subreaper():
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
def daemon(body):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            body()
            os._exit(0)
        os._exit(0)
    os.wait()
def child(body):
    if os.fork() == 0:
        body()
        os._exit(0)
def stand_and_rest():
    stand()
    rest()
"""


@dataclass(frozen=True, slots=True)
class Tree:
    dots: int
    by: signal.Signals  # what the command itself dies of
    code: str


T, K = signal.SIGTERM, signal.SIGKILL
TREES = {
    "children": Tree(4, T, "[child(stand_and_rest) for _ in range(3)]"),
    "setsid": Tree(2, T, "child(lambda: (os.setsid(), stand_and_rest()))"),
    "process_group": Tree(2, T, "child(lambda: (os.setpgid(0, 0), stand_and_rest()))"),
    "double_fork": Tree(2, T, "daemon(stand_and_rest)"),
    "ignores_term": Tree(3, K, "stubborn(); child(stand_and_rest); daemon(stand_and_rest)"),
    "stopped_child": Tree(2, T, "child(lambda: (stand(), os.kill(os.getpid(), signal.SIGSTOP), rest()))"),
    "stopped_stubborn": Tree(
        2, K, "stubborn(); daemon(lambda: (stand(), os.kill(os.getpid(), signal.SIGSTOP), rest()))"
    ),
    "closed_descriptors": Tree(2, T, "daemon(lambda: (stand(), [os.close(fd) for fd in (0, 1, 2)], rest()))"),
    "subreaper": Tree(
        4,
        K,
        "stubborn(); daemon(lambda: (be_subreaper(), [daemon(stand_and_rest) for _ in range(2)], stand_and_rest()))",
    ),
    "nested_daemons": Tree(
        4,
        K,
        "stubborn(); daemon(lambda: (daemon(lambda: (daemon(stand_and_rest), stand_and_rest())), stand_and_rest()))",
    ),
    "without_main_thread": Tree(
        2,
        K,
        """
stubborn()
def leave():
    threading.Thread(target=stand_and_rest).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
daemon(leave)
""",
    ),
    "always_another_pid": Tree(
        2,
        K,
        """
stubborn()
def hop():
    stand()
    while True:
        if os.fork():
            os._exit(0)
daemon(hop)
""",
    ),
    "clone_parent": Tree(
        3,
        K,
        """
stubborn()
def siblings():
    # A child that becomes its parent's sibling, where the kernel can do that.
    numbers = {"x86_64": 56, "aarch64": 220}
    pid = ctypes.CDLL(None).syscall(numbers[platform.machine()], 0x8000 | signal.SIGCHLD, 0, 0, 0, 0)
    return os.fork() if pid < 0 else pid
for _ in range(2):
    if siblings() == 0:
        stand_and_rest()
""",
    ),
    "two_hundred": Tree(
        200,
        K,
        """
stubborn()
for group in range(9):
    def spread():
        for n in range(10):
            child(lambda: (child(stand_and_rest), stand_and_rest()))
        stand_and_rest()
    daemon(spread) if group % 2 else child(spread)
for n in range(10):
    child(stand_and_rest)
""",
    ),
}


async def plant(
    subject: Subject, tree: Tree, mark: bytes, *, limit: float | None = None, grace: float = 0.2
) -> Process:
    code = f"{PRELUDE}{tree.code}\nstand_and_rest()"
    return await subject.sandbox.start(python(subject, code, mark, timeout=limit, grace=grace))


TAKE_LOCK = """
import fcntl, sys
with open(sys.argv[1] + ".lock") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


async def all_gone(subject: Subject, what: str, mark: bytes) -> None:
    equal(f"processes left of {what}", await find_processes(subject, mark), [])
    done = await run_python(subject, TAKE_LOCK, mark)
    ended(f"taking the lock that no process of {what} may hold any more", done, exit_code=0)


async def stands(subject: Subject, what: str, process: Process, tree: Tree, mark: bytes) -> None:
    equal(f"processes of {what} that stand", await read_until(process.stdout, tree.dots), b"." * tree.dots)
    holds(f"processes of {what} are found", len(await find_processes(subject, mark)) >= 1, [])


def register_tree(name: str, tree: Tree) -> None:
    async def ends_tree(subject: Subject) -> None:
        mark = unique_mark()
        process = await plant(subject, tree, mark)
        await stands(subject, name, process, tree, mark)
        await process.end(grace=0.2)
        done = await finish(process)
        await all_gone(subject, name, mark)
        ended(name, done, signal=tree.by)
        equal("cause", done.outcome.cause, Cause.ENDED)

    ends_tree.__name__ = f"check_end_reaches_{name}"
    check()(ends_tree)


for _name, _tree in TREES.items():
    register_tree(_name, _tree)


@check(deadline=180)
async def check_timeout_reaches_every_kind_of_tree(subject: Subject) -> None:
    # All at once, because the timeout must leave a slow machine time to plant them; without the two hundred, for which
    # it would have to be much longer.
    async def one(name: str, tree: Tree) -> None:
        mark = unique_mark()
        done = await finish(await plant(subject, tree, mark, limit=8.0))
        equal(f"output of {name} before the timeout", done.stdout, b"." * tree.dots)
        await all_gone(subject, name, mark)
        ended(name, done, signal=tree.by)
        equal("cause", done.outcome.cause, Cause.TIMEOUT)

    await together(*(one(name, tree) for name, tree in TREES.items() if tree.dots < 100))


@check()
async def check_end_reaches_only_its_own_tree(subject: Subject) -> None:
    marks = [unique_mark() for _ in range(3)]
    tree = TREES["double_fork"]
    processes = [await plant(subject, tree, mark) for mark in marks]
    for process, mark in zip(processes, marks, strict=True):
        await stands(subject, "a tree", process, tree, mark)
    await processes[1].end(grace=0.2)
    await finish(processes[1])
    await all_gone(subject, "the ended tree", marks[1])
    for index in (0, 2):
        equal("processes of another tree", len(await find_processes(subject, marks[index])), 2)
        await processes[index].end(grace=0.2)
        await finish(processes[index])
        await all_gone(subject, "another tree", marks[index])


async def leaves_when_told(
    subject: Subject, act: Callable[[Process], Awaitable[None]], cause: Cause, limit: float | None = None
) -> None:
    code = """
def leave(*_):
    os.write(1, b"bye")
    os.write(2, b"BYE")
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
"""
    process = await plant(subject, Tree(1, T, code), unique_mark(), grace=30.0, limit=limit)
    equal("first output", await read_until(process.stdout, 1), b".")
    await act(process)
    done = await finish(process)
    equal("last words", (done.stdout, done.stderr), (b"bye", b"BYE"))
    ended("a command that hears TERM", done, exit_code=0)
    equal("cause", done.outcome.cause, cause)


@check()
async def check_grace_lets_a_command_finish_on_end(subject: Subject) -> None:
    async def end(process: Process) -> None:
        await process.end(grace=30)

    await leaves_when_told(subject, end, Cause.ENDED)


@check()
async def check_grace_lets_a_command_finish_on_timeout(subject: Subject) -> None:
    async def nothing(_: Process) -> None:
        return

    await leaves_when_told(subject, nothing, Cause.TIMEOUT, limit=2.0)


@check()
async def check_grace_is_not_waited_for_when_nothing_is_left(subject: Subject) -> None:
    # The deadline of the check is the proof: the grace is an hour.
    process = await plant(subject, TREES["double_fork"], unique_mark())
    await read_until(process.stdout, 2)
    await process.end(grace=3600)
    ended("a tree that dies of TERM", await finish(process), signal=signal.SIGTERM)


@check()
async def check_stopped_command_hears_term(subject: Subject) -> None:
    code = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
stand()
os.kill(os.getpid(), signal.SIGSTOP)
"""
    process = await plant(subject, Tree(1, T, code), unique_mark())
    await read_until(process.stdout, 1)
    await process.end(grace=30)
    ended("a stopped command with a handler", await finish(process), exit_code=5)


@check()
async def check_second_end_shortens_the_grace(subject: Subject) -> None:
    process = await plant(subject, TREES["ignores_term"], unique_mark())
    await read_until(process.stdout, 3)
    await process.end(grace=3600)
    await process.end(grace=0.1)
    ended("a stubborn tree", await finish(process), signal=signal.SIGKILL)


@check()
async def check_timeout_during_a_flood(subject: Subject) -> None:
    code = "stubborn()\nblock = b'x' * 65536\nwhile True:\n    os.write(1, block)\n    os.write(2, block)"
    mark = unique_mark()
    done = await finish(await plant(subject, Tree(0, K, code), mark, limit=1.0))
    ended("a flood", done, signal=signal.SIGKILL)
    equal("cause", done.outcome.cause, Cause.TIMEOUT)
    counted = (done.outcome.stdout_bytes, done.outcome.stderr_bytes)
    equal("bytes counted and received", (len(done.stdout), len(done.stderr)), counted)
    holds("there was a flood", len(done.stdout) > 65536, len(done.stdout))
    await all_gone(subject, "a flood", mark)


@check()
async def check_timeout_ends_a_command_that_nobody_reads(subject: Subject) -> None:
    code = "block = b'x' * 65536\nwhile True:\n    os.write(1, block)"
    mark = unique_mark()
    process = await plant(subject, Tree(0, K, code), mark, limit=1.0)
    while await find_processes(subject, mark):
        pass  # each look is a command of its own; the check's deadline bounds it
    done = await finish(process)
    equal("cause", done.outcome.cause, Cause.TIMEOUT)
    equal("bytes counted and received", len(done.stdout), done.outcome.stdout_bytes)


@check()
async def check_timeout_ends_commands_that_others_stop(subject: Subject) -> None:
    # A process with the same uid stops every process of that uid again and again, new ones included.
    code = """
import os, signal
os.write(1, b".")
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except OSError:
        pass
"""
    stopper = await subject.sandbox.start(python(subject, code, timeout=50.0))
    equal("output", await read_until(stopper.stdout, 1), b".")
    for _ in range(5):
        results = await asyncio.gather(
            *(complete(subject, python(subject, "", timeout=0.3, grace=0.1, stdin=False)) for _ in range(10))
        )
        causes = {done.outcome.cause for done in results}
        holds("each ended by itself or by its timeout", causes <= {Cause.ITSELF, Cause.TIMEOUT}, causes)
    await stopper.end(grace=0)
    await finish(stopper)


@check()
async def check_timeout_that_is_not_reached_changes_nothing(subject: Subject) -> None:
    done = await run_python(subject, "print('done'); raise SystemExit(3)", timeout=3600.0)
    ended("a command with an hour", done, exit_code=3)
    equal("cause", done.outcome.cause, Cause.ITSELF)


@check()
async def check_end_of_an_ended_command_is_harmless(subject: Subject) -> None:
    process = await subject.sandbox.start(python(subject, "raise SystemExit(8)"))
    done = await finish(process)
    await process.end()
    ended("a command that had ended", done, exit_code=8)
    equal("outcome afterwards", await process.wait(), done.outcome)
