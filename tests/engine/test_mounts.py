"""Directories of the machine in a sandbox: they keep their owner; kept parts cannot be changed and hidden names cannot
be seen, whatever a process inside tries."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import EngineError, Mount, MountRefused, Shape
from k8e.engine.local.mounts.mounts import UNUSED_ID
from k8e.engine.local.system.tool import run_tool
from k8e.link.model import AGENT, ExecOptions
from tests.engine.grounds import KEPT, OWNER, SECRET, Grounds, as_owner, open_grounds
from tests.engine.rig import Rig, Room
from tests.engine.tiny_images import add_image

STRONGEST: ExecOptions = {"identity": AGENT, "keep_capabilities": True}
BOTH: tuple[ExecOptions, ...] = ({}, STRONGEST)


@pytest.fixture(scope="module")
def grounds(rig: Rig) -> Iterator[Grounds]:
    """For each runtime its own."""
    with open_grounds() as grounds:
        yield grounds


@pytest.fixture(scope="module")
async def guests(rig: Rig, grounds: Grounds) -> AsyncIterator[dict[str, Room]]:
    """One that was created with its mounts, and one that was made ahead and given them later: no difference is seen."""
    shape = Shape(mounts=grounds.mounts())
    rooms = {"created": await rig.shaped(shape), "bound": await rig.shaped(shape, late=True)}
    yield rooms
    for room in rooms.values():
        await rig.engine.destroy(room.name)


@pytest.fixture(params=["created", "bound"])
def guest(request: pytest.FixtureRequest, guests: dict[str, Room]) -> Room:
    return guests[request.param]


# Owners


async def test_the_owners_files_are_the_users_in_both_directions(guest: Room, grounds: Grounds) -> None:
    assert await guest.output("cat", "private") == "the owner's\n"
    await guest.output("sh", "-c", "mkdir made; echo inside > made/file; chmod 640 made/file; mv made/file made/moved")
    status = (grounds.project / "made/moved").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (OWNER, OWNER, 0o640)
    assert as_owner("cat", "made/moved", cwd=grounds.project) == "inside\n"
    as_owner("sh", "-c", "echo outside > made/other; rm made/moved", cwd=grounds.project)
    assert await guest.output("sh", "-c", "ls made; cat made/other; stat -c %u:%g made/other") == (
        "other\noutside\n1000:1000\n"
    )
    await guest.output("rm", "-r", "made")
    assert not (grounds.project / "made").exists()


async def test_other_peoples_files_are_nobodys(guest: Room, grounds: Grounds) -> None:
    def look() -> list[object]:
        files = [grounds.project / name for name in ("roots-public", "roots-private")]
        return [(file.read_text(), file.stat().st_mode, file.stat().st_uid, file.stat().st_nlink) for file in files]

    before = look()
    assert await guest.output("stat", "-c", "%u:%g", "roots-public") == "65534:65534\n"
    assert await guest.output("cat", "roots-public") == "root's\n"
    attempts = ("echo x >> {0}", "rm -f {0}", "mv {0} x", "chmod 777 {0}", "chown 1000 {0}", "ln {0} hard", "> {0}")
    script = "\n".join(each.format(name) for each in attempts for name in ("roots-public", "roots-private"))
    for options in BOTH:
        assert (await guest.run("cat", "roots-private", **options)).outcome.exit_code != 0
        done = await guest.run("sh", "-c", script, **options)
        assert look() == before, done  # gVisor tells its root that chmod worked when it did not


async def test_nobody_inside_makes_files_of_root(rig: Rig, guest: Room, grounds: Grounds) -> None:
    for script in ("echo x > made-by-root", "cp /usr/bin/id made-by-root; chmod 4755 made-by-root"):
        await guest.run("sh", "-c", script, **STRONGEST)
        made = grounds.project / "made-by-root"
        if rig.native:
            assert not made.exists()
        else:
            assert made.stat().st_uid == made.stat().st_gid == UNUSED_ID
            made.unlink()
    await guest.output("touch", "mine")
    for target in ("0", "0:0", ":0", "65534", "1001", "60000"):
        assert (await guest.run("chown", target, "mine")).outcome.exit_code != 0
        await guest.run("chown", target, "mine", **STRONGEST)
        assert (grounds.project / "mine").stat().st_uid in (OWNER, UNUSED_ID)
        assert (grounds.project / "mine").stat().st_gid in (OWNER, UNUSED_ID)
    (grounds.project / "mine").unlink()


async def test_set_user_id_and_devices_mean_nothing(guest: Room) -> None:
    assert await guest.output("./id-of-root", "-u") == "1000\n"
    assert await guest.output("./id-of-owner", "-u") == "1000\n"
    for options in BOTH:
        assert (await guest.run("head", "-c1", "device", **options)).outcome.exit_code != 0
        assert (await guest.run("mknod", "own-device", "c", "1", "5", **options)).outcome.exit_code != 0


@pytest.mark.parametrize("bits", [0o4755, 0o2755, 0o6711])
async def test_no_file_of_the_owner_gets_a_set_id_bit(guest: Room, grounds: Grounds, bits: int) -> None:
    """Out there another user who runs it would be its owner, or in its group."""
    code = f"""
