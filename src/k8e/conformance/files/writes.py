"""Files are written as a program of that user would write them: in place. A new one is there when it is whole, and no
temporary file stays behind."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from k8e.conformance.counters import counters
from k8e.conformance.registry import check
from k8e.conformance.subject import Subject, command, equal, finish, holds, prepare, python, read_through, refused
from k8e.link.errors import Code
from k8e.link.model import FileType


async def names(subject: Subject) -> list[bytes]:
    return sorted(entry.name for entry in await subject.sandbox.list_dir(subject.directory))


async def in_blocks(*blocks: bytes) -> AsyncIterator[bytes]:
    for block in blocks:
        yield block


@check()
async def check_written_file_is_exact(subject: Subject) -> None:
    path = subject.inside(b"file")
    for content in (b"", b"x", bytes(range(256)) * 1000, b"\0" * 65536, b"y" * 65537):
        size = await subject.sandbox.write_file(path, content, identity=subject.user)
        equal("size", size, len(content))
        holds("content is the same", await subject.sandbox.read_file(path) == content, len(content))
    equal("names", await names(subject), [b"file"])


@check(deadline=120)
async def check_large_file_is_written_from_a_stream(subject: Subject) -> None:
    total, block = subject.bulk // 4, 1 << 20
    digest = hashlib.sha256()

    async def content() -> AsyncIterator[bytes]:
        for start in range(0, total, block):
            piece = counters(start, min(start + block, total))
            digest.update(piece)
            yield piece

    size = await subject.sandbox.write_file(subject.inside(b"large"), content(), identity=subject.user)
    equal("size", size, total)
    got = (await prepare(subject, "sha256sum", "large")).split()[0]
    equal("SHA-256", got, digest.hexdigest().encode())


@check()
async def check_stream_with_empty_and_odd_blocks(subject: Subject) -> None:
    path = subject.inside(b"file")
    await subject.sandbox.write_file(path, in_blocks(b"", b"a", b"", b"b" * 70_000, b"c"), identity=subject.user)
    holds("content is the same", await subject.sandbox.read_file(path) == b"a" + b"b" * 70_000 + b"c", "other")
    await subject.sandbox.write_file(path, in_blocks(), identity=subject.user)
    equal("content of no block at all", await subject.sandbox.read_file(path), b"")


@check()
async def check_file_that_is_there_is_written_in_place(subject: Subject) -> None:
    # As a program of that user would: the inode, other names and open descriptors stay.
    path = subject.inside(b"file")
    await subject.sandbox.write_file(path, b"an old and longer content", identity=subject.user)
    await prepare(subject, "sh", "-c", "ln file other; chmod 640 file; ls -i file | cut -d ' ' -f 1 > inode")
    reader = await subject.sandbox.start(command(subject, "sh", "-c", "exec 3<file; echo open; read line; cat <&3"))
    await read_through(reader.stdout, b"\n")
    await subject.sandbox.write_file(path, b"new", identity=subject.user)
    equal("what an open descriptor reads", (await finish(reader, b"\n")).stdout, b"new")
    equal("other name", await subject.sandbox.read_file(subject.inside(b"other")), b"new")
    same = await prepare(
        subject, "sh", "-c", "test $(cat inode) = $(ls -i file | cut -d ' ' -f 1) && stat -c '%h %a' file"
    )
    equal("links and mode of the same inode", same, b"2 640\n")
    equal("names", await names(subject), [b"file", b"inode", b"other"])


@check()
async def check_read_only_file_is_refused(subject: Subject) -> None:
    # Although its directory is the user's, who could replace it.
    path, who = subject.inside(b"file"), subject.user
    await prepare(subject, "sh", "-c", "echo kept > file; chmod 444 file; ln -s file link")
    for name in (b"file", b"link"):
        for append in (False, True):
            attempt = subject.sandbox.write_file(subject.inside(name), b"x", append=append, identity=who)
            await refused(f"write to {name!r}, append {append}", attempt, Code.DENIED)
    equal("content", await subject.sandbox.read_file(path), b"kept\n")
    await prepare(subject, "chmod", "644", "file")
    await subject.sandbox.write_file(path, b"written", identity=who)
    equal("content", await subject.sandbox.read_file(path), b"written")
    equal("names", await names(subject), [b"file", b"link"])


@check()
async def check_file_in_a_directory_that_cannot_be_written(subject: Subject) -> None:
    # No name can be added there, and none is needed.
    await prepare(subject, "sh", "-c", "mkdir dir; echo old > dir/file; chmod 555 dir")
    path = subject.inside(b"dir", b"file")
    await subject.sandbox.write_file(path, b"new", identity=subject.user)
    equal("content", await subject.sandbox.read_file(path), b"new")
    attempt = subject.sandbox.write_file(subject.inside(b"dir", b"other"), b"x", identity=subject.user)
    await refused("a new file there", attempt, Code.DENIED)
    await prepare(subject, "chmod", "755", "dir")


@check()
async def check_new_file_is_whole_or_absent(subject: Subject) -> None:
    code = """
