"""Sandboxes whose root is an image: its layers below, seen by all and written by none, a layer of their own above."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import stat
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.engine import EngineError, SandboxSpec, Shape
from k8e.engine.images import Image
from k8e.engine.local import LocalEngine
from k8e.engine.local.disk.cleanup import unmount_below
from k8e.engine.local.disk.disk import mount_image
from k8e.engine.local.images.layers import Unpacked
from k8e.engine.local.images.manifest import Configuration
from k8e.engine.local.record import Record
from k8e.link.errors import Code, NotStarted, Stage
from k8e.link.model import AGENT, Identity
from tests.engine.rig import LIMITS, Rig, Room
from tests.engine.test_disk import host_bytes
from tests.engine.tiny_images import add_image, compile_static, enter_image
from tests.engine.traces import mount_points
from tests.images.builder import entry, link, make_tar

WORKER = Identity(1234, 1235)
SHOW_IDS = """
#include <stdio.h>
#include <unistd.h>
int main(void) { return printf("%d %d %d %d\\n", getuid(), geteuid(), getgid(), getegid()) < 0; }
"""
DISK = 48 << 20
SMALL = replace(LIMITS, disk=DISK, inodes=4096)
UPPER = make_tar(
    entry("etc/motd", b"hello"),
    entry("srv"),
    entry("srv/.wh.gone", b""),
    entry("opt"),
    entry("opt/.wh..wh..opq", b""),
    entry("opt/new", b"new"),
)
LOWER = make_tar(
    entry("srv/gone", b"gone"),
    entry("srv/kept", b"kept"),
    entry("opt/old", b"old"),
    entry("data", mode=0o755),
    entry("data/theirs", b"theirs", uid=1234, gid=1235, mode=0o640),
    entry("data/far", b"far", uid=70_000, gid=70_000, mode=0o644),
    entry("bin/rootid", compile_static(SHOW_IDS), mode=0o6755, gid=50),
    link("bin/again", "busybox"),
)


@pytest.fixture(scope="module")
async def image(rig: Rig) -> Image:
    return await add_image(rig.engine, LOWER, UPPER, Env=["PATH=/bin", "COLOUR=green"], WorkingDir="/srv/app")


@pytest.fixture(scope="module")
async def room(rig: Rig, image: Image) -> AsyncIterator[Room]:
    async with enter_image(rig, image) as room:
        yield room


async def sh(room: Room, script: str, identity: Identity | None = None) -> str:
    """Returns what it prints, errors too."""
    spec = room.spec("sh", "-c", f"exec 2>&1; {script}")
    if identity is not None:
        spec = replace(spec, identity=identity, keep_capabilities=False, cwd=b"/")
    return (await room.link.run(spec)).stdout.decode()


def fingerprint(engine: LocalEngine) -> str:
    """Of all layers: names, kinds, modes, owners, times, attributes, contents."""
    total = hashlib.sha256()
    for parent, folders, names in os.walk(engine.layout.layers):
        folders.sort()
        for name in sorted((*folders, *names)):
            path = os.path.join(parent, name)
            status = os.lstat(path)
            extra = [
                (key, os.getxattr(path, key, follow_symlinks=False))
                for key in os.listxattr(path, follow_symlinks=False)
            ]
            facts = (path, status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_nlink, extra)
            total.update(repr(facts).encode())
            if stat.S_ISREG(status.st_mode):
                total.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return total.hexdigest()


# What it begins with -------------------------------------------------------------------------------------------------


async def test_it_begins_as_the_image_says(room: Room) -> None:
    told = await sh(room, "id -u; pwd; echo $COLOUR $HOME $PATH; cat /etc/hostname /etc/motd; hostname")
    assert told == "0\n/srv/app\ngreen /root /bin\nsandbox\nhellosandbox\n"
    assert await sh(room, "cat /etc/resolv.conf") != ""
    assert "127.0.0.1 localhost sandbox" in await sh(room, "cat /etc/hosts")


async def test_what_layers_remove_and_replace_is_gone(room: Room) -> None:
    assert await sh(room, "ls /srv /opt") == "/opt:\nnew\n\n/srv:\napp\nkept\n"


async def test_owners_are_the_images(rig: Rig, room: Room) -> None:
    told = await sh(room, "stat -c '%u %g %a %n' /bin/busybox /data /data/theirs /home/worker /workspace /srv/app")
    assert told.splitlines() == [
        "0 0 755 /bin/busybox",
        "0 0 755 /data",
        "1234 1235 640 /data/theirs",
        "1234 1235 750 /home/worker",
        "0 0 755 /workspace",
        "0 0 755 /srv/app",
    ]
    # A native sandbox has fewer ids than the image uses: that file has no owner there, and cannot be taken.
    owner = await sh(room, "stat -c %u /data/far")
    assert owner == ("65534\n" if rig.native else "70000\n")
    if rig.native:
        assert "chown" in await sh(room, "chown 0 /data/far")


async def test_root_can_do_there_what_package_managers_need(room: Room) -> None:
    script = """
