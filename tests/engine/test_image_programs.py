"""Programs in an image: package managers that need root's powers, interpreters that wait, other C libraries,
and the whole conformance suite."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k8e.conformance import CHECKS, Check
from k8e.core.sessions.interpreters import BASH, PYTHON, plan
from k8e.engine.images import Image
from k8e.link.errors import AgentError, Code
from k8e.link.model import ExecSpec, Identity
from tests.engine.rig import Rig, Room, eventually
from tests.engine.test_conformance import Shared, always, share
from tests.engine.tiny_images import add_image, compile_program, enter_image
from tests.engine.toolbox_image import toolbox_layer
from tests.images.builder import entry, make_tar
from tests.shares import choose

PATH = "PATH=/usr/bin:/bin"
WORKER = Identity(1234, 1235)


@pytest.fixture(scope="module")
async def toolbox(rig: Rig) -> Image:
    return await add_image(rig.engine, toolbox_layer(), bare=True, Env=[PATH])


@pytest.fixture(scope="module")
async def room(rig: Rig, toolbox: Image) -> AsyncIterator[Room]:
    async with enter_image(rig, toolbox) as room:
        yield room


def build_package(folder: Path) -> bytes:
    """Files of several owners, one of them set-uid, and scripts that run as root and as another user."""
    top = folder / "package"
    (top / "DEBIAN").mkdir(parents=True)
    facts = "Package: k8e-example\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody <nobody@invalid>\n"
    (top / "DEBIAN/control").write_text(f"{facts}Description: none\n")
    become = "setpriv --reuid 1234 --regid 1235 --clear-groups"
    script = f"#!/bin/sh\nset -e\nchown 1234:1235 /opt/example/data\n{become} id -u > /opt/example/ran\n"
    (top / "DEBIAN/postinst").write_text(script)
    (top / "DEBIAN/postinst").chmod(0o755)
    (top / "opt/example").mkdir(parents=True)
    (top / "opt/example/data").write_text("data")
    (top / "opt/example/tool").write_text("#!/bin/sh\necho tool\n")
    (top / "opt/example/tool").chmod(0o4755)
    (top / "etc").mkdir()
    (top / "etc/passwd.example").symlink_to("passwd")
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "--build", top, folder / "example.deb"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return (folder / "example.deb").read_bytes()


async def test_dpkg_installs_and_removes_as_the_images_root(room: Room, tmp_path: Path) -> None:
    await room.link.write_file(b"/tmp/example.deb", build_package(tmp_path), identity=room.place.user)
    done = await room.run("dpkg", "-i", "/tmp/example.deb")
    assert done.outcome.exit_code == 0, done.stderr
    told = await room.output("sh", "-c", "stat -c '%u:%g %a' /opt/example/*; cat /opt/example/ran; /opt/example/tool")
    assert told == "1234:1235 644\n0:0 644\n0:0 4755\n1234\ntool\n"
    assert "ii  k8e-example" in await room.output("dpkg", "-l", "k8e-example")
    assert (await room.run("dpkg", "--purge", "k8e-example")).outcome.exit_code == 0
    assert (await room.run("ls", "/opt/example/tool")).outcome.exit_code != 0


async def parks(room: Room, kind: tuple[bytes, ...]) -> bool:
    """Not while root's Python writes beside its own files what it compiled of them."""
    try:
        await room.link.park(plan(kind, room.place, ()), room.place.loader)
    except AgentError as error:
        if error.code is not Code.UNSUPPORTED:
            raise
        return False
    return True


@pytest.mark.parametrize("kind", [BASH, PYTHON], ids=["bash", "python"])
async def test_interpreters_of_the_image_wait_for_programs(room: Room, kind: tuple[bytes, ...]) -> None:
    """With the powers that commands there have."""
    python = b"import os; os.chown('/var', 7, 7); print(os.stat('/var').st_uid)"
    program = python if kind == PYTHON else b"chown 7 /var; stat -c %u /var"
    await eventually(lambda: parks(room, kind), "it has compiled its library and waits")
    spec = ExecSpec((*kind, program), room.place.env, identity=room.place.user, keep_capabilities=True, parked=True)
    process = await room.link.start(spec)
    assert process.handed_over
    assert await process.stdout.read() == b"7\n"
    assert await process.stderr.read() == b""
    assert (await process.wait()).exit_code == 0


MUSL_LINKER = f"/lib/ld-musl-{platform.machine()}.so.1"
MUSL = """
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv) { return printf("%s %s\\n", argv[0], argc > 3 ? argv[3] : "") < 0; }
"""


def read_host_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


async def test_where_the_loader_does_not_fit_programs_start_the_plain_way(rig: Rig) -> None:
    """A shell that is linked with musl, as Alpine's are, and one without any dynamic linker."""
    dynamic = make_tar(
        entry("lib"),
        entry(MUSL_LINKER.lstrip("/"), read_host_bytes(MUSL_LINKER), mode=0o755),
        entry("bin/bash", compile_program(MUSL), mode=0o755),
    )
    static = make_tar(entry("bin/bash", compile_program(MUSL, "-static"), mode=0o755))
    for layer in (dynamic, static):
        image = await add_image(rig.engine, layer, Env=["PATH=/bin"])
        async with enter_image(rig, image) as room:
            with pytest.raises(AgentError) as raised:
                await room.link.park(plan(BASH, room.place, ()), room.place.loader)
            assert raised.value.code is Code.UNSUPPORTED
            done = await room.run(*BASH, "echo hello", parked=True)
            assert done.stdout == b"bash echo hello\n"


async def test_the_machines_registries_are_configured(room: Room) -> None:
    if b"SSL_CERT_FILE" in dict(room.place.env):
        code = "import ssl; print(ssl.create_default_context().cert_store_stats()['x509_ca'] > 0)"
        assert await room.output("python3", "-c", code) == "True\n"
    for name in ("/etc/pip.conf", "/etc/npmrc"):
        assert (await room.output("stat", "-c", "%U %a", name)) == "root 644\n"


async def test_an_image_keeps_whom_it_trusts(rig: Rig, toolbox: Image) -> None:
    own = "-----BEGIN CERTIFICATE-----\nT1dOCg==\n-----END CERTIFICATE-----\n"
    layer = make_tar(entry("etc/ssl/certs/ca-certificates.crt", own.encode()))
    image = await add_image(rig.engine, layer, Env=["PATH=/bin"])
    async with enter_image(rig, image) as room:
        bundle = await room.link.read_file(b"/etc/ssl/certs/ca-certificates.crt")
        assert bundle.startswith(own.encode())
        assert bundle.count(own.encode()) == 1


# The conformance suite, as a user of the image ------------------------------------------------------------------------

# A share (shares.py), other ones than natively on the machine's own files, and what the root has a part in.
CHOSEN = choose(CHECKS, turn=3, always=always)


@pytest.fixture(scope="module")
async def shared(rig: Rig) -> AsyncIterator[Shared]:
    """In a directory of the image, so that it is the layers that are asked for files."""
    image = await add_image(rig.engine, toolbox_layer(), bare=True, Env=[PATH], User="worker:worker")
    async with share(rig, image.digest, b"/checks") as shared:
        yield shared


@pytest.mark.parametrize("check", CHOSEN, ids=lambda check: check.name)
async def test_conformance(shared: Shared, check: Check) -> None:
    await shared.run(check)
