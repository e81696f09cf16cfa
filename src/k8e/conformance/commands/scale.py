"""Many commands: at once, and one after the other."""

from __future__ import annotations

import asyncio

from k8e.conformance.registry import check
from k8e.conformance.subject import (
    Subject,
    command,
    complete,
    ended,
    equal,
    finish,
    holds,
    read_through,
    run,
    together,
)


@check()
async def check_100_commands_at_once(subject: Subject) -> None:
    # All of them stand at the same time: none is answered before the last one has started.
    script = 'echo "$1"; read line; echo "$line" >&2; exit "$1"'
    processes = await asyncio.gather(
        *(subject.sandbox.start(command(subject, "sh", "-c", script, "sh", str(number))) for number in range(100))
    )
    for number, process in enumerate(processes):
        equal("first line", await read_through(process.stdout, b"\n"), b"%d\n" % number)
    running = {info.id for info in await subject.sandbox.commands() if info.running}
    holds("all of them are in the list", running >= {process.id for process in processes}, len(running))
    results = await asyncio.gather(*(finish(process, b"to %d\n" % n) for n, process in enumerate(processes)))
    for number, done in enumerate(results):
        ended(f"command {number}", done, exit_code=number)
        equal(f"stderr of command {number}", done.stderr, b"to %d\n" % number)


@check()
async def check_100_commands_at_once_with_much_output(subject: Subject) -> None:
    each = 512 << 10
    script = f"head -c {each} /dev/zero | tr '\\0' \"$1\""

    async def one(number: int) -> None:
        letter = b"%c" % (65 + number % 26)
        done = await complete(subject, command(subject, "sh", "-c", script, "sh", letter))
        ended(f"command {number}", done, exit_code=0)
        holds(f"output of command {number} is its own", done.stdout == letter * each, done.stdout[:20])

    await together(*(one(number) for number in range(100)))


@check(deadline=240)
async def check_1000_commands_in_a_row(subject: Subject) -> None:
    for number in range(1000):
        done = await run(subject, "sh", "-c", f"echo {number}; exit {number % 256}")
        equal("output", done.stdout, b"%d\n" % number)
        ended(f"command {number}", done, exit_code=number % 256)


@check()
async def check_ended_commands_are_not_kept_for_ever(subject: Subject) -> None:
    before = len(await subject.sandbox.commands())
    for _ in range(50):
        await run(subject, "true")
    after = len(await subject.sandbox.commands())
    holds("commands that were waited for leave the list", after <= before, (before, after))


@check()
async def check_many_failed_starts_at_once(subject: Subject) -> None:
    results = await asyncio.gather(
        *(subject.sandbox.start(command(subject, "/no/such/program")) for _ in range(50)), return_exceptions=True
    )
    equal("kinds of answers", {type(result).__name__ for result in results}, {"NotStarted"})
    ended("the next command", await run(subject, "true"), exit_code=0)
