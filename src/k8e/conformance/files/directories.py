"""Directories: listing them flat and deep, and making them."""

from __future__ import annotations

from k8e.conformance.registry import check
from k8e.conformance.subject import Subject, ended, equal, holds, prepare, refused, run, run_python
from k8e.link.errors import Code
from k8e.link.model import FileType

MAKE_DEEP = """
import os, sys
for _ in range(int(sys.argv[1])):
    os.mkdir("d")
    os.chdir("d")
"""


@check()
async def check_list_tells_everything(subject: Subject) -> None:
    script = """
printf 12345 > file; chmod 604 file; touch -d @1234567890.123456789 file
mkdir -m 1775 dir; mkfifo fifo; ln -s 'some target' link
python3 -S -E -c "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
"""
    await prepare(subject, "sh", "-c", script)
    entries = {entry.name: entry for entry in await subject.sandbox.list_dir(subject.directory)}
    types = {name: entry.type for name, entry in entries.items()}
    equal(
        "types",
        types,
        {
            b"file": FileType.FILE,
            b"dir": FileType.DIRECTORY,
            b"fifo": FileType.FIFO,
            b"link": FileType.SYMLINK,
            b"socket": FileType.SOCKET,
        },
    )
    file = entries[b"file"]
    equal("mode, size, mtime", (file.mode, file.size, file.mtime_ns), (0o604, 5, 1234567890_123456789))
    equal("mode of the directory", entries[b"dir"].mode, 0o1775)
    equal("targets", (entries[b"link"].target, file.target), (b"some target", None))
    equal("owners", {(e.uid, e.gid) for e in entries.values()}, {(subject.user.uid, subject.user.gid)})


@check()
async def check_flat_list_does_not_descend(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkdir -p a/b; touch a/x top .hidden")
    listed = sorted(entry.name for entry in await subject.sandbox.list_dir(subject.directory))
    equal("names", listed, [b".hidden", b"a", b"top"])


@check()
async def check_recursive_list_has_relative_names(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkdir -p a/b/c empty; touch a/1 a/b/2 a/b/c/3; ln -s a link; ln -s .. a/up")
    listed = sorted(entry.name for entry in await subject.sandbox.list_dir(subject.directory, recursive=True))
    expected = [b"a", b"a/1", b"a/b", b"a/b/2", b"a/b/c", b"a/b/c/3", b"a/up", b"empty", b"link"]
    equal("names", listed, expected)


@check()
async def check_directory_comes_before_what_is_in_it(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkdir -p a/b/c d/e; touch a/b/c/1 d/e/2")
    seen: set[bytes] = set()
    async for entry in subject.sandbox.list_stream(subject.directory, recursive=True):
        parent = entry.name.rpartition(b"/")[0]
        holds(f"directory of {entry.name!r} came first", not parent or parent in seen, sorted(seen))
        seen.add(entry.name)


@check(deadline=120)
async def check_list_of_10000_entries(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "seq -f 'some-longer-name-%05g' 1 10000 | xargs touch")
    for recursive in (False, True):
        listed = sorted(e.name for e in await subject.sandbox.list_dir(subject.directory, recursive=recursive))
        holds("all names", listed == [b"some-longer-name-%05d" % n for n in range(1, 10_001)], len(listed))


@check()
async def check_list_that_is_left_early_leaves_nothing_behind(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "seq -f 'name-%05g' 1 3000 | xargs touch")
    for _ in range(10):
        async for _entry in subject.sandbox.list_stream(subject.directory):
            break
    equal("the sandbox afterwards", (await run(subject, "echo", "alive")).stdout, b"alive\n")


@check()
async def check_places_that_cannot_be_listed(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "touch file; mkfifo fifo; ln -s loop loop")
    for name, code in (
        (b"file", Code.NOT_DIRECTORY),
        (b"fifo", Code.NOT_DIRECTORY),
        (b"loop", Code.LINK_LOOP),
        (b"absent", Code.NOT_FOUND),
    ):
        await refused(f"list {name!r}", subject.sandbox.list_dir(subject.inside(name)), code)


@check()
async def check_empty_directory_has_no_entries(subject: Subject) -> None:
    for recursive in (False, True):
        equal("entries", await subject.sandbox.list_dir(subject.directory, recursive=recursive), [])


@check()
async def check_directories_that_are_too_deep(subject: Subject) -> None:
    """One of them does not hide the rest from a list."""
    ended("making 200 levels", await run_python(subject, MAKE_DEEP, "200"), exit_code=0)
    await prepare(subject, "touch", "beside", "d/below")
    entries = {entry.name: entry for entry in await subject.sandbox.list_dir(subject.directory, recursive=True)}
    equal("files", {name for name in entries if not name.endswith(b"d")}, {b"beside", b"d/below"})
    deepest = max(entries, key=len)
    equal("levels", deepest, b"/".join([b"d"] * 128))
    equal("not entered", [name for name, entry in entries.items() if entry.unreadable], [deepest])
    top = subject.inside(b"d")
    await refused("remove", subject.sandbox.remove(top, recursive=True, identity=subject.user), Code.TOO_DEEP)
    await prepare(subject, "rm", "-rf", "d")


@check()
async def check_100_levels_are_not_too_deep(subject: Subject) -> None:
    ended("making 100 levels", await run_python(subject, MAKE_DEEP, "100"), exit_code=0)
    entries = await subject.sandbox.list_dir(subject.directory, recursive=True)
    equal("entries", len(entries), 100)
    equal("deepest name", max(entries, key=lambda e: len(e.name)).name, b"/".join([b"d"] * 100))
    await subject.sandbox.remove(subject.inside(b"d"), recursive=True, identity=subject.user)
    equal("entries afterwards", await subject.sandbox.list_dir(subject.directory), [])


@check()
async def check_mkdir_makes_parents(subject: Subject) -> None:
    path, who = subject.inside(b"a", b"b", b"\xff c"), subject.user
    await refused("mkdir", subject.sandbox.mkdir(path, parents=False, identity=who), Code.NOT_FOUND)
    await subject.sandbox.mkdir(path, identity=who)
    await subject.sandbox.mkdir(path, identity=who)  # existing is fine
    await refused("mkdir", subject.sandbox.mkdir(path, parents=False, identity=who), Code.EXISTS)
    entry = await subject.sandbox.stat(path)
    equal("type, mode, owner", (entry.type, entry.mode, entry.uid), (FileType.DIRECTORY, 0o755, who.uid))


@check()
async def check_mkdir_applies_its_mode(subject: Subject) -> None:
    for mode in (0o700, 0o777, 0o755):
        path = subject.inside(b"%o" % mode)
        await subject.sandbox.mkdir(path, mode=mode, parents=False, identity=subject.user)
        equal("mode", oct((await subject.sandbox.stat(path)).mode), oct(mode))


@check()
async def check_mkdir_over_a_file_is_refused(subject: Subject) -> None:
    await prepare(subject, "touch", "file")
    for parents in (False, True):
        path = subject.inside(b"file")
        attempt = subject.sandbox.mkdir(path, parents=parents, identity=subject.user)
        await refused("mkdir", attempt, Code.EXISTS, *([Code.NOT_DIRECTORY] if parents else []))
        below = subject.sandbox.mkdir(path + b"/below", parents=parents, identity=subject.user)
        await refused("mkdir below a file", below, Code.NOT_DIRECTORY)
