"""Images for tests of what sandboxes are made of: a statically linked busybox, and what a test puts beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Any

from k8e.engine import Limits
from k8e.engine.images import Image, Progress
from k8e.engine.local import LocalEngine
from tests.engine.rig import LIMITS, Rig, Room
from tests.images.builder import build, entry, link, make_tar, write_layout

Entry = tuple[tarfile.TarInfo, bytes]
APPLETS = (
    *("sh", "cat", "chmod", "chown", "chroot", "cp", "dd", "df", "echo", "env", "false", "find", "grep", "head"),
    *("hostname", "id", "ln", "ls", "mkdir", "mkfifo", "mknod", "mount", "mv", "od", "ps", "pwd", "readlink", "rm"),
    *("rmdir", "seq", "sha256sum", "sleep", "sort", "stat", "su", "sync", "tar", "test", "touch", "tr", "true"),
    *("umount", "wc"),
)
PASSWD = b"root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1::/:/bin/false\nworker:x:1234:1235:w:/home/worker:/bin/sh\n"
GROUP = b"root:x:0:\ndaemon:x:1:\nstaff:x:50:worker\nworker:x:1235:\nextra:x:77:worker,daemon\n"


@cache
def busybox() -> bytes:
    path = shutil.which("busybox")
    assert path, "scripts/setup installs busybox-static"
    kind = subprocess.run([path, "--help"], capture_output=True, text=True, check=True)
    assert kind.stdout.startswith("BusyBox")
    return Path(path).read_bytes()


@cache
def busybox_layer() -> bytes:
    folders = ("bin", "etc", "tmp", "var", "var/tmp", "usr", "root", "home", "home/worker")
    return make_tar(
        *(entry(name, mode=0o1777 if name.endswith("tmp") else 0o755) for name in folders[:-1]),
        entry("home/worker", mode=0o750, uid=1234, gid=1235),
        entry("bin/busybox", busybox(), mode=0o755),
        *(link(f"bin/{name}", "busybox") for name in APPLETS),
        entry("etc/passwd", PASSWD),
        entry("etc/group", GROUP),
    )


@cache
def compile_program(source: str, *options: str) -> bytes:
    """By musl's compiler, which the agent is built with."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program")
        command = ["musl-gcc", "-x", "c", "-", "-o", os.fspath(program), *options]
        subprocess.run(command, input=source.encode(), check=True)
        return program.read_bytes()


def compile_static(source: str) -> bytes:
    return compile_program(source, "-static")


def ignore(_: Progress) -> None:
    """No caller waits."""


async def add_image(engine: LocalEngine, *layers: bytes, bare: bool = False, **config: Any) -> Image:
    """On top of busybox, unless it is to be bare."""
    built = build(*(() if bare else (busybox_layer(),)), *layers, how="plain", config=config)
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        return await engine.images.add(write_layout(Path(file.name), built), ignore)


def enter_image(rig: Rig, image: Image, limits: Limits = LIMITS) -> AbstractAsyncContextManager[Room]:
    return rig.room(limits, image.digest)
