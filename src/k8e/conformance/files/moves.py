"""Moves, removals and changes of mode: exactly what was asked for, and never through a symlink."""

from __future__ import annotations

import asyncio

from k8e.conformance.registry import check
from k8e.conformance.subject import Subject, equal, finish, prepare, python, read_through, refused
from k8e.link.errors import AgentError, Code
from k8e.link.model import FileType


async def names(subject: Subject, *below: bytes) -> list[bytes]:
    return sorted(entry.name for entry in await subject.sandbox.list_dir(subject.inside(*below)))


@check()
async def check_move_replaces_a_file(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "echo a > a; echo b > b")
    await subject.sandbox.move(subject.inside(b"a"), subject.inside(b"b"), identity=subject.user)
    equal("names", await names(subject), [b"b"])
    equal("content", await subject.sandbox.read_file(subject.inside(b"b")), b"a\n")


@check()
async def check_move_without_replacing(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "echo a > a; echo b > b; ln -s gone dangling; mkdir from empty; touch from/x")

    async def move(source: bytes, target: bytes) -> None:
        await subject.sandbox.move(subject.inside(source), subject.inside(target), replace=False, identity=subject.user)

    for source, target in (
        (b"a", b"b"),
        (b"a", b"dangling"),
        (b"dangling", b"a"),
        (b"from", b"empty"),
        (b"from", b"a"),
    ):
        await refused(f"move {source!r} to {target!r}", move(source, target), Code.EXISTS)
    equal("content", await subject.sandbox.read_file(subject.inside(b"b")), b"b\n")
    for source, target in ((b"a", b"c"), (b"dangling", b"link"), (b"from", b"to")):
        await move(source, target)
    equal("names", await names(subject), [b"b", b"c", b"empty", b"link", b"to"])
    equal("names below", await names(subject, b"to"), [b"x"])


