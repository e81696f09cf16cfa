"""Reads of files and their properties: exact ranges, unusual names, and nothing that blocks."""

from __future__ import annotations

import hashlib

from k8e.conformance.counters import CounterStream, counters
from k8e.conformance.registry import check
from k8e.conformance.subject import Subject, complete, equal, finish, holds, prepare, python, read_through, refused, run
from k8e.link.errors import Code
from k8e.link.model import FileType

ODD_NAMES = (
    b"two words",
    b"line\nbreak",
    b"\xff\xfe\x80",
    b"-rf",
    b"'\"$(id)`;\\",
    b"\x01\x1b[31m",
    "ünïcödé \N{SNOWMAN}".encode(),
    b"...",
    b"x" * 255,
)


@check()
async def check_missing_file_is_an_error_and_nothing_more(subject: Subject) -> None:
    sandbox = subject.sandbox
    for path in (subject.inside(b"absent"), subject.inside(b"no", b"such", b"dir"), b"/absent"):
        await refused("read", sandbox.read_file(path), Code.NOT_FOUND)
        await refused("stat", sandbox.stat(path), Code.NOT_FOUND)
    equal("the sandbox afterwards", (await run(subject, "echo", "alive")).stdout, b"alive\n")


@check()
async def check_directory_is_not_read(subject: Subject) -> None:
    await refused("read", subject.sandbox.read_file(subject.directory), Code.IS_DIRECTORY)
    await refused("read", subject.sandbox.read_file(b"/"), Code.IS_DIRECTORY)


@check()
async def check_path_through_a_file_is_not_a_directory(subject: Subject) -> None:
    await prepare(subject, "touch", "file")
    await refused("read", subject.sandbox.read_file(subject.inside(b"file", b"x")), Code.NOT_DIRECTORY)


@check()
async def check_fifo_never_blocks(subject: Subject) -> None:
    # With and without a process at the other end.
    fifo = subject.inside(b"fifo")
    await prepare(subject, "mkfifo", "-m", "666", "fifo")
    holder = await subject.sandbox.start(
        python(subject, "import os; os.open('fifo', os.O_RDWR); print('held', flush=True); input()")
    )
    equal("output", await read_through(holder.stdout, b"\n"), b"held\n")
    for held in (True, False):
        await refused(f"read, held {held}", subject.sandbox.read_file(fifo), Code.NOT_REGULAR)
        await refused(f"write, held {held}", subject.sandbox.write_file(fifo, b"x"), Code.NOT_REGULAR)
        await refused(f"append, held {held}", subject.sandbox.write_file(fifo, b"x", append=True), Code.NOT_REGULAR)
        equal("type", (await subject.sandbox.stat(fifo)).type, FileType.FIFO)
        if held:
            await holder.end(grace=1)
            await finish(holder)
    equal("it is still a FIFO", (await subject.sandbox.stat(fifo)).type, FileType.FIFO)


@check()
async def check_devices_are_not_read_or_written(subject: Subject) -> None:
    for path in (b"/dev/zero", b"/dev/null", b"/dev/tty"):
        await refused(f"read {path!r}", subject.sandbox.read_file(path), Code.NOT_REGULAR)
        await refused(f"write {path!r}", subject.sandbox.write_file(path, b"x"), Code.NOT_REGULAR)
    entry = await subject.sandbox.stat(b"/dev/null")
    equal("/dev/null afterwards", entry.type, FileType.CHAR_DEVICE)


@check()
async def check_socket_is_not_read_or_written(subject: Subject) -> None:
    code = "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
    await complete(subject, python(subject, code))
    path = subject.inside(b"socket")
    await refused("read", subject.sandbox.read_file(path), Code.NOT_REGULAR)
    await refused("write", subject.sandbox.write_file(path, b"x", identity=subject.user), Code.NOT_REGULAR)
    equal("type", (await subject.sandbox.stat(path)).type, FileType.SOCKET)


@check()
async def check_symlinks_are_followed_and_loops_end(subject: Subject) -> None:
    links = "ln -s file good; ln -s loop loop; ln -s b a; ln -s a b; ln -s gone dangling"
    await prepare(subject, "sh", "-c", f"echo content > file; {links}")
    read = subject.sandbox.read_file
    equal("through a symlink", await read(subject.inside(b"good")), b"content\n")
    for name in (b"loop", b"a", b"b"):
        await refused(f"read {name!r}", read(subject.inside(name)), Code.LINK_LOOP)
        await refused(f"read below {name!r}", read(subject.inside(name, b"x")), Code.LINK_LOOP)
    await refused("read a dangling symlink", read(subject.inside(b"dangling")), Code.NOT_FOUND)


