"""Running commands: signals, the list of commands, detaching and attaching."""

from __future__ import annotations

import secrets
import signal
import time

from k8e.conformance.counters import WRITE_COUNTERS, CounterStream
from k8e.conformance.registry import check
from k8e.conformance.subject import (
    Subject,
    command,
    ended,
    equal,
    finish,
    holds,
    prepare,
    python,
    read_all,
    read_through,
    read_until,
    refused,
)
from k8e.link.errors import Code
from k8e.link.model import CommandInfo, Completed, Scope


async def find_info(subject: Subject, command_id: int) -> CommandInfo | None:
    found = [info for info in await subject.sandbox.commands() if info.id == command_id]
    holds("an id is in the list at most once", len(found) <= 1, found)
    return found[0] if found else None


async def wait_until_ended(subject: Subject, command_id: int) -> CommandInfo:
    """Looks until the command has ended; the check's deadline bounds it."""
    while True:
        info = await find_info(subject, command_id)
        if info is None:
            raise AssertionError(f"command {command_id} is not in the list")
        if not info.running:
            return info


@check()
async def check_signals_reach_process_group_and_tree(subject: Subject) -> None:
    # Three processes, each counts what reaches it: the command, a child in its group, a child in its own session.
    code = """
import os, signal, time
def tell(letter):
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, letter))
    os.write(1, b".")
    while True:
        time.sleep(1000)
if os.fork() == 0:
    tell(b"g")
if os.fork() == 0:
    os.setsid()
    tell(b"t")
tell(b"p")
"""
    process = await subject.sandbox.start(python(subject, code))
    equal("processes", await read_until(process.stdout, 3), b"...")
    got = b""
    for scope, letters in ((Scope.PROCESS, 1), (Scope.GROUP, 2), (Scope.TREE, 3)):
        await process.signal(signal.SIGUSR1, scope)
        got += await read_until(process.stdout, letters)
    await process.end(grace=1)
    got += (await finish(process)).stdout
    equal("letters", bytes(sorted(got)), b"ggpppt")


@check()
async def check_signal_stops_and_continues(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "cat"))
    await process.signal(signal.SIGSTOP)
    await process.write(b"while stopped")
    await process.signal(signal.SIGCONT)
    equal("echo", await process.stdout.read(), b"while stopped")
    await process.signal(signal.SIGINT)
    rest = await read_all(process.stdout)  # its stdin stays open: the end of that would be another end
    ended("cat", Completed(await process.wait(), rest, b""), signal=signal.SIGINT)


@check()
async def check_a_stop_and_what_continues_it_keep_their_order(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "cat"))
    for number in range(30):
        for sent in (signal.SIGSTOP, signal.SIGCONT):
            await process.signal(sent)
        await process.write(b"%d" % number)
        equal("echo", await process.stdout.read(), b"%d" % number)
    await process.signal(signal.SIGCONT)
    await process.signal(signal.SIGSTOP)
    await process.signal(signal.SIGKILL)
    rest = await read_all(process.stdout)
    ended("cat", Completed(await process.wait(), rest, b""), signal=signal.SIGKILL)


@check()
async def check_every_signal_can_be_sent(subject: Subject) -> None:
    # One process that lists what it gets, in order; the real-time ones queue behind each other too.
    code = """
import os, signal
signals = signal.valid_signals()
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
os.write(1, b"ready\\n")
while True:  # and not with pause(), which sleeps through one that comes just before it
    os.write(1, b"%d\\n" % signal.sigwait(signals))
"""
    process = await subject.sandbox.start(python(subject, code))
    equal("output", await read_through(process.stdout, b"\n"), b"ready\n")
    for number in (*range(1, 32), 34, 50, 64):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            await process.signal(number)
            equal("signal heard", await read_through(process.stdout, b"\n"), b"%d\n" % number)
    await process.signal(signal.SIGKILL)
    ended("the command", await finish(process), signal=signal.SIGKILL)


@check()
async def check_signal_that_is_none_is_refused_or_ignored(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "cat"))
    for number in (0, 65, 1000):
        try:
            await process.signal(number)
        except ValueError:
            continue
    await process.write(b"alive")
    equal("echo", await process.stdout.read(), b"alive")
    ended("cat", await finish(process), exit_code=0)


@check()
async def check_running_command_is_listed(subject: Subject) -> None:
    before = time.time()
    process = await subject.sandbox.start(
        command(subject, "sh", "-c", "printf 12345; printf 123 >&2; read line; exit 3")
    )
    await read_until(process.stdout, 5)
    await read_until(process.stderr, 3)
    info = await find_info(subject, process.id)
    if info is None:
        raise AssertionError("a running command is not in the list")
    equal("pid, running, attached", (info.pid, info.running, info.attached), (process.pid, True, True))
    equal("exit code, signal, cause", (info.exit_code, info.signal, info.cause), (None, None, None))
    equal("name", info.name, b"sh")
    equal("byte counts", (info.stdout_bytes, info.stderr_bytes), (5, 3))
    holds("it started just now", before - 60 < info.started < time.time() + 60, info.started)
    await process.write(b"\n")
    ended("sh", await finish(process), exit_code=3)
    holds(
        "a command that ended and was waited for is no longer running", await not_running(subject, process.id), "it is"
    )