import ctypes, os, stat
libc = ctypes.CDLL(None)
open("made", "w").close()
for call in (
    lambda: os.chmod("made", {bits}),
    lambda: os.fchmod(os.open("made", os.O_RDWR), {bits}),
    lambda: os.chmod("made", {bits}, dir_fd=os.open(".", os.O_RDONLY)),
    lambda: os.close(os.open("opened", os.O_CREAT | os.O_WRONLY, {bits})),
    lambda: os.mknod("node", stat.S_IFREG | {bits}),
    lambda: libc.syscall(452, -100, b"made", {bits}, 0),  # fchmodat2
):
    try:
        call()
    except OSError:
        pass
os.chmod("made", 0o1755)
"""
    for options in BOTH:
        await guest.python(code, **options)
        for name in ("made", "opened", "node"):
            path = grounds.project / name
            assert not path.exists() or not path.stat().st_mode & 0o6000
            path.unlink(missing_ok=True)
    done = await guest.run("python3", "-S", "-c", code)
    assert done.outcome.exit_code == 0, done
    await guest.output("sh", "-c", "cp -p /etc/hostname copy; tar c copy | tar x; rm made copy")


async def test_links_lead_to_the_sandboxs_own_files(guest: Room) -> None:
    assert await guest.output("cat", "to-hostname") == await guest.output("cat", "/etc/hostname")
    for options in BOTH:
        for name in ("to-shadow", "to-roots"):
            assert (await guest.run("cat", name, **options)).outcome.exit_code != 0
    await guest.output("sh", "-c", "ln -s /../../../../../../etc/shadow up; ln -s /proc/1/root/root proc")
    for options in BOTH:
        done = await guest.run("sh", "-c", "cat up; ls proc; cat /proc/self/root/../../etc/shadow", **options)
        assert b"root:" not in done.stdout
        assert b".ssh" not in done.stdout
    await guest.output("rm", "up", "proc")


# Kept

ATTACKS = (
    "echo evil > {0}",
    "echo evil >> {0}",
    "rm -rf {0}",
    "mv {0} elsewhere",
    "mv {1} elsewhere",
    "echo evil > new; mv -f new {0}",
    "mkdir -p new; mv -fT new {0}",
    "mkdir -p new; mv -fT new {1}",
    "ln -sf /tmp {0}/x",
    "ln -f /etc/hostname {0}",
    "ln {0} hard && echo evil > hard",
    "ln {0} {1}/hard && echo evil > {1}/hard",
    "chmod 777 {0}",
    "truncate -s0 {0}",
    "touch -d 2000-01-01 {0}",
    "echo evil > {0}/pre-commit",
    "cd {0} && echo evil > pre-commit",
    "exec 3<>{0} && echo evil >&3",
    "umount {0}",
    "umount -l {1}",
    "mount -o remount,rw {0}",
    "mount -o remount,bind,rw {0}",
    "mount --bind /tmp {0}",
    "mount -t tmpfs none {1}",
    "setfattr -n user.x -v y {0}",
)
EXCHANGE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for name in sys.argv[1:]:
    os.makedirs("swap", exist_ok=True)
    for flag in (0, 1, 2):  # plain, not over anything, exchange
        assert libc.renameat2(-100, b"swap", -100, name.encode(), flag) != 0, (name, flag)
        assert libc.renameat2(-100, name.encode(), -100, b"swap", flag) != 0, (name, flag)
os.rmdir("swap")
"""