import os
print("ready", flush=True)
while not os.path.exists("last"):
    for name in os.listdir("."):
        if name.startswith("new") and os.stat(name).st_size != 100_000:
            print("half", name)
print("done")
"""
    reader = await subject.sandbox.start(python(subject, code))
    await read_through(reader.stdout, b"ready\n")
    for number in range(50):
        path = subject.inside(b"new%d" % number)
        await subject.sandbox.write_file(path, b"%d" % (number % 10) * 100_000, identity=subject.user)
    await subject.sandbox.write_file(subject.inside(b"last"), b"", identity=subject.user)
    equal("what the reader saw", (await finish(reader)).stdout, b"done\n")


@check()
async def check_abandoned_write(subject: Subject) -> None:
    """Leaves no new file, and of an old one what has come."""
    path = subject.inside(b"file")
    await subject.sandbox.write_file(path, b"old", identity=subject.user)
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"x" * 300_000
        begun.set()
        await asyncio.Event().wait()
        yield b""

    for target in (path, subject.inside(b"another")):
        begun.clear()
        task = asyncio.create_task(subject.sandbox.write_file(target, endless(), identity=subject.user))
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        holds("the write was cancelled", task.cancelled(), task)
    await only_file_remains(subject)
    content = await subject.sandbox.read_file(path)
    holds("content is what has come", content.ljust(300_000, b"x") == b"x" * 300_000, len(content))


async def only_file_remains(subject: Subject) -> None:
    """The agent may hear of an abandoned write a moment later than we do; then the name is gone for good."""
    while await names(subject) != [b"file"]:
        pass  # each look asks the agent; the check's deadline bounds it


@check()
async def check_failed_source(subject: Subject) -> None:
    await subject.sandbox.write_file(subject.inside(b"file"), b"old", identity=subject.user)

    async def failing() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        raise LookupError("the source broke")

    for name in (b"file", b"another"):
        try:
            await subject.sandbox.write_file(subject.inside(name), failing(), identity=subject.user)
        except LookupError:
            pass
        else:
            raise AssertionError("the error of the source did not come through")
    await only_file_remains(subject)


@check(needs="small")
async def check_full_filesystem_is_no_space(subject: Subject) -> None:
    small = subject.small or b""
    path = b"/".join((small, b"kept"))
    await subject.sandbox.write_file(path, b"old", mode=0o666)
    for append in (False, True):
        await refused("write", subject.sandbox.write_file(path, b"x" * (8 << 20), append=append), Code.NO_SPACE)
    await subject.sandbox.remove(path)
    await refused("write", subject.sandbox.write_file(path, b"x" * (8 << 20)), Code.NO_SPACE)
    equal("names", [entry.name for entry in await subject.sandbox.list_dir(small)], [])


@check()
async def check_append_writes_in_place(subject: Subject) -> None:
    path = subject.inside(b"file")
    who = subject.user
    equal("size", await subject.sandbox.write_file(path, b"one ", append=True, identity=who), 4)
    await prepare(subject, "ln", "file", "other")
    equal("size", await subject.sandbox.write_file(path, in_blocks(b"two ", b"three"), append=True, identity=who), 13)
    equal("size", await subject.sandbox.write_file(path, b"", append=True, identity=who), 13)
    equal("content", await subject.sandbox.read_file(subject.inside(b"other")), b"one two three")


@check()
async def check_exclusive_write_never_replaces(subject: Subject) -> None:
    path = subject.inside(b"file")
    equal("size", await subject.sandbox.write_file(path, b"first", exclusive=True, identity=subject.user), 5)
    await prepare(subject, "sh", "-c", "ln -s file link; mkdir dir")
    for name in (b"file", b"link", b"dir"):
        attempt = subject.sandbox.write_file(subject.inside(name), b"second", exclusive=True, identity=subject.user)
        await refused(f"exclusive write to {name!r}", attempt, Code.EXISTS, Code.IS_DIRECTORY)
    equal("content", await subject.sandbox.read_file(path), b"first")
    equal("names", await names(subject), [b"dir", b"file", b"link"])


@check()
async def check_one_of_many_exclusive_writers_wins(subject: Subject) -> None:
    path = subject.inside(b"file")
    results = await asyncio.gather(
        *(
            subject.sandbox.write_file(path, b"%04d" % number * 20_000, exclusive=True, identity=subject.user)
            for number in range(20)
        ),
        return_exceptions=True,
    )
    winners = [number for number, result in enumerate(results) if result == 80_000]
    equal("winners", len(winners), 1)
    holds("content is the winner's", await subject.sandbox.read_file(path) == b"%04d" % winners[0] * 20_000, winners)
    equal("names", await names(subject), [b"file"])


@check()
async def check_many_writers_of_one_file(subject: Subject) -> None:
    # As with programs that write one file at the same time: each byte is one of theirs.
    path = subject.inside(b"file")
    await asyncio.gather(
        *(subject.sandbox.write_file(path, b"%02d" % n * 40_000, identity=subject.user) for n in range(20))
    )
    content = await subject.sandbox.read_file(path)
    equal("size", len(content), 80_000)
    holds("content is the writers'", set(content) <= set(b"0123456789"), content[:20])
    equal("names", await names(subject), [b"file"])


@check()
async def check_mode_is_kept_or_set(subject: Subject) -> None:
    path, who = subject.inside(b"file"), subject.user

    async def mode() -> int:
        return (await subject.sandbox.stat(path)).mode

    await subject.sandbox.write_file(path, b"new", identity=who)
    equal("mode of a new file", oct(await mode()), oct(0o644))
    await prepare(subject, "chmod", "751", "file")
    await subject.sandbox.write_file(path, b"replaced", identity=who)
    equal("mode of a written file", oct(await mode()), oct(0o751))
    for wanted in (0o600, 0o666, 0o777):
        await subject.sandbox.write_file(path, b"given", mode=wanted, identity=who)
        equal("mode asked for", oct(await mode()), oct(wanted))


@check()
async def check_symlink_is_followed_and_stays(subject: Subject) -> None:
    await prepare(
        subject, "sh", "-c", "mkdir dir; echo old > dir/target; ln -s dir/target link; ln -s $PWD/dir/target far"
    )
    for name in (b"link", b"far"):
        await subject.sandbox.write_file(subject.inside(name), b"by " + name, identity=subject.user)
        equal("target's content", await subject.sandbox.read_file(subject.inside(b"dir", b"target")), b"by " + name)
        entry = await subject.sandbox.stat(subject.inside(name), follow=False)
        equal("type of the link", entry.type, FileType.SYMLINK)
    listed = [entry.name for entry in await subject.sandbox.list_dir(subject.inside(b"dir"))]
    equal("names beside the target", listed, [b"target"])


@check()
async def check_places_that_cannot_be_written(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkdir dir; touch file; ln -s loop loop")
    for path, code in (
        (subject.inside(b"dir"), Code.IS_DIRECTORY),
        (subject.inside(b"absent", b"file"), Code.NOT_FOUND),
        (subject.inside(b"file", b"below"), Code.NOT_DIRECTORY),
        (subject.inside(b"loop"), Code.LINK_LOOP),
        (b"", Code.INVALID),
    ):
        for append in (False, True):
            attempt = subject.sandbox.write_file(path, b"x" * 100_000, append=append, identity=subject.user)
            await refused(f"write to {path!r}, append {append}", attempt, code)
    equal("names", await names(subject), [b"dir", b"file", b"loop"])


@check(needs="read_only")
async def check_read_only_filesystem_is_not_written(subject: Subject) -> None:
    path = (subject.read_only or b"") + b"/k8e-new-file"
    for append in (False, True):
        await refused("write", subject.sandbox.write_file(path, b"x", append=append), Code.READ_ONLY)
    await refused("mkdir", subject.sandbox.mkdir(path), Code.READ_ONLY)