async def not_running(subject: Subject, command_id: int) -> bool:
    info = await find_info(subject, command_id)
    return info is None or not info.running


@check()
async def check_unknown_command_cannot_be_attached(subject: Subject) -> None:
    await refused("attach", subject.sandbox.attach(secrets.randbits(63)), Code.UNKNOWN_COMMAND)


@check()
async def check_release_of_an_unknown_command_is_harmless(subject: Subject) -> None:
    await subject.sandbox.release(secrets.randbits(63))
    process = await subject.sandbox.start(command(subject, "cat"))
    await subject.sandbox.release(process.id)  # running: stays
    await process.write(b"alive")
    equal("echo", await process.stdout.read(), b"alive")
    ended("cat", await finish(process), exit_code=0)


@check()
async def check_detached_command_goes_on_and_is_attached_again(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sh", "-c", "echo one; read line; echo two $line; exit 6"))
    equal("before", await read_through(process.stdout, b"\n"), b"one\n")
    position = process.stdout.position
    await process.detach()
    info = await find_info(subject, process.id)
    holds("it runs and no caller is attached", info is not None and info.running and not info.attached, info)
    again = await subject.sandbox.attach(process.id, stdout_from=position)
    equal("pid", again.pid, process.pid)
    await again.write(b"words\n")
    done = await finish(again)
    equal("after", done.stdout, b"two words\n")
    ended("the command", done, exit_code=6)


@check()
async def check_command_started_detached(subject: Subject) -> None:
    process = await subject.sandbox.start(
        command(subject, "sh", "-c", "echo out; echo err >&2; exit 11", detached=True, stdin=False)
    )
    info = await wait_until_ended(subject, process.id)
    equal("in the list", (info.exit_code, info.signal, info.attached), (11, None, False))
    done = await finish(await subject.sandbox.attach(process.id))
    equal("output", (done.stdout, done.stderr), (b"out\n", b"err\n"))
    ended("the command", done, exit_code=11)
    await subject.sandbox.release(process.id)
    equal("in the list after release", await find_info(subject, process.id), None)


@check()
async def check_released_command_is_forgotten(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "true", detached=True, stdin=False))
    await wait_until_ended(subject, process.id)
    await subject.sandbox.release(process.id)
    await refused("attach", subject.sandbox.attach(process.id), Code.UNKNOWN_COMMAND)


@check()
async def check_timeout_ends_a_detached_command(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sleep", "1000", detached=True, stdin=False, timeout=0.5))
    info = await wait_until_ended(subject, process.id)
    equal("signal", info.signal, signal.SIGTERM)
    ended("sleep", await finish(await subject.sandbox.attach(process.id)), signal=signal.SIGTERM)
    await subject.sandbox.release(process.id)


@check()
async def check_output_while_detached_keeps_head_and_tail(subject: Subject) -> None:
    total, window = 8 << 20, 64 << 10
    await prepare(subject, "mkfifo", "done")
    code = f"{WRITE_COUNTERS}\nopen('done', 'w').close()"
    process = await subject.sandbox.start(python(subject, code, str(total), window=window, detached=True, stdin=False))
    await prepare(subject, "cat", "done")
    again = await subject.sandbox.attach(process.id)
    stream, first_gap = CounterStream(), None
    while chunk := await again.stdout.read():
        if first_gap is None and again.stdout.dropped:
            first_gap = again.stdout.position - len(chunk) - again.stdout.dropped
        stream.take(chunk, again.stdout.position)
    done = await finish(again)
    ended("the command", done, exit_code=0)
    stream.complete("stdout, kept and dropped", total)
    equal("total", done.outcome.stdout_bytes, total)
    equal("kept and dropped", stream.received + again.stdout.dropped, total)
    equal("the gap is after the first half of the window", first_gap, window // 2)
    holds("what is kept is half the window to all of it", window // 2 < stream.received <= window, stream.received)
    await subject.sandbox.release(process.id)


@check()
async def check_output_while_detached_is_whole_when_it_fits(subject: Subject) -> None:
    total = 64 << 10
    await prepare(subject, "mkfifo", "done")
    code = f"{WRITE_COUNTERS}\nopen('done', 'w').close()"
    process = await subject.sandbox.start(python(subject, code, str(total), window=total, detached=True, stdin=False))
    await prepare(subject, "cat", "done")
    again = await subject.sandbox.attach(process.id)
    stream = CounterStream()
    await stream.take_all(again.stdout)
    stream.complete("stdout", total)
    ended("the command", await finish(again), exit_code=0)
    await subject.sandbox.release(process.id)


@check()
async def check_attach_resumes_from_the_offset_asked_for(subject: Subject) -> None:
    total = 40_000
    process = await subject.sandbox.start(
        python(subject, WRITE_COUNTERS, str(total), window=64 << 10, detached=True, stdin=False)
    )
    await wait_until_ended(subject, process.id)
    again = await subject.sandbox.attach(process.id, stdout_from=12_345)
    stream = CounterStream(12_345)
    await stream.take_all(again.stdout)
    stream.complete("stdout", total)
    equal("dropped", again.stdout.dropped, 0)
    ended("the command", await finish(again), exit_code=0)
    await subject.sandbox.release(process.id)
