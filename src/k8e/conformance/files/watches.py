"""Watched paths: every change in order, and every loss reported."""

from __future__ import annotations

from collections.abc import AsyncIterator

from k8e.conformance.registry import check
from k8e.conformance.subject import Subject, equal, holds, prepare, refused, run, run_python
from k8e.link.errors import Code
from k8e.link.model import Watcher, WatchEvent

# Linux's own numbers (inotify.h), because that is what an event carries.
MODIFY, ATTRIBUTES, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200


async def events_until(events: AsyncIterator[WatchEvent], mask: int, name: bytes) -> list[WatchEvent]:
    """The events up to and including the first of that kind and name."""
    seen = []
    async for event in events:
        seen.append(event)
        if event.mask & mask and event.name == name:
            return seen
    raise AssertionError(f"the watch ended without event {mask:#x} of {name!r}; seen {seen}")


def found(what: str, events: list[WatchEvent], mask: int, name: bytes) -> WatchEvent:
    for event in events:
        if event.mask & mask and event.name == name:
            return event
    raise AssertionError(f"{what}: no event {mask:#x} of {name!r} in {events}")


async def ends(watcher: Watcher) -> None:
    async for _ in watcher:
        pass


@check()
async def check_watch_sees_create_modify_and_delete(subject: Subject) -> None:
    watcher = await subject.sandbox.watch(subject.directory, identity=subject.user)
    events = aiter(watcher)
    for name in (b"plain", b"\xff\n odd"):
        await subject.sandbox.mkdir(subject.inside(name), identity=subject.user)
        await events_until(events, CREATE, name)
        await subject.sandbox.remove(subject.inside(name), identity=subject.user)
        await events_until(events, DELETE, name)
    await prepare(subject, "sh", "-c", "echo one > file; echo two >> file; chmod 600 file; rm file; : > last")
    seen = await events_until(events, CREATE, b"last")
    masks = [event.mask for event in seen if event.name == b"file"]
    order = [next(i for i, mask in enumerate(masks) if mask & bit) for bit in (CREATE, MODIFY, ATTRIBUTES, DELETE)]
    equal("order of create, modify, attributes, delete", order, sorted(order))
    await watcher.close()


@check()
async def check_watch_pairs_moves(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkdir dir; touch dir/old")
    watcher = await subject.sandbox.watch(subject.inside(b"dir"), identity=subject.user)
    await prepare(subject, "sh", "-c", "mv dir/old dir/new; mv dir/new out")
    seen = await events_until(aiter(watcher), MOVED_FROM, b"new")
    source, target = found("move", seen, MOVED_FROM, b"old"), found("move", seen, MOVED_TO, b"new")
    equal("cookies", source.cookie, target.cookie)
    holds("cookie is not 0", source.cookie != 0, source)
    await watcher.close()


@check()
async def check_watch_sees_a_written_file(subject: Subject) -> None:
    # Our own writes appear under the temporary name, then under the real one.
    watcher = await subject.sandbox.watch(subject.directory, identity=subject.user)
    await subject.sandbox.write_file(subject.inside(b"file"), b"content", identity=subject.user)
    await events_until(aiter(watcher), MOVED_TO | CREATE, b"file")
    await watcher.close()


@check()
async def check_watch_of_a_file(subject: Subject) -> None:
    await prepare(subject, "touch", "file")
    watcher = await subject.sandbox.watch(subject.inside(b"file"), identity=subject.user)
    await prepare(subject, "sh", "-c", "echo more >> file")
    await events_until(aiter(watcher), MODIFY, b"")
    await watcher.close()


@check()
async def check_watch_ends_when_its_path_is_gone(subject: Subject) -> None:
    await prepare(subject, "mkdir", "dir")
    watcher = await subject.sandbox.watch(subject.inside(b"dir"), identity=subject.user)
    await prepare(subject, "rmdir", "dir")
    await ends(watcher)
    await watcher.close()


@check()
async def check_two_watches_of_one_path(subject: Subject) -> None:
    watchers = [await subject.sandbox.watch(subject.directory, identity=subject.user) for _ in range(3)]
    await watchers[0].close()
    await prepare(subject, "touch", "file")
    for watcher in watchers[1:]:
        await events_until(aiter(watcher), CREATE, b"file")
        await watcher.close()


@check()
async def check_watch_of_nothing_is_refused(subject: Subject) -> None:
    await refused("watch", subject.sandbox.watch(subject.inside(b"absent")), Code.NOT_FOUND)
    await prepare(subject, "ln", "-s", "loop", "loop")
    await refused("watch", subject.sandbox.watch(subject.inside(b"loop")), Code.LINK_LOOP)


@check()
async def check_watch_delivers_many_events_in_order(subject: Subject) -> None:
    watcher = await subject.sandbox.watch(subject.directory, identity=subject.user)
    await prepare(subject, "sh", "-c", "seq -f 'n-%04g' 1 2000 | xargs touch")
    seen = await events_until(aiter(watcher), CREATE, b"n-2000")
    created = [event.name for event in seen if event.mask & CREATE]
    holds("all were created in order", created == [b"n-%04d" % n for n in range(1, 2001)], (len(created), created[:5]))
    holds("nothing was lost", not any(event.overflow for event in seen), "an overflow")
    await watcher.close()


@check(needs="inotify_limit")
async def check_watch_says_when_events_were_lost(subject: Subject) -> None:
    # The caller does not read: first the window fills, then the kernel's queue. Later events are lost, which is
    # reported.
    count = (subject.inotify_limit or 0) * 2 + 20_000
    watcher = await subject.sandbox.watch(subject.directory, identity=subject.user)
    code = """
import os, sys
for number in range(int(sys.argv[1])):
    os.mkdir(f"{number:04d}" * 20)
    os.rmdir(f"{number:04d}" * 20)
"""
    done = await run_python(subject, code, str(count))
    equal("exit code", done.outcome.exit_code, 0)
    overflows = 0
    async for event in watcher:
        if event.overflow:
            overflows += 1
            break
    equal("overflows", overflows, 1)
    await watcher.close()
    equal("the sandbox afterwards", (await run(subject, "echo", "alive")).stdout, b"alive\n")