@check()
async def check_symlink_to_a_fifo_never_blocks(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkfifo fifo; ln -s fifo link; ln -s /dev/zero zero")
    for name in (b"link", b"zero"):
        await refused("read", subject.sandbox.read_file(subject.inside(name)), Code.NOT_REGULAR)
        attempt = subject.sandbox.write_file(subject.inside(name), b"x", identity=subject.user)
        await refused("write", attempt, Code.NOT_REGULAR)


@check()
async def check_range_is_exact(subject: Subject) -> None:
    size = 300_000
    path = subject.inside(b"file")
    await subject.sandbox.write_file(path, counters(0, size), identity=subject.user)
    for offset, length in ((0, 1), (0, size), (1, 65536), (65535, 2), (65536, 65536), (size - 1, 1), (size - 5, 100)):
        got = await subject.sandbox.read_file(path, offset=offset, length=length)
        holds(f"range {offset}+{length}", got == counters(offset, min(offset + length, size)), (len(got), got[:20]))
    for offset in (size, size + 1, 1 << 40, 1 << 62):
        equal(f"read from {offset}", await subject.sandbox.read_file(path, offset=offset), b"")
    equal("length 0", await subject.sandbox.read_file(path, offset=5, length=0), b"")


@check()
async def check_empty_file(subject: Subject) -> None:
    await prepare(subject, "touch", "empty")
    equal("content", await subject.sandbox.read_file(subject.inside(b"empty")), b"")


@check()
async def check_sparse_file_is_read_where_asked(subject: Subject) -> None:
    code = """
import os
fd = os.open("sparse", os.O_CREAT | os.O_RDWR, 0o644)
os.pwrite(fd, b"far", 1 << 36)
os.ftruncate(fd, 1 << 37)
"""
    await prepare(subject, *python(subject, code).argv)
    path = subject.inside(b"sparse")
    equal("size", (await subject.sandbox.stat(path)).size, 1 << 37)
    equal("content", await subject.sandbox.read_file(path, offset=(1 << 36) - 2, length=7), b"\0\0far\0\0")


@check()
async def check_file_without_a_size_is_read_to_its_end(subject: Subject) -> None:
    # procfs says 0 for all its files.
    content = await subject.sandbox.read_file(b"/proc/version")
    equal("content", content, await prepare(subject, "cat", "/proc/version"))
    holds("there is some", len(content) > 0, content)


@check()
async def check_odd_names(subject: Subject) -> None:
    for name in ODD_NAMES:
        path = subject.inside(name)
        await subject.sandbox.write_file(path, b"content of " + name, identity=subject.user)
        equal(f"content of {name!r}", await subject.sandbox.read_file(path), b"content of " + name)
    listed = sorted(entry.name for entry in await subject.sandbox.list_dir(subject.directory))
    equal("names", listed, sorted(ODD_NAMES))


@check()
async def check_names_that_are_too_long(subject: Subject) -> None:
    for path in (subject.inside(b"x" * 256), b"/" + b"x" * 4096, b"/x" * 2500):
        await refused("read", subject.sandbox.read_file(path), Code.NAME_TOO_LONG)
        await refused("write", subject.sandbox.write_file(path, b"x"), Code.NAME_TOO_LONG)
        await refused("mkdir", subject.sandbox.mkdir(path), Code.NAME_TOO_LONG)
        await refused("stat", subject.sandbox.stat(path), Code.NAME_TOO_LONG)


@check(deadline=120)
async def check_large_file_is_streamed_exactly(subject: Subject) -> None:
    size = subject.bulk // 4
    await prepare(subject, "sh", "-c", f"head -c {size} /dev/urandom > large")
    expected = (await prepare(subject, "sha256sum", "large")).split()[0]
    digest, length = hashlib.sha256(), 0
    async for chunk in subject.sandbox.read_stream(subject.inside(b"large")):
        digest.update(chunk)
        length += len(chunk)
    equal("length", length, size)
    equal("SHA-256", digest.hexdigest().encode(), expected)


@check()
async def check_reader_that_leaves_early_leaves_nothing_behind(subject: Subject) -> None:
    path = subject.inside(b"file")
    await subject.sandbox.write_file(path, counters(0, 4 << 20), identity=subject.user)
    for _ in range(20):
        stream = CounterStream()
        async for chunk in subject.sandbox.read_stream(path):
            stream.take(chunk)
            if stream.received > 100_000:
                break
    equal("the sandbox afterwards", (await run(subject, "echo", "alive")).stdout, b"alive\n")


@check()
async def check_stat_tells_everything(subject: Subject) -> None:
    script = """
printf 12345 > file; chmod 644 file; touch -d @1234567890.123456789 file
ln -s file link; ln -s gone dangling; mkdir -m 1777 dir
"""
    await prepare(subject, "sh", "-c", script)
    for name, follow, kind in (
        (b"file", True, FileType.FILE),
        (b"link", True, FileType.FILE),
        (b"link", False, FileType.SYMLINK),
        (b"dir", True, FileType.DIRECTORY),
    ):
        entry = await subject.sandbox.stat(subject.inside(name), follow=follow)
        equal(f"type of {name!r}, follow {follow}", entry.type, kind)
        equal("owner", (entry.uid, entry.gid), (subject.user.uid, subject.user.gid))
        if kind is FileType.FILE:
            equal("mode, size, mtime", (entry.mode, entry.size, entry.mtime_ns), (0o644, 5, 1234567890_123456789))
        elif kind is FileType.SYMLINK:
            equal("target", entry.target, b"file")
        else:
            equal("mode", entry.mode, 0o1777)
    await refused("stat", subject.sandbox.stat(subject.inside(b"dangling")), Code.NOT_FOUND)
    entry = await subject.sandbox.stat(subject.inside(b"dangling"), follow=False)
    equal("target", entry.target, b"gone")
