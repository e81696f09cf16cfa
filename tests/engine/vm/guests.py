"""A guest for tests: the distribution's kernel, and of /usr what the toolbox image has, so that it is made in seconds.

It is kept in the build directory, under the digest of what it is made of: one of a machine is enough."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from k8e.engine.local.runtime.bundle import HostPath
from k8e.engine.local.vm import guest_builder, kernel
from k8e.engine.local.vm.guest import Guest
from k8e.engine.local.vm.guest_builder import PACKAGE, build_guest
from tests.engine.toolbox_image import toolbox_layer

BUILD = Path(__file__).parents[3] / "build" / "test-guests"


def find_version() -> str:
    """Of the kernel's package that apt would download; empty: it knows none."""
    told = subprocess.run(["apt-cache", "policy", PACKAGE], capture_output=True, text=True).stdout
    return next((line.split()[1] for line in told.splitlines() if "Candidate:" in line and "(none)" not in line), "")


def unpack_usr(target: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(toolbox_layer())) as archive:
        wanted = [member for member in archive.getmembers() if member.name.startswith("usr/")]
        archive.extractall(target, wanted, filter="fully_trusted")


async def build_test_guest(folder: Path) -> Guest:
    with tempfile.TemporaryDirectory() as scratch:
        await asyncio.to_thread(unpack_usr, Path(scratch))
        tools = Path(scratch, "tools")  # in the place of the tools layer
        await asyncio.to_thread(tools.mkdir)
        return await build_guest(folder, [HostPath(Path(scratch, "usr"), "/usr"), HostPath(tools, "/opt/k8e")], [])


async def find_guest() -> Path:
    builder = "".join(inspect.getsource(each) for each in (guest_builder, kernel, unpack_usr, build_test_guest))
    key = hashlib.sha256(f"{find_version()}{builder}".encode() + toolbox_layer()).hexdigest()[:16]
    folder = BUILD / key
    if not await asyncio.to_thread((folder / "guest.json").exists):
        await build_test_guest(folder)
    return folder
