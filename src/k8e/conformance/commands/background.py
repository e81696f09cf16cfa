"""A command that ends by itself: its result does not wait for its background children, and they go on undisturbed."""

from __future__ import annotations

from k8e.conformance.registry import check
from k8e.conformance.subject import (
    Subject,
    command,
    complete,
    ended,
    equal,
    find_processes,
    kill_processes,
    no_process,
    one_process,
    prepare,
    python,
    run,
    together,
    unique_mark,
)
from k8e.link.model import Cause, Completed


@check()
async def check_background_child_lives_on_and_is_not_waited_for(subject: Subject) -> None:
    mark = unique_mark()
    done = await run(subject, "sh", "-c", f"sleep 1000 {mark.decode()} & echo answer; exit 4")
    ended("the command", done, exit_code=4)
    equal("its output", done.stdout, b"answer\n")
    await one_process(subject, "background children", mark)
    await kill_processes(subject, mark)
    await no_process(subject, "background children after kill", mark)


@check()
async def check_daemon_lives_on(subject: Subject) -> None:
    mark = unique_mark()
    code = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
"""
    ended("the command", await complete(subject, python(subject, code, mark)), exit_code=0)
    await one_process(subject, "daemons", mark)
    await kill_processes(subject, mark)


@check()
async def check_timeout_of_an_ended_command_spares_its_background(subject: Subject) -> None:
    seconds = 1.0
    mark, done = await leave_child(subject, seconds)
    while done.outcome.cause is Cause.TIMEOUT and seconds < 25:
        # A machine so busy that even a shell's exit takes longer: the command itself is what was ended. Once more.
        equal("children of a command that was ended", await find_processes(subject, mark), [])
        seconds *= 5
        mark, done = await leave_child(subject, seconds)
    ended("the command", done, exit_code=0)
    # A second command with a longer timeout, started later, shows that the time has passed.
    later = await run(subject, "sleep", "1000", unique_mark(), timeout=seconds + 0.5)
    equal("the cause of the later command's end", later.outcome.cause, Cause.TIMEOUT)
    await one_process(subject, "background children", mark)
    await kill_processes(subject, mark)


async def leave_child(subject: Subject, seconds: float) -> tuple[bytes, Completed]:
    mark = unique_mark()
    return mark, await run(subject, "sh", "-c", f"sleep 1000 {mark.decode()} & exit 0", timeout=seconds)


@check()
async def check_background_child_may_write_to_the_old_output(subject: Subject) -> None:
    # Dropped, without a signal and without blocking: more than any pipe holds goes through.
    code = """
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.mkfifo("go")
os.mkfifo("told")
if os.fork() == 0:
    open("go").read()
    for fd in (1, 2):
        for _ in range(64):
            os.write(fd, b"x" * 65536)
    open("told", "w").write("written")
    os._exit(0)
os.write(1, b"answer")
"""
    done = await complete(subject, python(subject, code))
    ended("the command", done, exit_code=0)
    equal("its output", done.stdout, b"answer")
    await prepare(subject, "sh", "-c", ": > go")
    equal("what the child says afterwards", await prepare(subject, "cat", "told"), b"written")


@check()
async def check_output_of_a_child_within_the_drain_is_kept(subject: Subject) -> None:
    # The child writes once the command is surely gone, and its end is the end of the pipe: the drain is no delay.
    code = """
import os, time
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.005)
    os.write(1, b"late ")
    os.write(1, b"words")
    os._exit(0)
os.write(1, b"early ")
"""
    done = await complete(subject, python(subject, code, drain=30.0))
    ended("the command", done, exit_code=0)
    equal("output", done.stdout, b"early late words")
    equal("byte count", done.outcome.stdout_bytes, len(b"early late words"))


@check()
async def check_drain_ends_although_a_child_floods_the_pipe(subject: Subject) -> None:
    mark = unique_mark()
    spec = command(subject, "sh", "-c", f"yes {mark.decode()} & exit 0", drain=0.1)
    done = await complete(subject, spec)
    ended("the command", done, exit_code=0)
    equal("bytes counted and received", len(done.stdout), done.outcome.stdout_bytes)
    await one_process(subject, "floods that live on", mark)
    await kill_processes(subject, mark)


@check()
async def check_own_output_is_kept_although_a_child_holds_the_pipe(subject: Subject) -> None:
    # All of the command's own bytes come, even if reading them takes longer than the drain.
    mark = unique_mark()
    code = """
import os, time
if os.fork() == 0:
    time.sleep(1000)
for _ in range(128):
    os.write(1, b"x" * 65536)
"""
    done = await complete(subject, python(subject, code, mark, drain=0.0))
    ended("the command", done, exit_code=0)
    equal("output", len(done.stdout), 128 * 65536)
    await kill_processes(subject, mark)


@check()
async def check_many_background_children(subject: Subject) -> None:
    marks = [unique_mark() for _ in range(20)]

    async def leave_one(mark: bytes) -> None:
        ended("the command", await run(subject, "sh", "-c", f"sleep 1000 {mark.decode()} &"), exit_code=0)

    await together(*(leave_one(mark) for mark in marks))
    for mark in marks:
        await kill_processes(subject, mark)