def snapshot(project: Path) -> dict[str, tuple[int, int, bytes]]:
    found = {}
    for part in KEPT[:3]:
        top = project / part
        for path in (top, *sorted(top.rglob("*"))):
            status = path.lstat()
            found[str(path)] = (status.st_mode, status.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
    return found


async def test_what_is_kept_cannot_be_changed_moved_or_replaced(guest: Room, grounds: Grounds) -> None:
    before = snapshot(grounds.project)
    for part in KEPT[:3]:
        parent = os.path.dirname(part) or "."
        script = "\n".join(f"({attack.format(part, parent)})" for attack in ATTACKS)
        for options in BOTH:
            done = await guest.run("sh", "-xc", script, **options)
            assert snapshot(grounds.project) == before, done.stderr.decode()
            await guest.run("rm", "-rf", "new", "elsewhere", "hard", ".git/hard", **options)
    assert await guest.output("python3", "-S", "-c", EXCHANGE, *KEPT[:3], ".git") == ""
    assert snapshot(grounds.project) == before


async def test_git_works_around_what_is_kept(guest: Room, grounds: Grounds) -> None:
    identity = ("-c", "user.name=u", "-c", "user.email=u@u")
    await guest.output("sh", "-c", f"echo {guest.name} > file; git add file")
    await guest.output("git", *identity, "commit", "-qm", "from inside")
    assert "from inside" in as_owner("git", "log", "--oneline", cwd=grounds.project)
    assert (await guest.run("git", "config", "core.fsmonitor", "evil")).outcome.exit_code != 0
    await guest.output("git", "checkout", "-qb", f"branch-{guest.name}")
    assert "fsmonitor" not in (grounds.project / ".git/config").read_text()


async def test_the_machines_users_do_not_take_it_away_by_accident(guest: Room, grounds: Grounds) -> None:
    """To replace the file would be to take the mount away, inside too."""
    with pytest.raises(OSError, match="busy"):
        (grounds.project / ".git/config").rename(grounds.project / "config")
    (grounds.project / "Makefile").write_text("all: changed\n")  # to write into it is fine, and seen
    assert await guest.output("cat", "Makefile") == "all: changed\n"
    assert (await guest.run("sh", "-c", "echo evil > Makefile")).outcome.exit_code != 0


async def test_the_mounts_on_the_machine_are_read_only(guest: Room) -> None:
    """To remove the daemon's directory does not remove a user's project with it."""
    (project, _) = sorted(guest.paths.mounts.iterdir())
    with pytest.raises(OSError, match="Read-only"):
        (project / "private").unlink()
    with pytest.raises(OSError, match="Read-only"):
        (project / ".git/HEAD").unlink()


@pytest.mark.parametrize(("part", "cause"), [("to-shadow", "link"), ("to-shadow/x", "link")])
async def test_what_cannot_be_kept_is_refused(rig: Rig, grounds: Grounds, part: str, cause: str) -> None:
    name = rig.new_name()
    mount = replace(grounds.project_mount(), kept=(part,))
    with pytest.raises(MountRefused) as raised:
        await rig.engine.create(name, replace(rig.spec(), shape=Shape(mounts=(mount,))))
    assert cause in raised.value.cause
    assert name not in await rig.engine.list()


async def test_what_does_not_exist_does_not_come_to_be(rig: Rig) -> None:
    """A repository that code in a sandbox makes is one whose hooks the machine's git would run."""
    with open_grounds() as grounds:
        project = grounds.project
        shutil.rmtree(project / ".git")
        before = sorted(project.iterdir())
        kept = (".git/config", ".git/hooks", ".vscode", "private/x")
        shape = Shape(mounts=(replace(grounds.project_mount(), kept=kept),))
        first, second = await rig.shaped(shape, late=True), await rig.shaped(shape)
        for options in BOTH:
            for attack in (
                "git init",
                "rmdir .git",
                "mv .git x",
                "touch .git/x",
                "echo x > .vscode/x",
                "rm -r .vscode",
            ):
                assert (await first.run("sh", "-c", attack, **options)).outcome.exit_code != 0, attack
        await rig.engine.destroy(first.name)
        assert (await second.run("git", "init")).outcome.exit_code != 0, "it has not lost what it counts on"
        assert sorted(path.name for path in project.iterdir() if path not in before) == [".git", ".vscode"]
        await rig.engine.stop(second.name)
        assert sorted(project.iterdir()) == before
        await rig.engine.start(second.name, replace(rig.spec(), shape=shape))
        second = await rig.enter(second.name)
        assert (await second.run("git", "init")).outcome.exit_code != 0
        # What its owner puts there meanwhile is the owner's.
        as_owner("git", "init", "-q", cwd=project)
        assert (await second.run("sh", "-c", "echo x > .git/config")).outcome.exit_code != 0
        await rig.engine.destroy(second.name)
        assert (project / ".git/config").exists()
        assert not (project / ".vscode").exists()


async def test_a_file_on_the_way_is_kept_itself(rig: Rig, grounds: Grounds) -> None:
    """A worktree's .git is a file that says where the repository is."""
    as_owner("git", "worktree", "add", "-q", "../home/tree", cwd=grounds.project)
    tree = grounds.home / "tree"
    mount = Mount(str(tree), "/workspace", OWNER, writable=True, kept=(".git/config", ".git/hooks"))
    room = await rig.shaped(Shape(mounts=(mount,)), late=True)
    before = (tree / ".git").read_text()
    for options in BOTH:
        for attack in ("echo gitdir: /tmp > .git", "rm -f .git", "mv .git x", "mkdir x; mv -fT x .git"):
            assert (await room.run("sh", "-c", attack, **options)).outcome.exit_code != 0
    assert (tree / ".git").read_text() == before
    await rig.engine.destroy(room.name)
    as_owner("git", "worktree", "remove", "--force", "../home/tree", cwd=grounds.project)


# Hidden


async def test_what_is_hidden_is_not_there(guest: Room) -> None:
    assert await guest.output("cat", "/home/user/.bashrc", "/home/user/.config/harmless") == "# the owner's\nharmless\n"
    names = (".ssh", ".ssh/id_ed25519", ".netrc", ".config/gh", ".config/gh/hosts.yml", ".aws/credentials", "vault")
    for options in BOTH:
        listed = await guest.output("find", "/home/user", **options)
        assert ".config/harmless" in listed or options, "root of the sandbox may not even see that much"
        for name in names:
            assert f"/{name}\n" not in listed
            assert (await guest.run("cat", f"/home/user/{name}", **options)).outcome.exit_code != 0
        assert (await guest.run("cat", "/home/user/another-way", **options)).outcome.exit_code != 0
        found = await guest.run("grep", "-rs", SECRET, "/home/user", "/workspace", **options)
        assert found.stdout == b""


async def test_it_stays_hidden_when_it_is_replaced_or_comes_later(guest: Room, grounds: Grounds) -> None:
    """Programs that keep tokens write a new file and rename it over the old one."""
    script = f"echo {SECRET} > t; mv t .netrc; mkdir -p .later .kube; echo {SECRET} | tee .later/x .kube/config; "
    script += f"mv .ssh old; mkdir .ssh; echo {SECRET} > .ssh/new; rm -r old"
    as_owner("sh", "-c", script, cwd=grounds.home)
    assert (grounds.home / ".kube/config").exists()
    for options in BOTH:
        for name in (".netrc", ".later", ".later/x", ".kube/config", ".ssh/new", ".ssh"):
            assert (await guest.run("cat", f"/home/user/{name}", **options)).outcome.exit_code != 0
        assert (await guest.run("grep", "-rs", SECRET, "/home/user", **options)).stdout == b""


async def test_the_home_cannot_be_written_or_uncovered(guest: Room, grounds: Grounds) -> None:
    before = sorted(path.name for path in grounds.home.iterdir())
    for options in BOTH:
        for attack in (
            *("touch ~/new", "rm -f ~/.bashrc", "mv ~/.config ~/x", "mkdir ~/.ssh", "ln ~/.bashrc ~/hard", "umount ~"),
            *("ln ~/.bashrc /workspace/hard", "mount -o remount,rw /home/user", "mv /home/user /home/other"),
        ):
            assert (await guest.run("sh", "-c", attack.replace("~", "/home/user"), **options)).outcome.exit_code != 0
    assert sorted(path.name for path in grounds.home.iterdir()) == before


# What is shown to whom


async def test_what_is_refused_leaves_nothing(rig: Rig, grounds: Grounds) -> None:
    """Which directories those are is in test_sources.py."""
    for mount in (Mount("/", "/workspace", 0), Mount(str(grounds.roots), "/workspace", OWNER)):
        name = rig.new_name()
        with pytest.raises(MountRefused) as raised:
            await rig.engine.create(name, replace(rig.spec(), shape=Shape(mounts=(grounds.home_mount(), mount))))
        assert raised.value.hint
        assert name not in await rig.engine.list()


async def test_where_owners_cannot_be_mapped_there_is_no_sandbox(rig: Rig, grounds: Grounds) -> None:
    """A filesystem that knows no id-mapped mounts."""
    other = grounds.top / "other"
    other.mkdir()
    await run_tool("mount", "-t", "ramfs", "none", other)
    try:
        os.chown(other, OWNER, OWNER)
        name = rig.new_name()
        with pytest.raises(EngineError) as raised:
            await rig.engine.create(
                name, replace(rig.spec(), shape=Shape(mounts=(Mount(str(other), "/workspace", OWNER),)))
            )
        assert raised.value.control == f"mount {other}"
        assert "cannot be mapped" in raised.value.cause
        assert "id-mapped" in raised.value.hint
        assert name not in await rig.engine.list()
    finally:
        await run_tool("umount", other)
        other.rmdir()


@pytest.mark.parametrize("late", [False, True], ids=["created", "bound"])
async def test_together_with_everything_that_is_strict(rig: Rig, grounds: Grounds, late: bool) -> None:
    shape = Shape(mounts=(grounds.project_mount(), grounds.home_mount()), read_only=True, powerless=True)
    room = await rig.shaped(shape, late=late)
    await room.output("sh", "-c", "echo strict > strict; cat private > /dev/null; rm strict; echo x > /tmp/x")
    for options in BOTH:
        assert (await room.run("touch", "/etc/x", "/home/user/x", **options)).outcome.exit_code != 0
        assert (await room.run("sh", "-c", "echo x > .git/config", **options)).outcome.exit_code != 0
    await rig.engine.destroy(room.name)


async def test_who_shares_a_workspace_that_is_a_project_has_the_same_mount(rig: Rig, grounds: Grounds) -> None:
    shape = Shape(mounts=(grounds.project_mount(),))
    owner = await rig.shaped(shape, late=True)
    name = rig.new_name()
    await rig.engine.create(name, replace(rig.spec(), shape=shape, shares=owner.name))
    other = await rig.enter(name)
    await owner.output("sh", "-c", "echo shared > shared")
    assert await other.output("sh", "-c", "cat shared; rm shared") == "shared\n"
    assert (await other.run("sh", "-c", "echo x > .git/config")).outcome.exit_code != 0
    await asyncio.gather(rig.engine.destroy(owner.name), rig.engine.destroy(name))
    assert (grounds.project / ".git/config").exists()


async def test_a_directory_that_was_exchanged_from_inside_is_not_shown(rig: Rig, grounds: Grounds) -> None:
    """Neither to a child, nor when it is started again: a link where one of its directories was leads elsewhere."""
    write_around, inner = grounds.project / "around", grounds.project / "around/inner"
    elsewhere = grounds.top / "elsewhere"
    for folder in (write_around, inner, elsewhere):
        folder.mkdir()
        os.chown(folder, OWNER, OWNER)
    (elsewhere / "secret").write_text(SECRET)
    mounts = Mount(str(write_around), "/workspace", OWNER, writable=True), Mount(str(inner), "/home/user/inner", OWNER)
    shape = Shape(mounts=mounts)
    room, child = await rig.shaped(shape, late=True), rig.new_name()
    try:
        await room.output("sh", "-c", f"mv inner gone && ln -s {elsewhere} inner")
        with pytest.raises(MountRefused, match="another directory"):
            await rig.engine.create(child, replace(rig.spec(), shape=shape, shares=room.name))
        assert child not in await rig.engine.list()
        await rig.engine.stop(room.name)
        with pytest.raises(MountRefused, match="another directory"):
            await rig.engine.start(room.name, replace(rig.spec(), shape=shape))
        inner.unlink()
        (write_around / "gone").rename(inner)
        await rig.engine.start(room.name, replace(rig.spec(), shape=shape))
        await rig.engine.create(child, replace(rig.spec(), shape=shape, shares=room.name))
        assert (await (await rig.enter(child)).output("ls", "/home/user/inner")) == ""
    finally:
        await asyncio.gather(rig.engine.destroy(room.name), rig.engine.destroy(child))
        shutil.rmtree(write_around)
        shutil.rmtree(elsewhere)


@pytest.mark.parametrize("user", ["", "worker"])
async def test_in_an_image_they_are_its_users(rig: Rig, grounds: Grounds, user: str) -> None:
    """Root of an image has powers there; not over what belongs to others on the machine."""
    image = await add_image(rig.engine, User=user)
    room = await rig.shaped(Shape(mounts=(grounds.project_mount(),)), late=True, image=image.digest)
    assert await room.output("stat", "-c", "%u:%g", "private") == ("1234:1235\n" if user else "0:0\n")
    await room.output("sh", "-c", "cat private; mkdir made; echo x > made/file; mv made/file made/moved")
    status = (grounds.project / "made/moved").stat()
    assert (status.st_uid, status.st_gid) == (OWNER, OWNER)
    capable = room.place.capable
    assert capable == (not user)
    attacks = "chown 1 made; chown 0:1 made; chmod 777 roots-private; cat roots-private; rm -f roots-public; echo x > "
    done = await room.run("sh", "-c", f"{attacks} .git/config", keep_capabilities=capable)
    assert b"root's" not in done.stdout
    assert (grounds.project / "made").stat().st_uid == OWNER
    assert (grounds.project / "roots-private").stat().st_mode & 0o777 == 0o600
    assert (grounds.project / "roots-public").exists()
    assert "[core]" in (grounds.project / ".git/config").read_text()
    for mode in ("4755", "2755", "u+s"):
        assert (await room.run("chmod", mode, "made/moved", keep_capabilities=capable)).outcome.exit_code != 0
    assert (grounds.project / "made/moved").stat().st_mode & 0o7000 == 0
    shutil.rmtree(grounds.project / "made")
    await rig.engine.destroy(room.name)


@pytest.mark.parametrize("late", [False, True], ids=["created", "bound"])
async def test_afterwards_all_is_as_it_was(rig: Rig, late: bool) -> None:
    with open_grounds() as grounds:
        before = sorted(grounds.top.rglob("*"))
        room = await rig.shaped(Shape(mounts=grounds.mounts()), late=late)
        await rig.engine.destroy(room.name)
        assert sorted(grounds.top.rglob("*")) == before
        os.rename(grounds.project / ".git/hooks", grounds.project / ".git/other")
