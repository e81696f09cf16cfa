"""An image like those that people use: glibc, a shell, coreutils, dpkg, Python, all from this machine's own files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.engine.tiny_images import GROUP, PASSWD, Entry
from tests.images.builder import entry, link, make_tar

COREUTILS = (
    *("cat", "chmod", "chown", "cp", "cut", "dd", "echo", "env", "false", "head", "id", "install", "ln", "ls", "mkdir"),
    *(
        "mkfifo",
        "mknod",
        "mktemp",
        "mv",
        "od",
        "printf",
        "pwd",
        "readlink",
        "realpath",
        "rm",
        "rmdir",
        "seq",
        "sha256sum",
        "sleep",
        "sort",
    ),
    *("stat", "stty", "sync", "tail", "tee", "test", "touch", "tr", "true", "tty", "uname", "wc", "yes"),
)
OTHERS = (
    *("bash", "dash", "dpkg", "dpkg-deb", "dpkg-query", "dpkg-split", "find", "grep", "sed", "setpriv", "tar", "nice"),
    *("dpkg-trigger", "diff", "ps", "kill", "perl", "rm", "setsid", "nohup", "timeout", "xargs", "xz", "gzip"),
    "getent",
)
_LIBRARY = re.compile(r"(/[^\s]+\.so[^\s]*)")
_LEFT_OUT = {"test", "idlelib", "ensurepip", "lib2to3", "tkinter", "turtledemo", "__pycache__", "distutils"}


def real_python() -> Path:
    return Path(os.path.realpath("/usr/bin/python3"))


def programs() -> list[Path]:
    found = [Path("/usr/bin", name) for name in (*COREUTILS, *OTHERS)]
    return [path for path in found if path.exists()]


def libraries(files: Iterable[Path]) -> set[Path]:
    """Lists what those need at run time."""
    told = subprocess.run(["ldd", *map(os.fspath, files)], capture_output=True, text=True).stdout
    lines = [line for line in told.splitlines() if line.startswith("\t")]
    return {Path(match[1]) for line in lines if (match := _LIBRARY.search(line))}


def _python_files() -> Iterator[Path]:
    top = Path("/usr/lib", real_python().name)
    for parent, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT and not name.startswith("config-"))
        yield from (Path(parent, name) for name in sorted(names) if not os.path.islink(os.path.join(parent, name)))


def _copy(paths: Iterable[Path]) -> Iterator[Entry]:
    seen = set()
    for path in paths:
        inside = Path("/usr", path.relative_to("/")) if path.parts[1] in ("bin", "lib", "lib64") else path
        if inside not in seen:
            seen.add(inside)
            yield entry(os.fspath(inside).lstrip("/"), path.read_bytes(), mode=0o755)


@cache
def pip_layer() -> bytes:
    """The pip of the tools layer, in a Python that says that it is not to be touched."""
    top = Path("/var/lib/k8e/tools/python").resolve()
    files = [path for path in sorted(top.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    assert files, "`make setup` makes the tools layer"
    packages = "usr/lib/python3/dist-packages"
    return make_tar(
        *(entry(f"{packages}/{path.relative_to(top)}", path.read_bytes()) for path in files),
        entry(f"usr/lib/{real_python().name}/EXTERNALLY-MANAGED", b"[externally-managed]\nError=Do not touch.\n"),
    )


@cache
def toolbox_layer() -> bytes:
    python = [real_python(), *_python_files()]
    binaries = [path for path in (*programs(), *python) if path.suffix == ".so" or path.parent == Path("/usr/bin")]
    needed = libraries(binaries)
    folders = ("etc", "home", "root", "usr", "usr/bin", "usr/lib", "usr/lib64", "var", "var/lib", "var/lib/dpkg")
    return make_tar(
        *(entry(name) for name in folders),
        *(link(name, f"usr/{name}") for name in ("bin", "lib", "lib64")),
        link("sbin", "usr/bin"),
        entry("tmp", mode=0o1777),
        entry("checks", mode=0o1777),
        entry("home/worker", mode=0o750, uid=1234, gid=1235),
        entry("etc/passwd", PASSWD),
        entry("etc/group", GROUP),
        *(entry(f"var/lib/dpkg/{name}", b"") for name in ("status", "available")),
        *(entry(f"var/lib/dpkg/{name}") for name in ("info", "updates", "triggers")),
        *_copy((*programs(), *python, *sorted(needed))),
        link("usr/bin/sh", "dash"),
        link("usr/bin/python3", real_python().name),
        # Nothing that dpkg calls, only looks for.
        *(entry(f"usr/bin/{name}", b"#!/bin/sh\n", mode=0o755) for name in ("ldconfig", "start-stop-daemon")),
    )
