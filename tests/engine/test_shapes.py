"""Sandboxes that can write nothing but /tmp, and whose root has no power: seen from inside, with the strongest
rights that a process there can have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from k8e.engine import Shape
from k8e.link.model import AGENT, ExecOptions
from tests.engine.rig import ROOT, Rig, Room

STRONGEST: ExecOptions = {"identity": AGENT, "keep_capabilities": True}
BOTH: tuple[ExecOptions, ...] = ({}, STRONGEST)
PLAIN_COMMANDS: tuple[ExecOptions, ...] = ({}, {"identity": ROOT})
# Every directory in which something can be made, by any user. Not in /proc: nothing can be made there at all.
WRITABLE = """
import os
for parent, folders, _ in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(parent, name) not in ("/proc", "/sys", "/usr")]
    try:
        os.close(os.open(parent + "/.try", os.O_CREAT | os.O_WRONLY))
        os.unlink(parent + "/.try")
        print(parent)
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
async def strict(rig: Rig) -> AsyncIterator[Room]:
    name = rig.new_name()
    await rig.engine.create(name, replace(rig.spec(), shape=Shape(read_only=True, powerless=True)))
    yield await rig.enter(name)
    await rig.engine.destroy(name)


async def test_nothing_but_tmp_and_memory_can_be_written(strict: Room) -> None:
    found = (await strict.output("python3", "-S", "-c", WRITABLE)).split()
    assert set(found) == {"/tmp", "/dev/shm"}
    found = (await strict.output("python3", "-S", "-c", WRITABLE, **STRONGEST)).split()
    assert {path for path in found if not path.startswith(("/dev", "/run"))} == {"/tmp"}
    assert {"/run", "/dev/shm"} <= set(found)


async def test_existing_files_cannot_be_changed(strict: Room) -> None:
    script = (
        "for f in /etc/passwd /home/user/.venv/pyvenv.cfg; do echo x >> $f; mv $f $f.x; rm -f $f; chmod 777 $f; done"
    )
    for options in BOTH:
        before = await strict.output("sh", "-c", "cat /etc/passwd /home/user/.venv/pyvenv.cfg; stat -c %a /etc/passwd")
        await strict.run("sh", "-c", script, **options)
        after = await strict.output("sh", "-c", "cat /etc/passwd /home/user/.venv/pyvenv.cfg; stat -c %a /etc/passwd")
        assert before == after


@pytest.mark.parametrize("where", ["/", "/workspace", "/usr"])
async def test_it_cannot_be_made_writable(strict: Room, where: str) -> None:
    for words in (("mount", "-o", "remount,rw", where), ("mount", "-o", "remount,bind,rw", where), ("umount", where)):
        assert (await strict.as_agent(*words)).outcome.exit_code != 0
    table = await strict.output("cat", "/proc/self/mountinfo")
    (options,) = [line.split()[5] for line in table.splitlines() if line.split()[4] == where]
    assert "ro" in options.split(",")


async def test_programs_work(strict: Room) -> None:
    assert await strict.output("bash", "-c", "cat <<< here; cd /tmp && echo x > y && cat y") == "here\nx\n"
    assert await strict.output("python3", "-c", "import tempfile; print(len(tempfile.TemporaryFile().read()))") == "0\n"


async def test_no_process_has_capabilities(strict: Room) -> None:
    for options in PLAIN_COMMANDS:
        status = await strict.output("cat", "/proc/self/status", **options)
        held = {line.split()[0]: int(line.split()[1], 16) for line in status.splitlines() if line.startswith("Cap")}
        assert len(held) == 5
        assert set(held.values()) == {0}, held


async def test_the_agent_has_what_it_serves_others_with_and_no_more(strict: Room) -> None:
    status = (await strict.link.read_file(b"/proc/1/status")).decode()
    held = {line.split()[0]: int(line.split()[1], 16) for line in status.splitlines() if line.startswith("Cap")}
    assert held["CapEff:"] == held["CapBnd:"] == sum(1 << number for number in (5, 6, 7, 8))  # KILL, SETGID/UID/PCAP
    # No process becomes more than that: other people's files stay theirs.
    await strict.output("sh", "-c", "umask 077; echo mine > /tmp/mine")
    assert (await strict.as_agent("cat", "/tmp/mine")).outcome.exit_code != 0
    assert (await strict.as_agent("chown", "0", "/tmp/mine")).outcome.exit_code != 0


async def test_commands_of_anybody_are_started_and_ended(strict: Room) -> None:
    assert await strict.output("id", "-u") == "1000\n"
    assert await strict.output("id", "-u", identity=ROOT) == "0\n"
    done = await strict.run("sh", "-c", "trap '' TERM; setsid sleep 600 & sleep 600", timeout=0.3, grace=0.1)
    assert done.outcome.exit_code != 0
    assert "sleep" not in await strict.output("sh", "-c", "cat /proc/[0-9]*/comm 2>/dev/null; true")
    await strict.link.write_file(b"/tmp/file", b"content", identity=strict.place.user)
    assert await strict.output("stat", "-c", "%u %s", "/tmp/file") == "1000 7\n"


async def test_a_read_only_guest_of_a_workspace_only_reads(rig: Rig) -> None:
    async with rig.room() as owner:
        await owner.output("sh", "-c", "echo readable > file")
        name = rig.new_name()
        await rig.engine.create(name, replace(rig.spec(), shares=owner.name, shape=Shape(read_only=True)))
        guest = await rig.enter(name)
        assert await guest.output("cat", "file") == "readable\n"
        for options in BOTH:
            assert (
                await guest.run("sh", "-c", "echo x > file || rm file || touch y", **options)
            ).outcome.exit_code != 0
        await rig.engine.destroy(name)
        assert await owner.output("cat", "file") == "readable\n"
