from __future__ import annotations

import asyncio

import pytest

from k8e.core.errors import Kind
from k8e.core.model import MAX_MESSAGE
from k8e.link.model import FileType
from tests.core.rig import ALICE, Rig, fault
from tests.sandboxes import needs_root

pytestmark = needs_root


@pytest.fixture
async def session(rig: Rig) -> str:
    return await rig.create()


async def test_what_is_written_is_read_and_appended_to(rig: Rig, session: str) -> None:
    content = bytes(range(256)) * 100
    assert await rig.service.files.write(ALICE, session, "deep/down/file", content, append=False) == len(content)
    assert await rig.service.files.write(ALICE, session, "/workspace/deep/down/file", b"more", append=True) == 4
    assert await rig.service.files.read(ALICE, session, "deep/down/file") == content + b"more"
    assert (await rig.run(session, "stat -c '%U %a' deep/down/file deep")).stdout == b"user 644\nuser 755\n"


async def test_files_are_listed_with_absolute_paths_and_since_when(rig: Rig, session: str) -> None:
    await rig.run(session, "mkdir d; touch -d @1000 d/old; touch -d @2000 d/new; ln -s new d/link; touch -d @1500 d .")
    entries = await rig.service.files.list(ALICE, session)
    assert {entry.name: entry.type for entry in entries} == {
        b"/workspace/d": FileType.DIRECTORY,
        b"/workspace/d/old": FileType.FILE,
        b"/workspace/d/new": FileType.FILE,
        b"/workspace/d/link": FileType.SYMLINK,
    }
    names = {entry.name for entry in await rig.service.files.list(ALICE, session, "d", since=2000)}
    assert names == {b"/workspace/d/new", b"/workspace/d/link"}
    outside = {entry.name for entry in await rig.service.files.list(ALICE, session, "/etc/")}
    assert outside == {b"/etc/passwd", b"/etc/group"}


async def test_what_cannot_be_is_said_by_kind(rig: Rig, session: str) -> None:
    await rig.run(session, "mkdir dir; mkfifo fifo; ln -s loop loop; touch file; truncate -s 65M big")
    service = rig.service
    for kind, code, attempt in (
        (Kind.NOT_FOUND, "file_not_found", service.files.read(ALICE, session, "nowhere")),
        (Kind.INVALID, "is_a_directory", service.files.read(ALICE, session, "dir")),
        (Kind.INVALID, "not_a_regular_file", service.files.read(ALICE, session, "fifo")),
        (Kind.INVALID, "not_a_regular_file", service.files.write(ALICE, session, "/dev/null", b"", append=True)),
        (Kind.INVALID, "link_loop", service.files.read(ALICE, session, "loop")),
        (Kind.INVALID, "not_a_directory", service.files.write(ALICE, session, "file/x", b"", append=False)),
        (Kind.INVALID, "name_too_long", service.files.read(ALICE, session, "x" * 300)),
        (Kind.DENIED, "permission_denied", service.files.write(ALICE, session, "/etc/passwd", b"", append=True)),
        (Kind.DENIED, "read_only", service.files.write(ALICE, session, "/usr/x", b"", append=False)),
        (Kind.EXHAUSTED, "too_big", service.files.read(ALICE, session, "big")),
        (Kind.EXHAUSTED, "disk_full", service.files.write(ALICE, session, "/small/x", b"x" * (3 << 20), append=False)),
        (Kind.INVALID, "invalid_argument", service.files.read(ALICE, session, "a\0b")),
        (Kind.INVALID, "invalid_argument", service.files.list(ALICE, session, since=float("nan"))),
    ):
        with fault(kind, code):
            await attempt


async def test_a_file_may_have_as_many_bytes_as_a_message(rig: Rig, session: str) -> None:
    content = b"x" * MAX_MESSAGE
    await rig.service.files.write(ALICE, session, "/tmp/big", content, append=False)
    assert await rig.service.files.read(ALICE, session, "/tmp/big") == content
    with fault(Kind.INVALID, "invalid_argument", "content"):
        await rig.service.files.write(ALICE, session, "/tmp/big", content + b"x", append=False)


async def test_links_and_dots_stay_inside(rig: Rig, session: str) -> None:
    await rig.run(session, "ln -s /etc/shadow shadow; ln -s /proc/1/root/etc root")
    for path in ("shadow", "../../../../../../etc/shadow", "root/shadow", "/proc/self/root/etc/shadow"):
        with pytest.raises(Exception, match="failed") as caught:
            await rig.service.files.read(ALICE, session, path)
        assert "root:" not in str(caught.value)


async def test_many_writers_of_one_file_leave_one_of_their_contents(rig: Rig, session: str) -> None:
    contents = [b"%d" % number * 200_000 for number in range(8)]
    await asyncio.gather(
        *(rig.service.files.write(ALICE, session, "file", content, append=False) for content in contents)
    )
    assert await rig.service.files.read(ALICE, session, "file") in contents
