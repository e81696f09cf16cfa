"""OCI images in virtual machines: a read-only disk for each, below the sandbox's own layer."""

from __future__ import annotations

import pytest

from tests.engine.rig import Rig
from tests.engine.tiny_images import add_image
from tests.engine.toolbox_image import toolbox_layer
from tests.engine.vm.conftest import VM_LIMITS, on_its_day
from tests.images.builder import entry, make_tar

pytestmark = on_its_day(1)
PATH = "PATH=/usr/bin"


@pytest.fixture(scope="module")
async def digest(rig: Rig) -> str:
    more = make_tar(entry("srv/only-here", b"layered\n"), entry("workspace/from-the-image", b"copied\n"))
    return (await add_image(rig.engine, toolbox_layer(), more, bare=True, Env=[PATH], User="worker:worker")).digest


async def test_an_images_root_is_its_own_and_stays_when_stopped(rig: Rig, digest: str) -> None:
    name, spec = rig.new_name(), rig.spec_of(digest, VM_LIMITS)
    await rig.engine.create(name, spec)
    room = await rig.enter(name)
    script = "id -u; cat /srv/only-here /workspace/from-the-image; python3 -c 'print(6 * 7)'; uname -n"
    assert (await room.output("sh", "-c", script)).split() == ["1234", "layered", "copied", "42", "sandbox"]
    changed = "rm /srv/only-here; mv /usr/bin/xz /usr/bin/moved; echo mine > /srv/mine; cat /etc/resolv.conf"
    done = await room.as_agent("sh", "-c", changed)
    assert (done.outcome.exit_code, done.stdout.split()[0]) == (0, b"nameserver"), done
    await rig.engine.stop(name)
    (disk,) = (rig.engine.layout.state / "bases").iterdir()
    made = disk.stat()
    await rig.engine.start(name, spec)
    room = await rig.enter(name)
    assert (
        await room.output("sh", "-c", "ls /srv; ls /usr/bin/moved /usr/bin/xz 2>/dev/null || true")
        == "mine\n/usr/bin/moved\n"
    )
    assert disk.stem == digest.removeprefix("sha256:")
    second = rig.new_name()
    await rig.engine.create(second, spec)
    assert await (await rig.enter(second)).output("cat", "/srv/only-here") == "layered\n"
    assert list(disk.parent.iterdir()) == [disk]
    assert (disk.stat().st_ino, disk.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns), "made once"
    await rig.engine.destroy(second)
    await rig.engine.destroy(name)
