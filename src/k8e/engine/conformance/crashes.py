"""A daemon that is killed in the middle of its work: the next one finds what it left, and can finish or remove it."""

from __future__ import annotations

from k8e.engine import Engine
from k8e.engine.conformance.subject import GONE, Subject, check, equal, holds

PARTS = (0.1, 0.4, 0.7, 0.95)  # of the time that the work takes when nothing kills the daemon
_ENOUGH = 60.0  # seconds


async def interrupt(subject: Subject, action: str, name: str, part: float) -> Engine:
    """Has a daemon of its own do this, kills it after that part of the time, and returns the engine of the next one."""
    assert subject.crash is not None
    if action not in subject.durations:
        other = subject.new_name()
        if action != "create":
            await subject.engine.create(other, subject.spec)
        if action == "start":
            await subject.engine.stop(other)
        await subject.engine.close()
        subject.durations[action] = await subject.crash(action, other, _ENOUGH)
        await subject.engine.destroy(other)
    await subject.engine.close()  # it is another daemon's now
    await subject.crash(action, name, part * subject.durations[action])
    return subject.again()


@check(needs="crash")
async def check_killed_while_it_creates(subject: Subject) -> None:
    for part in PARTS:
        name = subject.new_name()
        follower = await interrupt(subject, "create", name, part)
        try:
            holds("what runs is listed", not (await follower.observe(name)).alive or name in await follower.list())
            await follower.destroy(name)
            equal("what is left", (await follower.observe(name), name in await follower.list()), (GONE, False))
            await follower.create(name, subject.spec)
            equal("the name can be used again", await subject.run(name, "ls -A; echo well", follower), "well\n")
        finally:
            await follower.destroy(name)
            await follower.close()


@check(needs="crash")
async def check_killed_while_it_destroys(subject: Subject) -> None:
    for part in PARTS:
        name = subject.new_name()
        await subject.engine.create(name, subject.spec)
        follower = await interrupt(subject, "destroy", name, part)
        try:
            holds("what runs is listed", not (await follower.observe(name)).alive or name in await follower.list())
            await follower.destroy(name)
            equal("what is left", (await follower.observe(name), name in await follower.list()), (GONE, False))
        finally:
            await follower.close()


@check(needs="crash")
async def check_killed_while_it_stops_or_starts(subject: Subject) -> None:
    """The next daemon stops it, whatever state it is in, and finds its files."""
    async with subject.made() as name:
        await subject.run(name, "echo kept > file")
        for action in ("stop", "start"):
            for part in PARTS:
                if action == "start":
                    await subject.engine.stop(name)
                follower = await interrupt(subject, action, name, part)
                try:
                    holds("it is listed", name in await follower.list())
                    await follower.stop(name)
                    await follower.start(name, subject.spec)
                    equal(f"its file after {action}", await subject.run(name, "cat file", follower), "kept\n")
                finally:
                    await follower.close()
