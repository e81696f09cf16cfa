"""Private parts: a sandbox changes a copy of its own of a directory of the machine, such as a project's .git. The
machine's directory stays as it is, whatever a process inside tries."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import WHOLE, Mount, MountRefused, Shape
from k8e.link.model import AGENT, ExecOptions
from tests.engine.grounds import OWNER, Grounds, as_owner, open_grounds
from tests.engine.rig import Rig, Room

STRONGEST: ExecOptions = {"identity": AGENT, "keep_capabilities": True}
BOTH: tuple[ExecOptions, ...] = ({}, STRONGEST)
WORK = """
set -e
git config user.name inside
git config user.email inside@example.com
echo more >> work.txt
git add work.txt
git commit -qm inside
git checkout -qb branch
echo stashed >> work.txt
git stash -q
git worktree add -q /tmp/other -b other
git -C /tmp/other commit -q --allow-empty -m other
git clone -q --bare . /tmp/away.git
git remote add away /tmp/away.git
git fetch -q away
git gc -q
git log --format=%s -1 branch
"""
# Each would change the repository of the machine, if it could.
ATTACKS = (
    "mv .git gone",
    "rmdir .git; rm -rf .git/hooks .git/config",
    "mkdir new; mv -T new .git",
    "ln -sfn /tmp .git",
    "ln .git/HEAD hard && echo x >> hard",
    "mv .git/HEAD taken && echo x >> taken",
    "mount --bind /tmp .git; umount -l .git",
    "chmod 777 .git; chown 0 .git .git/HEAD",
    "rm -rf .git/*; git init -q; git config core.fsmonitor 'touch OWNED'",
    "setfattr -n trusted.overlay.redirect -v /etc .git/x; setfattr -n user.overlay.redirect -v /etc .git/x",
)


def list_files(top: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a directory that a change would change."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([top, *top.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(top))] = (
            status.st_mode,
            status.st_uid,
            status.st_nlink,
            status.st_ctime_ns,
            content,
        )
    return found


@pytest.fixture(scope="module")
def grounds(rig: Rig) -> Iterator[Grounds]:
    with open_grounds() as grounds:
        yield grounds


def project_mount(grounds: Grounds) -> Mount:
    return replace(grounds.project_mount(), kept=(".git", ".envrc"), private=(".git",))


@pytest.fixture(scope="module")
async def guests(rig: Rig, grounds: Grounds) -> AsyncIterator[dict[str, Room]]:
    """Two sandboxes at once: one was created with its mounts, one was given them later."""
    shape = Shape(mounts=(project_mount(grounds),))
    rooms = {"created": await rig.shaped(shape), "bound": await rig.shaped(shape, late=True)}
    yield rooms
    for room in rooms.values():
        await rig.engine.destroy(room.name)


@pytest.mark.parametrize("way", ["created", "bound"])
async def test_git_works_inside_and_the_machines_repository_stays(
    guests: dict[str, Room], grounds: Grounds, way: str
) -> None:
    before = list_files(grounds.project / ".git")
    (upper,) = guests[way].paths.private.glob("*/*/upper")
    assert not any(upper.iterdir()), "nothing is copied ahead, however large it is"
    assert await guests[way].output("sh", "-c", WORK) == "inside\n"
    assert list_files(grounds.project / ".git") == before
    assert "branch" not in as_owner("git", "branch", "--all", cwd=grounds.project)
    assert await guests[way].output("git", "branch", "--format=%(refname:short)") == "branch\nmaster\nother\n"


@pytest.mark.parametrize("way", ["created", "bound"])
async def test_what_is_tried_inside_reaches_the_copy_at_most(
    guests: dict[str, Room], grounds: Grounds, way: str
) -> None:
    before = list_files(grounds.project / ".git")
    for options in BOTH:
        for attack in ATTACKS:
            done = await guests[way].run("sh", "-c", attack, **options)
            assert list_files(grounds.project / ".git") == before, (attack, done)
        names = {path.name for path in grounds.project.iterdir()}
        assert not names & {"gone", "OWNED"}
        await guests[way].run("rm", "-rf", "new", "hard", "taken", **options)
    as_owner("git", "status", cwd=grounds.project)
    assert not (grounds.project / "OWNED").exists()


async def test_a_copy_lasts_as_long_as_its_sandbox(rig: Rig, grounds: Grounds) -> None:
    shape = Shape(mounts=(project_mount(grounds),), read_only=True)
    room = await rig.shaped(shape)
    await room.output("sh", "-c", "git branch mine && echo x > .git/new && rm .git/description")
    await rig.engine.stop(room.name)
    as_owner("git", "branch", "-f", "later", cwd=grounds.project)
    await rig.engine.start(room.name, replace(rig.spec(), shape=shape))
    again = await rig.enter(room.name)
    assert await again.output("sh", "-c", "ls .git/new; ls .git/description || git branch --list mine later") == (
        ".git/new\n  later\n  mine\n"
    )
    await rig.engine.destroy(room.name)
    assert not (grounds.project / ".git/new").exists()
    assert (grounds.project / ".git/description").exists()


async def test_it_counts_on_the_sandboxs_disk(rig: Rig, grounds: Grounds) -> None:
    room = await rig.shaped(Shape(mounts=(project_mount(grounds),)))
    done = await room.run("dd", "if=/dev/zero", "of=.git/large", "bs=1M", "count=1000")
    assert done.outcome.exit_code != 0
    assert b"No space left" in done.stderr
    assert not (grounds.project / ".git/large").exists()
    await rig.engine.destroy(room.name)


async def test_what_is_missing_is_an_empty_directory_for_the_sandbox(rig: Rig) -> None:
    with open_grounds() as grounds:
        shutil.rmtree(grounds.project / ".git")
        room = await rig.shaped(Shape(mounts=(project_mount(grounds),)))
        assert await room.output("sh", "-c", "ls -A .git; git init -q && git status --short .envrc; ls .git/HEAD") == (
            ".git/HEAD\n"
        )
        assert os.listdir(grounds.project / ".git") == []
        await rig.engine.destroy(room.name)
        assert not (grounds.project / ".git").exists()


async def test_what_is_no_directory_is_kept_and_a_link_refused(rig: Rig) -> None:
    with open_grounds() as grounds:
        shutil.rmtree(grounds.project / ".git")
        (grounds.project / ".git").write_text("gitdir: /elsewhere\n")
        room = await rig.shaped(Shape(mounts=(project_mount(grounds),)))
        for attack in ("echo x > .git", "rm .git", "mv .git x"):
            assert (await room.run("sh", "-c", attack, **STRONGEST)).outcome.exit_code != 0
        await rig.engine.destroy(room.name)
        (grounds.project / ".git").unlink()
        (grounds.project / ".git").symlink_to("/etc")
        with pytest.raises(MountRefused):
            await rig.shaped(Shape(mounts=(project_mount(grounds),)))


async def test_all_of_a_mount_can_be_private_at_its_own_path(rig: Rig, grounds: Grounds) -> None:
    source = str(grounds.project / ".git")
    before = list_files(grounds.project / ".git")
    project = replace(project_mount(grounds), target=str(grounds.project))
    room = await rig.shaped(Shape(mounts=(Mount(source, "/srv/git", OWNER, private=(WHOLE,)), project)))
    script = (
        f"echo x > /srv/git/new; rm -r /srv/git/hooks; cat /srv/git/new; stat -c %u /srv/git; cd {grounds.project}; pwd"
    )
    assert await room.output("sh", "-c", script) == f"x\n1000\n{grounds.project}\n"
    assert list_files(grounds.project / ".git") == before
    await rig.engine.destroy(room.name)
