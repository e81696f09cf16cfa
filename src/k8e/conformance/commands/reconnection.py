"""The connection breaks, commands do not: no byte is lost or repeated unseen, and nothing runs twice."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time

from k8e.conformance.counters import WRITE_COUNTERS, CounterStream, counters
from k8e.conformance.registry import check
from k8e.conformance.subject import (
    LinkControl,
    Subject,
    command,
    ended,
    equal,
    finish,
    holds,
    prepare,
    python,
    read_through,
    refused,
    run,
)
from k8e.link.errors import Code, LinkLost
from k8e.link.model import Cause, CommandInfo, Completed, Process, TerminalSize

# Writes the next block of counters for each line it reads.
ON_DEMAND = """
import os, sys
from array import array
at, block = 0, int(sys.argv[1])
for line in sys.stdin:
    os.write(1, array("Q", range(at // 8, (at + block) // 8)).tobytes())
    at += block
"""


def control(subject: Subject) -> LinkControl:
    if subject.link is None:
        raise ValueError("this check needs a link that can be cut")
    return subject.link


async def take_flood(process: Process, stream: CounterStream, link: LinkControl, every: int) -> None:
    """Takes stdout to its end and cuts the link each time another `every` bytes have come."""
    next_cut = every
    while chunk := await process.stdout.read():
        stream.take(chunk, process.stdout.position)
        if stream.position >= next_cut:
            await link.drop()
            next_cut = stream.position + every


@check(needs="link")
async def check_no_byte_is_lost_or_repeated_over_dropped_links(subject: Subject) -> None:
    block, window = 32 << 10, 64 << 10
    process = await subject.sandbox.start(python(subject, ON_DEMAND, str(block), window=window))
    stream = CounterStream()
    for number in range(30):
        await process.write(b"\n")
        if number % 2:
            # Cut once before anything of the block was read, once in its middle.
            await control(subject).drop()
        while stream.position < (number + 1) * block:
            stream.take(await process.stdout.read())
            if number % 3 == 0 and stream.position < number * block + block // 2:
                await control(subject).drop()
    done = await finish(process)
    ended("the command", done, exit_code=0)
    equal("bytes after the last block", done.stdout, b"")
    equal("dropped", process.stdout.dropped, 0)
    equal("total", done.outcome.stdout_bytes, 30 * block)


@check(needs="link", deadline=120)
async def check_flood_over_dropped_links_is_accounted_for(subject: Subject) -> None:
    # A flood does not wait for us while the link is down, so bytes may be dropped; then they are counted.
    total = subject.bulk // 4
    process = await subject.sandbox.start(python(subject, WRITE_COUNTERS, str(total), window=1 << 20))
    stream = CounterStream()
    await take_flood(process, stream, control(subject), total // 20)
    process.discard()
    outcome = await process.wait()
    equal("exit code", outcome.exit_code, 0)
    stream.complete("stdout, received and dropped", total)
    equal("total", outcome.stdout_bytes, total)
    equal("received and dropped", stream.received + process.stdout.dropped, total)


@check(needs="link")
async def check_stdin_goes_on_over_dropped_links(subject: Subject) -> None:
    total, block = 16 << 20, 1 << 20
    process = await subject.sandbox.start(command(subject, "sha256sum"))
    for start in range(0, total, block):
        await process.write(counters(start, start + block))
        await control(subject).drop()
    done = await finish(process)
    equal("hash", done.stdout.split()[:1], [hashlib.sha256(counters(0, total)).hexdigest().encode()])


@check(needs="link")
async def check_echo_goes_on_over_dropped_links(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "cat"))
    stream = CounterStream()
    block = 40_000
    for number in range(25):
        await process.write(counters(number * block, (number + 1) * block))
        await control(subject).drop()
        while stream.position < (number + 1) * block:
            stream.take(await process.stdout.read())
    ended("cat", await finish(process), exit_code=0)


@check(needs="link")
async def check_exit_while_the_link_is_down_is_told_later(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sh", "-c", "echo out; echo err >&2; sleep 0.2; exit 9"))
    begun = time.monotonic()
    async with control(subject).hold():
        await asyncio.sleep(1.0)  # time passes outside; nothing inside can tell us that the command has ended
        down_until = time.monotonic() - begun
    done = await finish(process)
    ended("the command", done, exit_code=9)
    equal("output", (done.stdout, done.stderr), (b"out\n", b"err\n"))
    holds("it ended while the link was down", done.outcome.wall_seconds < down_until, done.outcome)


@check(needs="link")
async def check_timeout_works_while_the_link_is_down(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sleep", "1000", timeout=0.3))
    async with control(subject).hold():
        await asyncio.sleep(1.0)
    done = await finish(process)
    ended("sleep", done, signal=signal.SIGTERM)
    equal("cause", done.outcome.cause, Cause.TIMEOUT)
    holds("it ended long before a thousand seconds", done.outcome.wall_seconds < 100, done.outcome)


@check(needs="link")
async def check_output_while_the_link_is_down_keeps_head_and_tail(subject: Subject) -> None:
    total, window = 8 << 20, 64 << 10
    process = await subject.sandbox.start(python(subject, "input()\n" + WRITE_COUNTERS, str(total), window=window))
    await process.write(b"\n")
    async with control(subject).hold():
        await asyncio.sleep(1.0)
    stream = CounterStream()
    while chunk := await process.stdout.read():
        stream.take(chunk, process.stdout.position)
    done = await finish(process)
    ended("the command", done, exit_code=0)
    stream.complete("stdout, received and dropped", total)
    equal("received and dropped", stream.received + process.stdout.dropped, total)


@check(needs="link")
async def check_command_starts_once_although_the_link_drops(subject: Subject) -> None:
    # The link is cut while the request is on its way: the host cannot know whether it arrived.
    for number in range(21):
        start = asyncio.create_task(
            subject.sandbox.start(command(subject, "sh", "-c", f"echo ran >> ran-{number}; exit {number}"))
        )
        for _ in range(number % 7):
            await asyncio.sleep(0)
        await control(subject).drop()
        ended(f"command {number}", await finish(await start), exit_code=number)
        content = await subject.sandbox.read_file(subject.inside(b"ran-%d" % number))
        equal(f"runs of command {number}", content, b"ran\n")


async def leave_behind(subject: Subject, code: str, *argv: str) -> CommandInfo:
    """Starts a command that ends while no caller is attached."""
    process = await subject.sandbox.start(python(subject, code, *argv, detached=True))
    await process.close_stdin()
    await process.detach()
    while (info := await find_command(subject, process.id)) and info.running:
        pass
    assert info is not None
    return info


async def find_command(subject: Subject, command_id: int) -> CommandInfo | None:
    return next((info for info in await subject.sandbox.commands() if info.id == command_id), None)


@check()
async def check_held_output_is_read_as_often_as_it_takes(subject: Subject) -> None:
    code = """
import os, sys
for number in range(int(sys.argv[1])):
    os.write(1, bytes([number % 256]) * 1024)
os.write(2, b"err")
os._exit(5)
"""
    for kilobytes in (0, 200, 1000):  # nothing, less than the window, and more
        info = await leave_behind(subject, code, str(kilobytes))
        first = await finish_held(subject, info.id)
        ended("the command", first, exit_code=5)
        equal("bytes counted", first.outcome.stdout_bytes, kilobytes * 1024)
        equal("stderr", first.stderr, b"err")
        holds("some of stdout is kept", bool(first.stdout) == bool(kilobytes), len(first.stdout))
        for _ in range(2):
            equal("what is read again", await finish_held(subject, info.id), first)
        equal("still in the list", await find_command(subject, info.id), info)
        await subject.sandbox.release(info.id)
        equal("in the list after its release", await find_command(subject, info.id), None)
        await refused("attaching", subject.sandbox.attach(info.id, hold=True), Code.UNKNOWN_COMMAND)


@check()
async def check_held_output_is_there_after_a_reader_that_left(subject: Subject) -> None:
    info = await leave_behind(subject, "import os; os.write(1, b'x' * 200_000)")
    process = await subject.sandbox.attach(info.id, hold=True)
    await process.stdout.read()
    await process.detach()
    process = await subject.sandbox.attach(info.id)
    equal("output", (await finish(process)).stdout, b"x" * 200_000)


@check(needs="link")
async def check_held_output_is_there_after_a_dropped_link(subject: Subject) -> None:
    info = await leave_behind(subject, "import os; os.write(1, b'x' * 200_000)")
    for _ in range(3):
        process = await subject.sandbox.attach(info.id, hold=True)
        await process.stdout.read()
        await control(subject).drop()
        try:
            await finish(process)
        except LinkLost:
            continue
    equal("output", (await finish_held(subject, info.id)).stdout, b"x" * 200_000)
    await subject.sandbox.release(info.id)


async def finish_held(subject: Subject, command_id: int) -> Completed:
    return await finish(await subject.sandbox.attach(command_id, hold=True))


@check(needs="link")
async def check_many_commands_survive_a_dropped_link(subject: Subject) -> None:
    script = 'echo "$1"; read line; echo "$line"; exit "$1"'
    processes = [
        await subject.sandbox.start(command(subject, "sh", "-c", script, "sh", str(number))) for number in range(20)
    ]
    await control(subject).drop()
    for number, process in enumerate(processes):
        equal("first line", await read_through(process.stdout, b"\n"), b"%d\n" % number)
    await control(subject).drop()
    results = await asyncio.gather(*(finish(process, b"second\n") for process in processes))
    for number, done in enumerate(results):
        equal("second line", done.stdout, b"second\n")
        ended(f"command {number}", done, exit_code=number)


@check(needs="link")
async def check_end_is_heard_over_a_dropped_link(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sleep", "1000"))
    await control(subject).drop()
    await process.end(grace=1)
    await control(subject).drop()
    done = await finish(process)
    ended("sleep", done, signal=signal.SIGTERM)
    equal("cause", done.outcome.cause, Cause.ENDED)


@check(needs="link")
async def check_terminal_survives_a_dropped_link(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "cat", terminal=TerminalSize()))
    await process.write(b"one\n")
    got = b""
    while got.count(b"one\r\n") < 2:
        got += await process.stdout.read()
    await control(subject).drop()
    await process.write(b"two\n")
    got = b""
    while got.count(b"two\r\n") < 2:
        got += await process.stdout.read()
    equal("echo, then cat", got, b"two\r\ntwo\r\n")
    await process.end(grace=1)
    await finish(process)


@check(needs="link")
async def check_new_file_over_a_dropped_link_is_whole_or_absent(subject: Subject) -> None:
    for number in range(12):
        path, content = subject.inside(b"file"), b"%04d" % number * 500_000
        task = asyncio.create_task(subject.sandbox.write_file(path, content, identity=subject.user))
        for _ in range(number * 3):
            await asyncio.sleep(0)
        await control(subject).drop()
        lost = await asyncio.gather(task, return_exceptions=True)
        names = [entry.name for entry in await subject.sandbox.list_dir(subject.directory)]
        if not names and isinstance(lost[0], LinkLost):
            continue
        equal("names", names, [b"file"])
        got = await subject.sandbox.read_file(path)
        holds("content is whole", got == content, (len(got), got[:8]))
        await subject.sandbox.remove(path)


@check(needs="link")
async def check_sandbox_works_after_many_drops(subject: Subject) -> None:
    for number in range(20):
        await control(subject).drop()
        ended("a command", await run(subject, "sh", "-c", f"exit {number}"), exit_code=number)
    equal("left in the list", [i.name for i in await subject.sandbox.commands() if i.running], [])
    await prepare(subject, "true")
