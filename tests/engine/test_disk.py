"""A disk is its sandbox's own: full is full for it alone, in bytes and inodes; the host pays no more than it gave."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import EngineError
from k8e.link.errors import AgentError, Code
from k8e.link.model import AGENT, ExecOptions
from tests.engine.rig import LIMITS, ROOT, Rig, Room, read_host

DISK = 48 << 20
INODES = 4096
SMALL = replace(LIMITS, disk=DISK, inodes=INODES)
WRITABLE = ("/workspace", "/tmp", "/var/tmp", "/home/user")

# Writes until it may not any more; prints how much that was and why it ended.
FILL = """
import errno, os, sys
total, block = 0, bytes(1 << 18)
try:
    with open(sys.argv[1] + "/fill", "wb", buffering=0) as file:
        while total < 1 << 30:
            total += file.write(block)
        os.fsync(file)
except OSError as error:
    print(total, errno.errorcode[error.errno])
else:
    print(total, "never")
"""


def host_bytes(top: Path) -> int:
    """Returns what the sandbox's directory costs the host."""
    total = 0
    for parent, folders, names in os.walk(top):
        folders[:] = [name for name in folders if not os.path.ismount(os.path.join(parent, name))]
        total += sum(os.lstat(os.path.join(parent, name)).st_blocks * 512 for name in names)
    return total


async def fill(room: Room, folder: str, options: ExecOptions | None = None) -> tuple[int, str]:
    done = await room.python(FILL, folder, **(options or {}))
    assert done.outcome.exit_code == 0, done
    total, why = done.stdout.decode().split()
    return int(total), why


@pytest.mark.parametrize("folder", WRITABLE)
async def test_a_full_disk_is_an_error_inside_and_bounded_outside(rig: Rig, folder: str) -> None:
    async with rig.room(SMALL) as room:
        total, why = await fill(room, folder)
        assert why == "ENOSPC"
        assert total <= DISK
        assert host_bytes(room.paths.top) <= DISK + (4 << 20)
        # The way in still works, says what is wrong, and so does everything after a removal.
        assert await room.output("echo", "well") == "well\n"
        with pytest.raises(AgentError) as raised:
            await room.link.write_file(b"/workspace/more", bytes(1 << 20), identity=room.place.user)
        assert raised.value.code is Code.NO_SPACE
        await room.link.remove(f"{folder}/fill".encode())
        assert await room.link.write_file(b"/workspace/more", bytes(1 << 20), identity=room.place.user) == 1 << 20


async def test_root_finds_no_unlimited_place(rig: Rig) -> None:
    """Fills every directory that a process inside can write to, mount points above all, one after the other."""
    code = """
import os, json
found = []
for parent, folders, _ in os.walk("/"):
    folders[:] = [f for f in folders if os.path.join(parent, f) not in ("/proc", "/sys", "/usr")]
    if os.path.ismount(parent) or parent.count("/") <= 1 or parent.startswith("/run"):
        try:
            open(parent + "/.try", "w").close()
            os.unlink(parent + "/.try")
            found.append(parent)
        except OSError:
            pass
print(json.dumps(found))
"""
    options: ExecOptions = {"identity": AGENT, "keep_capabilities": True}
    async with rig.room(replace(SMALL, memory=256 << 20)) as room:
        done = await room.python(code, **options)
        folders: list[str] = json.loads(done.stdout)
        assert {"/", "/tmp", *(["/run/k8e"] if room.paths.socket.exists() else [])} <= set(folders)
        for folder in folders:
            in_memory = folder.startswith("/dev") or folder == "/run"
            result = await rig.unless_dead(room.name, fill(room, folder, options))
            if result is None:
                assert in_memory, "only what lies in memory can end in memory's limit"
                break
            total, why = result
            assert why == "ENOSPC", folder
            assert total <= (256 << 20 if in_memory else DISK), folder
            assert host_bytes(room.paths.top) <= DISK + (4 << 20), folder


async def test_the_socket_directory_is_on_the_limited_disk(rig: Rig) -> None:
    async with rig.room(SMALL) as room:
        total, why = await fill(room, "/run/k8e", {"identity": ROOT})
        assert why == "ENOSPC"
        assert total <= DISK
        assert await room.output("echo", "well") == "well\n"


async def test_inodes_are_limited(rig: Rig) -> None:
    code = """
import errno, os
count = 0
os.mkdir("many")
try:
    while count < 100_000:
        os.close(os.open(f"many/{count}", os.O_CREAT | os.O_WRONLY))
        count += 1
except OSError as error:
    print(count, errno.errorcode[error.errno])
"""
    async with rig.room(SMALL) as room:
        done = await room.python(code)
        count, why = done.stdout.decode().split()
        assert why == "ENOSPC"
        assert int(count) < INODES * 1.1, "mkfs rounds up"
        assert await room.output("echo", "well") == "well\n"
        with pytest.raises(AgentError) as raised:
            await room.link.mkdir(b"/workspace/one-more")
        assert raised.value.code is Code.NO_SPACE
        await room.output("rm", "-rf", "many")
        await room.link.mkdir(b"/workspace/one-more")