set -e
echo mine > /etc/mine; chown 1234:1235 /etc/mine; chmod 4755 /etc/mine; stat -c '%u %g %a' /etc/mine
cat /data/theirs; echo; echo more >> /data/theirs; chown 0:0 /data/theirs; chmod 600 /data/theirs
mkdir /var/lib; mv /home /var/lib/home; ls /var/lib/home; mv /var/lib/home /home
ln /data/theirs /data/linked; mkfifo /data/fifo; rm /data/fifo
su worker -c 'id -u; cat /data/theirs' || true
"""
    assert (await sh(room, script)).splitlines() == [
        "1234 1235 4755",
        "theirs",
        "worker",
        "1234",
        "cat: can't open '/data/theirs': Permission denied",
    ]


async def test_root_has_no_more_than_the_agent(room: Room) -> None:
    told = await sh(room, "grep -i ^Cap /proc/self/status || cat /proc/self/status")
    sets = dict(line.split(":\t") for line in told.splitlines() if line.startswith("Cap"))
    assert sets["CapEff"] == sets["CapBnd"] == "00000000000001ff"
    for attempt in ("mount -t tmpfs x /srv", "mknod /data/disk b 7 0", "umount /tmp", "chroot / true", "hostname no"):
        told = (await sh(room, attempt)).lower()
        assert "denied" in told or "not permitted" in told, attempt


async def test_other_users_have_nothing(room: Room) -> None:
    told = await sh(room, "id -u; grep ^CapEff /proc/self/status; echo x > /etc/more; chown 1234 /srv/kept", WORKER)
    assert told.splitlines()[:1] == ["1234"]
    assert told.count("Permission denied") + told.count("not permitted") == 2


async def test_setuid_files_of_the_image_gain_nothing(room: Room) -> None:
    copy = "cp /bin/rootid /tmp/again; chown 0:0 /tmp/again; chmod 6755 /tmp/again; rootid"
    assert await sh(room, copy) == "0 0 0 0\n"
    for program in ("/bin/rootid", "/tmp/again"):
        assert await sh(room, f"stat -c %a {program}") == "6755\n"
        assert await sh(room, program, WORKER) == "1234 1234 1235 1235\n"


async def test_a_powerless_sandboxes_root_cannot_do_any_of_it(rig: Rig, image: Image) -> None:
    name = rig.new_name()
    spec = SandboxSpec(rig.runtime, image.digest, LIMITS, shape=Shape(read_only=True, powerless=True))
    await rig.engine.create(name, spec)
    try:
        strict = await rig.enter(name)
        assert not strict.place.capable
        assert strict.place.user == Identity(0, 0)
        told = await sh(
            strict, "grep CapEff /proc/self/status; echo x > /etc/x; chown 1 /tmp; echo ok > /tmp/ok; cat /tmp/ok"
        )
        assert "CapEff:\t0000000000000000" in told
        assert "Read-only file system" in told
        assert told.endswith("not permitted\nok\n")
    finally:
        await rig.engine.destroy(name)


# Whose it is ---------------------------------------------------------------------------------------------------------


async def test_two_of_one_image_do_not_meet_and_its_layers_do_not_change(rig: Rig, image: Image) -> None:
    before = fingerprint(rig.engine)
    async with enter_image(rig, image) as one, enter_image(rig, image) as other:
        everything = "find / -xdev | sort | sha256sum; sha256sum /bin/busybox /etc/passwd"
        untouched = await sh(other, everything)
        wreck = """
