"""A workspace that two sandboxes share: what one does there the other sees at once, as its own user's files. Neither
gets at anything else of the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from k8e.engine import EngineError
from k8e.link.errors import AgentError
from tests.engine.rig import LIMITS, Rig, Room
from tests.engine.traces import find_traces

# Reads what another process appends until a last line comes, through one descriptor, without looking at its size.
FOLLOW = """
import os, sys, time
file = os.open("/workspace/grows", os.O_RDONLY)
print("open", flush=True)
content, deadline = b"", time.monotonic() + 30
while not content.endswith(b"end\\n") and time.monotonic() < deadline:
    content += os.read(file, 65536)
sys.stdout.buffer.write(content)
"""
APPEND = """
import os
file = os.open("/workspace/grows", os.O_WRONLY | os.O_APPEND)
for number in range(200):
    os.write(file, b"line %d\\n" % number)
os.write(file, b"end\\n")
"""
TRY_LOCK = """
import fcntl, sys
file = open("/workspace/lock", "a")
try:
    getattr(fcntl, sys.argv[1])(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("taken", flush=True)
else:
    print("got", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Pair:
    owner: Room
    guest: Room

    def both_ways(self) -> tuple[tuple[Room, Room], tuple[Room, Room]]:
        return (self.owner, self.guest), (self.guest, self.owner)


async def join(rig: Rig, owner: Room) -> Room:
    name = rig.new_name()
    await rig.engine.create(name, replace(rig.spec(), shares=owner.name))
    return await rig.enter(name)


@pytest.fixture(scope="module")
async def pair(rig: Rig) -> AsyncIterator[Pair]:
    async with rig.room() as owner:
        guest = await join(rig, owner)
        yield Pair(owner, guest)
        await rig.engine.destroy(guest.name)


async def test_each_change_is_seen_at_once(pair: Pair) -> None:
    for writer, reader in pair.both_ways():
        await writer.output("sh", "-c", "mkdir d && echo one > d/file")
        assert await reader.output("cat", "d/file") == "one\n"
        await writer.output("sh", "-c", "echo two > d/file")  # over what the other has read
        assert await reader.output("cat", "d/file") == "two\n"
        await writer.output("sh", "-c", "echo three >> d/file")
        assert await reader.output("cat", "d/file") == "two\nthree\n"
        await writer.output("sh", "-c", "echo new > other && mv other d/file")  # another file of the same name
        assert await reader.output("cat", "d/file") == "new\n"
        await writer.output("mv", "d", "e")
        assert await reader.output("sh", "-c", "cat e/file; ls") == "new\ne\n"
        await writer.output("rm", "-r", "e")
        assert await reader.output("ls", "-A") == ""
        await writer.output("ln", "-s", "/workspace/target", "link")
        assert await reader.output("readlink", "link") == "/workspace/target\n"
        await reader.output("rm", "link")
        assert await writer.output("ls", "-A") == ""


async def test_a_growing_file_can_be_followed(pair: Pair) -> None:
    for writer, reader in pair.both_ways():
        await writer.output("touch", "grows")
        follower = await reader.link.start(reader.spec("python3", "-S", "-c", FOLLOW))
        assert await follower.stdout.read() == b"open\n"
        assert (await writer.python(APPEND)).outcome.exit_code == 0
        content = b""
        while data := await follower.stdout.read():
            content += data
        assert content == b"".join(b"line %d\n" % number for number in range(200)) + b"end\n"
        await writer.output("rm", "grows")


async def test_files_are_the_users_in_both(pair: Pair) -> None:
    for writer, reader in pair.both_ways():
        await writer.output("sh", "-c", "umask 077; echo mine > private")
        assert await reader.output("stat", "-c", "%u:%g %a", "private") == "1000:1000 600\n"
        assert await reader.output("cat", "private") == "mine\n"
        await reader.output("sh", "-c", "chmod 640 private; echo more >> private; rm private")
    # What the agent, root in there, makes belongs to root in the other one as well, and is not the user's.
    await pair.guest.link.write_file(b"/workspace/roots", b"root's\n", mode=0o600)
    assert await pair.owner.output("stat", "-c", "%u:%g", "roots") == "0:0\n"
    assert (await pair.owner.run("cat", "roots")).outcome.exit_code != 0
    await pair.owner.output("rm", "-f", "roots")


async def test_nothing_else_is_shared(pair: Pair) -> None:
    for writer, reader in pair.both_ways():
        await writer.output("sh", "-c", "echo secret | tee /tmp/own /home/user/own")
        for path in (b"/tmp/own", b"/home/user/own", b"/workspace/../tmp/own"):
            with pytest.raises(AgentError):
                await reader.link.read_file(path)
        # A link leads to the reader's own files.
        await writer.output("ln", "-sfn", "/etc/hostname", "link")
        await reader.output("sh", "-c", "cat link && rm link")
        await writer.output("sh", "-c", "ln -sfn /tmp/own link")
        assert (await reader.run("cat", "link")).outcome.exit_code != 0
        await writer.output("rm", "link", "/tmp/own", "/home/user/own")


async def test_it_cannot_be_moved_away_or_unmounted(rig: Rig, pair: Pair) -> None:
    for room, _ in pair.both_ways():
        for words in (("mv", "/workspace", "/other"), ("rmdir", "/workspace"), ("umount", "/workspace")):
            assert (await room.as_agent(*words)).outcome.exit_code != 0, words
        remount = ("mount", "-o", "remount,suid,dev", "/workspace")
        assert (await room.as_agent(*remount)).outcome.exit_code != 0
        if rig.native:  # not every gVisor tells
            assert "nosuid" in await room.output("grep", " /workspace ", "/proc/self/mountinfo")


@pytest.mark.parametrize("kind", ["flock", "lockf"])
async def test_locks_are_the_kernels_own(rig: Rig, pair: Pair, kind: str) -> None:
    """docs/local-engine.md: gVisor's kernels do not tell each other."""
    holder = await pair.owner.link.start(pair.owner.spec("python3", "-S", "-c", TRY_LOCK, kind, stdin=True))
    assert await holder.stdout.read() == b"got\n"
    other = await pair.guest.python(TRY_LOCK, kind)
    assert other.stdout == (b"taken\n" if rig.native else b"got\n")
    await holder.close_stdin()
    await holder.wait()


async def test_the_owners_disk_is_the_limit(pair: Pair) -> None:
    fill = await pair.guest.run("sh", "-c", f"head -c {LIMITS.disk} /dev/zero > fill")
    assert b"No space left on device" in fill.stderr
    more = await pair.owner.run("sh", "-c", "head -c 1M /dev/zero > /home/user/more")
    assert b"No space left on device" in more.stderr
    await pair.guest.output("sh", "-c", "echo fine > /home/user/own; rm fill")
    await pair.owner.output("sh", "-c", "rm /home/user/more")


async def test_eight_at_once(rig: Rig) -> None:
    async with rig.room() as owner:
        guests = await asyncio.gather(*(join(rig, owner) for _ in range(8)))
        script = 'for n in 1 2 3 4 5; do echo "$0 $n" > "$0-$n"; done'
        await asyncio.gather(*(guest.output("sh", "-c", script, guest.name) for guest in guests))
        expected = sorted(f"{guest.name} {number}" for guest in guests for number in range(1, 6))
        for room in (owner, guests[0]):
            assert sorted((await room.output("sh", "-c", "cat *")).splitlines()) == expected
        await asyncio.gather(*(rig.engine.destroy(guest.name) for guest in guests))
        assert len((await owner.output("ls")).split()) == 40, "the files are the owner's"


async def test_the_owner_may_go_first(rig: Rig) -> None:
    """Core ends guests first, but may be killed in between."""
    async with rig.room() as owner:
        guest = await join(rig, owner)
        await owner.output("sh", "-c", "echo kept > file")
    assert not [trace for trace in find_traces(rig.engine.layout) if owner.name in trace.what and trace.kind == "mount"]
    assert await guest.output("sh", "-c", "cat file; echo more > more; cat more") == "kept\nmore\n"
    await rig.engine.destroy(guest.name)
    assert not [trace for trace in find_traces(rig.engine.layout) if trace.kind == "mount" and guest.name in trace.what]


@pytest.mark.parametrize("other", ["nobody", "gone"])
async def test_without_an_owner_there_is_nothing(rig: Rig, other: str) -> None:
    if other == "gone":
        async with rig.room() as owner:
            other = owner.name
    name = rig.new_name()
    with pytest.raises(EngineError) as raised:
        await rig.engine.create(name, replace(rig.spec(), shares=other))
    assert raised.value.control == "shared workspace"
    assert name not in await rig.engine.list()