@check()
async def check_move_of_directories(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkdir -p from/x full/y empty; touch file")
    move = subject.sandbox.move

    def inside(*words: bytes) -> bytes:
        return subject.inside(*words)

    await refused("move over a full one", move(inside(b"from"), inside(b"full"), identity=subject.user), Code.NOT_EMPTY)
    await refused(
        "move into itself", move(inside(b"from"), inside(b"from", b"x", b"z"), identity=subject.user), Code.INVALID
    )
    await refused("move over a file", move(inside(b"from"), inside(b"file"), identity=subject.user), Code.NOT_DIRECTORY)
    await refused(
        "move a file over it", move(inside(b"file"), inside(b"full"), identity=subject.user), Code.IS_DIRECTORY
    )
    await refused("move what is not there", move(inside(b"gone"), inside(b"z"), identity=subject.user), Code.NOT_FOUND)
    await move(inside(b"from"), inside(b"empty"), identity=subject.user)
    equal("names", await names(subject), [b"empty", b"file", b"full"])
    equal("names below", await names(subject, b"empty"), [b"x"])


@check()
async def check_move_of_a_symlink_moves_the_link(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "echo content > file; ln -s file link")
    await subject.sandbox.move(subject.inside(b"link"), subject.inside(b"moved"), identity=subject.user)
    entry = await subject.sandbox.stat(subject.inside(b"moved"), follow=False)
    equal("type and target", (entry.type, entry.target), (FileType.SYMLINK, b"file"))


@check(needs="small")
async def check_move_to_another_filesystem_is_said(subject: Subject) -> None:
    path = subject.inside(b"file")
    await subject.sandbox.write_file(path, b"content")
    await refused("move", subject.sandbox.move(path, (subject.small or b"") + b"/file"), Code.CROSS_DEVICE)
    equal("content", await subject.sandbox.read_file(path), b"content")


@check()
async def check_remove(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "touch file; mkfifo fifo; mkdir empty; mkdir -p full/x; ln -s gone dangling")
    for name in (b"file", b"fifo", b"empty", b"dangling"):
        await subject.sandbox.remove(subject.inside(name), identity=subject.user)
    await refused("remove", subject.sandbox.remove(subject.inside(b"full"), identity=subject.user), Code.NOT_EMPTY)
    await refused("remove", subject.sandbox.remove(subject.inside(b"gone"), identity=subject.user), Code.NOT_FOUND)
    gone = subject.sandbox.remove(subject.inside(b"gone"), recursive=True, identity=subject.user)
    await refused("remove, recursive", gone, Code.NOT_FOUND)
    equal("names", await names(subject), [b"full"])


@check()
async def check_recursive_remove_takes_the_whole_tree(subject: Subject) -> None:
    script = "mkdir -p t/a/b/c t/d; seq -f 't/a/%g' 1 2000 | xargs touch; mkfifo t/fifo; touch t/a/b/c/x; touch beside"
    await prepare(subject, "sh", "-c", script)
    await subject.sandbox.remove(subject.inside(b"t"), recursive=True, identity=subject.user)
    equal("names", await names(subject), [b"beside"])
    await subject.sandbox.remove(subject.inside(b"beside"), recursive=True, identity=subject.user)
    equal("names", await names(subject), [])


@check()
async def check_remove_never_follows_a_symlink(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkdir -p kept tree; touch kept/x; ln -s ../kept tree/link; ln -s kept top")
    await subject.sandbox.remove(subject.inside(b"top"), recursive=True, identity=subject.user)
    await subject.sandbox.remove(subject.inside(b"tree"), recursive=True, identity=subject.user)
    equal("names", await names(subject), [b"kept"])
    equal("names in the target", await names(subject, b"kept"), [b"x"])


@check()
async def check_remove_never_follows_a_symlink_swapped_in(subject: Subject) -> None:
    # A process exchanges a directory for a symlink in a loop, to be hit between the check and the removal.
    code = """
import os, sys
os.makedirs("kept/sub")
open("kept/sub/x", "w").close()
print("ready", flush=True)
while True:
    try:
        os.makedirs("tree/sub", exist_ok=True)
        os.rename("tree/sub", "aside")
        os.symlink("../kept/sub", "tree/sub")
        os.rename("tree/sub", "link")
        os.rename("aside", "tree/sub")
        os.remove("link")
    except OSError:
        for name in ("aside", "link"):
            try:
                os.rmdir(name) if name == "aside" else os.remove(name)
            except OSError:
                pass
"""
    swapper = await subject.sandbox.start(python(subject, code))
    equal("output", await read_through(swapper.stdout, b"\n"), b"ready\n")
    for _ in range(200):
        try:
            await subject.sandbox.remove(subject.inside(b"tree"), recursive=True, identity=subject.user)
        except AgentError:
            continue
    await swapper.end(grace=0)
    await finish(swapper)
    equal("names in the target", await names(subject, b"kept", b"sub"), [b"x"])


@check()
async def check_two_removals_of_one_tree(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "mkdir -p tree/a/b; seq -f 'tree/a/%g' 1 2000 | xargs touch")
    results = await asyncio.gather(
        *(subject.sandbox.remove(subject.inside(b"tree"), recursive=True, identity=subject.user) for _ in range(4)),
        return_exceptions=True,
    )
    other = [r for r in results if r is not None and not (isinstance(r, AgentError) and r.code is Code.NOT_FOUND)]
    equal("answers other than removed or not found", other, [])
    equal("names", await names(subject), [])


@check()
async def check_chmod(subject: Subject) -> None:
    await prepare(subject, "sh", "-c", "touch file; mkdir dir; ln -s file link; ln -s gone dangling")
    for name, mode in ((b"file", 0o750), (b"dir", 0o1777), (b"file", 0o000), (b"link", 0o604)):
        await subject.sandbox.chmod(subject.inside(name), mode, identity=subject.user)
        equal(f"mode of {name!r}", oct((await subject.sandbox.stat(subject.inside(name))).mode), oct(mode))
    for name in (b"absent", b"dangling"):
        await refused(
            "chmod", subject.sandbox.chmod(subject.inside(name), 0o644, identity=subject.user), Code.NOT_FOUND
        )