cd /; echo changed > /etc/passwd; rm -r /srv/kept /home; chmod 000 /etc/motd; touch -d @1 /bin; mv /opt /opt2
mkdir /home; echo mine > /srv/kept; ln /bin/again /bin/once; cp /bin/cat /bin/busybox.new; mv /bin/busybox.new /bin/ls
"""
        await sh(one, wreck)
        assert await sh(one, "cat /etc/passwd /srv/kept; echo /opt2/* /home/*") == "changed\nmine\n/opt2/new /home/*\n"
        assert await sh(other, everything) == untouched
    assert fingerprint(rig.engine) == before


@pytest.mark.parametrize("folder", ["/", "/workspace", "/tmp", "/root"])
async def test_its_disk_is_limited(rig: Rig, image: Image, folder: str) -> None:
    if folder not in ("/", "/tmp") and not rig.native:
        pytest.skip("shown once for each runtime; the disk is the same")
    async with enter_image(rig, image, SMALL) as room:
        told = await sh(room, f"dd if=/dev/zero of={folder}/fill bs=64k; stat -c %s {folder}/fill")
        assert "No space left" in told
        assert 0 < int(told.splitlines()[-1]) <= DISK
        assert host_bytes(room.paths.top) <= DISK + (4 << 20)
        assert "No space left" in await sh(room, "cp /bin/busybox /etc/copy; echo more >> /data/theirs")
        await sh(room, f"rm {folder}/fill")
        assert await sh(room, "cp /bin/busybox /etc/copy && echo well") == "well\n"


async def test_its_inodes_are_limited(rig: Rig, image: Image) -> None:
    async with enter_image(rig, image, SMALL) as room:
        # Many at a time: a shell that makes one after the other takes a quarter of a minute in gVisor.
        make = "for n in $(seq 50); do mkdir $(seq ${n}000 ${n}099) 2>/dev/null; done"
        script = f"mkdir /many; cd /many; {make}; ls | wc -l"
        assert 3000 < int(await sh(room, script)) < 4096 * 1.1
        assert "No space left" in await sh(room, "mkdir /one-more")


async def test_what_the_image_has_at_workspace_is_there(rig: Rig) -> None:
    layer = make_tar(
        entry("workspace", mode=0o755),
        entry("workspace/app", mode=0o750, uid=1234, gid=1235),
        entry("workspace/app/run", b"#!/bin/sh\necho ran\n", mode=0o755),
        entry("workspace/app/once", b"once", uid=1234),
        link("workspace/app/twice", "workspace/app/once", tarfile.LNKTYPE),
        link("workspace/passwd", "/etc/passwd"),
        link("workspace/out", "../../../../etc/hostname"),
        entry("workspace/fifo", None, type=tarfile.FIFOTYPE, mode=0o622),
        entry("workspace/empty", b""),
    )
    image = await add_image(rig.engine, layer, Env=["PATH=/bin"], WorkingDir="/workspace/app")
    async with enter_image(rig, image) as room:
        script = "./run; cat twice ../out; readlink ../passwd; stat -c '%u:%g %a %h %n' . run once ../fifo ../empty"
        assert (await sh(room, script)).splitlines() == [
            *("ran", "oncesandbox", "/etc/passwd"),
            *("1234:1235 750 2 .", "0:0 755 1 run", "1234:0 644 2 once", "0:0 622 1 ../fifo", "0:0 644 1 ../empty"),
        ]
        assert (
            await sh(room, "echo more >> once; cat twice; ls -A /workspace")
            == "oncemore\napp\nempty\nfifo\nout\npasswd\n"
        )
    deep = make_tar(*(entry("workspace/" + "/".join("d" * number)) for number in range(1, 103)))
    image = await add_image(rig.engine, deep)
    with pytest.raises(EngineError, match="its /workspace is more than 100 directories deep"):
        await rig.engine.create(rig.new_name(), rig.spec_of(image.digest))


# Its user ------------------------------------------------------------------------------------------------------------


async def test_commands_are_its_users(rig: Rig) -> None:
    image = await add_image(rig.engine, User="worker", Env=["PATH=/bin"], Entrypoint=["/bin/env"], Cmd=["true"])
    async with enter_image(rig, image) as room:
        place = room.place
        assert (place.user, place.home, place.capable) == (Identity(1234, 1235, (50, 77)), b"/home/worker", False)
        assert (place.entrypoint, place.command, place.workdir) == ((b"/bin/env",), (b"true",), b"/workspace")
        told = await sh(
            room,
            "id -u; id -G; echo $HOME; touch $HOME/a /workspace/b && echo well; touch /etc/c; chown 0 /workspace/b",
        )
        assert told.startswith("1234\n1235 50 77\n/home/worker\nwell\n")
        assert told.count("Permission denied") + told.count("not permitted") == 2
        # Another daemon says the same, whatever became of the files since.
        await room.run("sh", "-c", "echo worker:x:0:0::/: > /etc/passwd", identity=AGENT, keep_capabilities=True)
        assert await rig.engine._roots.of(image.digest).place(room.paths) == place


async def test_a_user_that_nobody_wrote_down_gets_a_name_and_a_home(rig: Rig) -> None:
    image = await add_image(rig.engine, User="4321:0", WorkingDir="/workspace/deep/er", Env=["PATH=/bin"])
    async with enter_image(rig, image) as room:
        script = "id; echo $HOME; pwd; touch $HOME/a b && echo well; cat /etc/passwd"
        assert (await sh(room, script)).startswith(
            "uid=4321(user) gid=0(root)\n/home/user\n/workspace/deep/er\nwell\nroot:"
        )


@pytest.mark.parametrize("user", ["nobody-knows", "worker:nothing", "100000"])
async def test_a_user_that_is_nobody_is_refused(rig: Rig, user: str) -> None:
    if not rig.native:
        pytest.skip("decided before the runtime starts")
    image = await add_image(rig.engine, User=user)
    with pytest.raises(EngineError, match=r"its (user|/etc)") as raised:
        await rig.engine.create(rig.new_name(), SandboxSpec(rig.runtime, image.digest, LIMITS))
    assert raised.value.control == f"image {image.digest[:19]}"


# Hostile ones --------------------------------------------------------------------------------------------------------


async def test_links_where_the_engine_writes_stay_inside(rig: Rig, tmp_path: Path) -> None:
    """Absolute, relative, dangling, in circles, and to a directory of the machine that is really there."""
    victim = tmp_path / "victim"
    victim.mkdir()
    names = ("resolv.conf", "hosts", "hostname", "passwd", "group", "pip.conf", "npmrc")
    for name in names:
        (victim / name).write_text("the machine's")
    hostile = make_tar(
        *(link(name, f"{'../' * 30}{victim}") for name in ("root", "workspace", "tmp", "run")),
        *(link(name, str(victim)) for name in ("proc", "dev", "sys", "home")),
        link("k8e-agent", f"{victim}/hosts"),
        link("k8e-loader.so", "k8e-loader.so"),
        link("srv", "srv"),
        *(link(f"etc/{name}", f"{victim}/{name}") for name in names[:3]),
        *(link(f"etc/{name}", f"{'../' * 30}{victim}/{name}") for name in names[5:]),
        link("etc/ssl", str(victim)),
    )
    image = await add_image(rig.engine, hostile, WorkingDir="/srv/app", Env=["PATH=/bin"])
    async with enter_image(rig, image) as room:
        assert (
            await sh(room, "pwd; echo in > /tmp/in; echo in > /workspace/in; cat /tmp/in /workspace/in")
            == "/srv/app\nin\nin\n"
        )
        assert "nameserver" in await sh(room, "cat /etc/resolv.conf")
        assert "Linux" in await sh(room, "cat /proc/version")
        assert (await sh(room, "ls /dev/null")) == "/dev/null\n"
        await room.link.write_file(b"/etc/ssl/more", b"in", identity=room.place.user)
    assert {path.name: path.read_text() for path in victim.iterdir()} == dict.fromkeys(names, "the machine's")


async def test_an_etc_that_is_a_link_is_one_inside(rig: Rig, tmp_path: Path) -> None:
    if not rig.native:
        pytest.skip("decided before the runtime starts")
    for target in (str(tmp_path), f"../..{tmp_path}", "/proc/self/root/etc", "/usr"):
        layer = make_tar(entry("etc", b"first a file"), link("etc", target))
        image = await add_image(rig.engine, layer, Env=["PATH=/bin"])
        async with enter_image(rig, image) as room:
            assert "nameserver" in await sh(room, "cat /etc/resolv.conf")
        assert os.listdir(tmp_path) == []


async def test_files_where_folders_are_needed_give_way(rig: Rig) -> None:
    files = ("proc", "dev", "run", "tmp", "workspace", "root", "etc/ssl", "sys")
    layer = make_tar(*(entry(name, b"a file") for name in files), entry("k8e-agent"), entry("etc/hosts"))
    image = await add_image(rig.engine, layer, Env=["PATH=/bin"])
    async with enter_image(rig, image) as room:
        script = "cd /root && echo in > /tmp/in && cat /tmp/in && cat /proc/self/comm && ls /etc/ssl"
        assert (await sh(room, script)).startswith("in\ncat\n")


async def test_an_image_that_cannot_be_furnished_is_refused(rig: Rig) -> None:
    if not rig.native:
        pytest.skip("decided before the runtime starts")
    image = await add_image(rig.engine, make_tar(entry("k8e-agent"), entry("k8e-agent/inside", b"x")))
    name = rig.new_name()
    with pytest.raises(EngineError, match="cannot be furnished") as raised:
        await rig.engine.create(name, rig.spec_of(image.digest))
    assert raised.value.control == f"image {image.digest[:19]}"
    assert not set(await rig.engine.list()) & {name}


async def test_an_image_with_nothing_in_it_has_still_an_agent(rig: Rig) -> None:
    image = await add_image(rig.engine, make_tar(entry("only", b"a file")), bare=True, Env=[])
    async with enter_image(rig, image) as room:
        assert await room.link.read_file(b"/only") == b"a file"
        assert await room.link.read_file(b"/etc/passwd") == b"root:x:0:0:root:/root:/bin/sh\n"
        with pytest.raises(NotStarted) as raised:
            await room.run("bash", "-c", "true")
        assert (raised.value.stage, raised.value.code) == (Stage.EXEC, Code.NOT_FOUND)


# Errors, and what is left --------------------------------------------------------------------------------------------


async def test_what_is_not_there_is_said(rig: Rig) -> None:
    unknown, name = f"sha256:{'0' * 64}", rig.new_name()
    for attempt in (rig.engine.create(name, rig.spec_of(unknown)), rig.engine.edition(rig.spec_of(unknown))):
        with pytest.raises(EngineError, match="not on this machine") as raised:
            await attempt
        assert raised.value.control == "image sha256:000000000000"
    image = await add_image(rig.engine, make_tar(entry("unique", os.urandom(8))))
    top = max(rig.engine.layout.layers.iterdir(), key=lambda path: path.stat().st_ctime_ns)
    for damage in ("missing", "a file"):
        if damage == "missing":
            top.rename(top.with_suffix(".away"))
        else:
            top.write_text("damaged")
        with pytest.raises(EngineError) as raised:
            await rig.engine.create(name, rig.spec_of(image.digest))
        assert raised.value.control.startswith("image")
    top.unlink()
    top.with_suffix(".away").rename(top)
    assert not set(await rig.engine.list()) & {name}


async def test_an_edition_names_the_image(rig: Rig, image: Image) -> None:
    editions = {await rig.engine.edition(rig.spec_of(name)) for name in ("host", image.digest, image.digest)}
    assert len(editions) == 2


def stack_layers(rig: Rig, below: Image, count: int) -> Image:
    """Put where they belong as they are, because unpacking each takes a process."""
    store = rig.engine._images.store
    names = [path.name for path in store.layers_of(below.digest)]
    for number in range(len(names), count):
        name = hashlib.sha256(f"{rig.runtime} {number}".encode()).hexdigest()
        with store.new_layer() as content:
            (content / "many").mkdir()
            (content / f"many/{number}").touch()
            (content / "top").write_text(str(number))
            store.keep_layer(content, Unpacked(name, 3, 3))
        names.append(name)
    digest = f"sha256:{hashlib.sha256(b'many').hexdigest()}"
    return store.keep_image(digest, Configuration(tuple(names), (("PATH", "/bin"),)))


async def test_many_layers(rig: Rig, image: Image) -> None:
    count = 127 if rig.native else 64  # as many as there can be, where they are mapped as well
    many = await asyncio.to_thread(stack_layers, rig, image, count)
    async with enter_image(rig, many) as room:
        assert await sh(room, "ls /many | wc -l; cat /top") == f"{count - 3}\n{count - 1}"


async def test_too_many_layers_are_refused(rig: Rig, image: Image) -> None:
    many = await asyncio.to_thread(stack_layers, rig, image, 128)
    with pytest.raises(EngineError, match="128 layers, possible are 1 to 127"):
        await rig.engine.create(rig.new_name(), rig.spec_of(many.digest))


async def test_it_is_stopped_and_started_again(rig: Rig, image: Image) -> None:
    async with enter_image(rig, image) as room:
        await sh(
            room, "echo kept > /etc/kept; chown 1234 /etc/kept; rm /srv/kept; mv /opt /opt2; echo w > /workspace/w"
        )
        show = "cat /etc/kept /workspace/w; stat -c %u /etc/kept; ls /opt2 /srv; pwd; id -u"
        before = await sh(room, show)
        assert before == "kept\nw\n1234\n/opt2:\nnew\n\n/srv:\napp\n/srv/app\n0\n"
        await rig.engine.stop(room.name)
        assert not [point for point in mount_points() if point.startswith(os.fspath(room.paths.top))]
        await rig.engine.start(room.name, rig.spec_of(image.digest))
        again = await rig.enter(room.name)
        assert again.place == room.place
        assert await sh(again, show) == before


async def test_links_that_its_root_left_are_not_followed_when_it_is_started(rig: Rig, image: Image) -> None:
    """No process inside can put one where something is mounted; this is for the day on which one can."""
    async with enter_image(rig, image) as room:
        paths, record = room.paths, Record.load(room.paths.record)
        await rig.engine.stop(room.name)
        paths.disk.mkdir()
        mount_image(paths.disk_image, paths.disk)
        for name in ("tmp", "proc", "etc"):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(paths.upper / name)
            (paths.upper / name).symlink_to("/usr")
        await rig.engine._roots.of(record.image).mount_again(paths, record)
        assert (paths.root / "tmp").is_dir()
        assert not (paths.root / "tmp").is_symlink()
        await unmount_below(paths.top)
        paths.disk.rmdir()
        await rig.engine.start(room.name, rig.spec_of(image.digest))
        again = await rig.enter(room.name)
        assert "nameserver" in await sh(again, "cat /etc/resolv.conf; echo in > /tmp/in")
        assert await sh(again, "ls /usr") == "resolv.conf\n"
