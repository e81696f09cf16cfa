"""Standard input: exact, closable, and never a deadlock, whatever the command does with it."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from itertools import count

from k8e.conformance.counters import CounterStream, counters
from k8e.conformance.registry import check
from k8e.conformance.subject import (
    Subject,
    command,
    complete,
    ended,
    equal,
    finish,
    holds,
    python,
    read_through,
    run,
    together,
)
from k8e.link.errors import BrokenInput
from k8e.link.model import Process

BLOCK = 1 << 20


async def write_counters(process: Process, total: int) -> None:
    for start in range(0, total, BLOCK):
        await process.write(counters(start, min(start + BLOCK, total)))
    await process.close_stdin()


async def flood(process: Process) -> int:
    """Writes until the command breaks it off; returns how much was taken."""
    for written in count(0, 65536):
        try:
            await process.write(b"x" * 65536)
        except BrokenInput:
            return written
    raise AssertionError("unreachable")


@check()
async def check_every_byte_value_goes_in(subject: Subject) -> None:
    content = bytes(range(256)) * 5 + b"\xff\x00\x04\x1a no newline"
    done = await complete(subject, command(subject, "cat"), stdin=content)
    ended("cat", done, exit_code=0)
    equal("echo", done.stdout, content)


@check(deadline=120)
async def check_100_mib_of_stdin_are_exact(subject: Subject) -> None:
    total = subject.bulk * 100 // 256
    digest = hashlib.sha256()
    for start in range(0, total, BLOCK):
        digest.update(counters(start, min(start + BLOCK, total)))
    process = await subject.sandbox.start(command(subject, "sha256sum"))
    await write_counters(process, total)
    done = await finish(process)
    equal("hash", done.stdout.split()[:1], [digest.hexdigest().encode()])


@check(deadline=120)
async def check_100_mib_echoed_are_exact(subject: Subject) -> None:
    total = subject.bulk * 100 // 256
    process = await subject.sandbox.start(command(subject, "cat"))
    stream = CounterStream()
    await together(write_counters(process, total), stream.take_all(process.stdout))
    stream.complete("echo", total)
    equal("exit code", (await finish(process)).outcome.exit_code, 0)


@check()
async def check_closed_stdin_is_the_end_of_input(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "cat"))
    await process.close_stdin()
    done = await finish(process)
    ended("cat", done, exit_code=0)
    equal("output", done.stdout, b"")


@check()
async def check_open_stdin_is_not_the_end_of_input(subject: Subject) -> None:
    process = await subject.sandbox.start(
        command(subject, "sh", "-c", "while read line; do echo got $line; done; echo end")
    )
    for number in range(50):
        await process.write(b"%d\n" % number)
        equal("answer", await read_through(process.stdout, b"\n"), b"got %d\n" % number)
    equal("rest", (await finish(process)).stdout, b"end\n")


@check()
async def check_no_stdin_is_dev_null(subject: Subject) -> None:
    code = "import os; print(os.readlink('/proc/self/fd/0'), len(os.read(0, 1)))"
    done = await complete(subject, python(subject, code, stdin=False))
    equal("output", done.stdout, b"/dev/null 0\n")


@check()
async def check_command_that_never_reads_blocks_its_writer_only(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sleep", "1000"))
    writer = asyncio.create_task(flood(process))
    for _ in range(10):
        ended("another command", await run(subject, "true"), exit_code=0)
    holds("writer is waiting", not writer.done(), writer)
    await process.end(grace=5)
    written = await writer
    holds("writer was held by flow control", written < 4 << 20, written)
    done = await finish(process)
    ended("sleep", done, signal=signal.SIGTERM)


@check()
async def check_command_that_exits_without_reading(subject: Subject) -> None:
    done = await complete(subject, command(subject, "sh", "-c", "echo done; exit 5"), stdin=b"x" * (4 << 20))
    ended("sh", done, exit_code=5)
    equal("output", done.stdout, b"done\n")


@check()
async def check_command_that_closes_stdin_breaks_its_writer(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "sh", "-c", "exec 0<&-; echo closed; exec sleep 1000"))
    equal("output", await read_through(process.stdout, b"\n"), b"closed\n")
    await flood(process)  # returns by BrokenInput while the command lives
    await process.end(grace=5)
    ended("sleep", await finish(process), signal=signal.SIGTERM)


@check()
async def check_command_that_reads_a_part(subject: Subject) -> None:
    done = await complete(subject, command(subject, "head", "-c", "100000"), stdin=b"x" * (4 << 20))
    ended("head", done, exit_code=0)
    equal("length", len(done.stdout), 100_000)


@check()
async def check_stdin_written_at_once_waits_for_a_late_reader(subject: Subject) -> None:
    # Everything is sent and closed before the command reads its first byte.
    process = await subject.sandbox.start(command(subject, "sh", "-c", "sleep 0.3; exec cat"))
    await process.write(b"early")
    await process.close_stdin()
    equal("output", (await finish(process)).stdout, b"early")


@check()
async def check_stdin_in_single_bytes(subject: Subject) -> None:
    process = await subject.sandbox.start(command(subject, "cat"))
    for number in range(2000):
        await process.write(bytes([number % 251]))
    done = await finish(process)
    holds("echo is the same", done.stdout == bytes(n % 251 for n in range(2000)), done.stdout[:50])


@check()
async def check_stdin_of_a_child_outlives_the_command(subject: Subject) -> None:
    # The command is gone, its child reads on from the same pipe: what was written is not an error, nor is the end.
    # (A shell gives a background child /dev/null as input unless it is told otherwise.)
    spec = command(subject, "sh", "-c", "exec 3<&0; cat <&3 >/dev/null 2>&1 & exit 3")
    done = await complete(subject, spec, stdin=b"x" * 100_000)
    ended("sh", done, exit_code=3)