async def test_a_sparse_file_costs_nothing(rig: Rig) -> None:
    code = """
import contextlib, os
for length in (1 << 40, 1 << 33):  # the first is more than some filesystems have for one file
    with contextlib.suppress(OSError):
        os.ftruncate(os.open("sparse", os.O_CREAT | os.O_WRONLY), length)
        print(os.stat("sparse").st_size, flush=True)
        break
try:
    os.posix_fallocate(os.open("allocated", os.O_CREAT | os.O_WRONLY), 0, 1 << 30)
except OSError:
    os.unlink("allocated")
    print("no room")
"""
    async with rig.room(SMALL) as room:
        done = await room.python(code)
        length, rest = done.stdout.split(maxsplit=1)
        assert int(length) > DISK, done
        assert rest == b"no room\n", done
        assert host_bytes(room.paths.top) <= DISK + (4 << 20)
        total, why = await fill(room, "/tmp")
        assert why == "ENOSPC"
        assert total <= DISK


async def test_a_removed_file_that_is_held_open_still_counts(rig: Rig) -> None:
    code = """
import errno, os
def fill(path):
    total = 0
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.unlink(path)
    try:
        while total < 1 << 30:
            total += os.write(file, bytes(1 << 18))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    return file, total
first, most = fill("a")
second, nothing = fill("b")
assert nothing < 1 << 20, nothing
os.close(first)
third, again = fill("c")
assert again > most // 2, (most, again)
print("right", flush=True)
os.read(0, 1)
"""
    async with rig.room(SMALL) as room:
        process = await room.link.start(room.spec("/usr/bin/python3", "-c", code, stdin=True))
        assert await process.stdout.read() == b"right\n"
        assert host_bytes(room.paths.top) <= DISK + (4 << 20)
        process.discard()
        # Destroyed while the file is still held: the module's last look finds no mount and no loop device.


async def test_one_sandboxs_full_disk_is_not_anothers(rig: Rig, room: Room) -> None:
    async with rig.room(SMALL) as other:
        await fill(other, "/workspace")
        assert await room.link.write_file(b"/workspace/mine", bytes(8 << 20)) == 8 << 20
        await room.link.remove(b"/workspace/mine")


async def test_df_inside_says_what_was_asked_for(rig: Rig) -> None:
    async with rig.room(SMALL) as room:
        code = "import os; s = os.statvfs('/workspace'); print(s.f_blocks * s.f_frsize, s.f_files)"
        done = await room.python(code)
        size, inodes = map(int, done.stdout.split())
        assert DISK * 0.8 <= size <= DISK
        assert INODES * 0.95 <= inodes <= INODES * 1.1, "mkfs rounds"


async def test_what_a_sandbox_writes_is_data_to_the_host(rig: Rig, room: Room) -> None:
    """The disk is mounted without set-user-id and devices: a name in it means nothing out here."""
    (line,) = [line for line in read_host("/proc/self/mountinfo").splitlines() if f" {room.paths.disk} " in line]
    assert {"nosuid", "nodev"} <= set(line.split()[5].split(","))


@pytest.mark.parametrize(("size", "inodes"), [(1 << 20, 4096), (0, 4096), (DISK, 8)])
async def test_a_disk_too_small_for_the_image_is_an_engine_error(rig: Rig, size: int, inodes: int) -> None:
    name = rig.new_name()
    with pytest.raises(EngineError):
        await rig.engine.create(name, rig.spec(replace(LIMITS, disk=size, inodes=inodes)))
    assert name not in await rig.engine.list()


async def test_what_is_no_template_in_the_place_of_one_costs_no_sandbox(rig: Rig) -> None:
    if not rig.native:
        pytest.skip("the same file for both")
    async with rig.room():
        images = rig.engine.layout.images
    [content] = [path for path in images.iterdir() if path.is_dir() and path.name.startswith("host-")]
    limits = replace(LIMITS, disk=LIMITS.disk + 4096)
    in_the_way = content.with_name(f"{content.name}-{limits.disk}-{limits.inodes}.img")
    in_the_way.mkdir()
    async with rig.room(limits) as room:
        assert await room.output("echo", "alive") == "alive\n"
    assert [each.path for each in rig.engine.damages()] == [str(in_the_way)]
    assert in_the_way.is_file()


async def test_templates_that_a_person_removed_are_made_again(rig: Rig) -> None:
    """By the daemon that had made them, for the next sandbox."""
    if not rig.native:
        pytest.skip("the same file for both")
    limits = replace(LIMITS, disk=LIMITS.disk + 8192)
    async with rig.room(limits):
        images = rig.engine.layout.images
    [template] = images.glob(f"host-*-{limits.disk}-{limits.inodes}.img")
    for left in ([template], list(images.iterdir())):
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        async with rig.room(limits) as room:
            assert await room.output("echo", "alive") == "alive\n"
        assert template.is_file()
