"""Attempts at what docs/security.md says cannot be done to the machine: system calls of a process that has a project
and a home of the machine's user before it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.engine.lost.script import Argument, Attempt, Zeros

FOLLOW_NOT, FOLDER, PATH = os.O_NOFOLLOW, os.O_DIRECTORY, 0o10000000
RENAME_EXCHANGE, AT_REMOVEDIR, AT_EMPTY_PATH = 2, 0x200, 0x1000
NEWUSER, NEWNS = 0x10000000, 0x20000
AF_UNIX, AF_INET, AF_NETLINK, AF_PACKET, AF_VSOCK = 1, 2, 16, 17, 40
SET_IDS = (0o4755, 0o2755, 0o6755)
ABSTRACT = "\0k8e-test-listener"  # of the test, on the machine


@dataclass(frozen=True, slots=True)
class Ground:
    """How a process gets at them: from a descriptor, by a path."""

    top: int
    project: str
    home: str

    def open(self, attempt: Attempt, path: str, flags: int = PATH | FOLDER) -> Argument:
        return attempt.call("openat", self.top, path, flags | FOLLOW_NOT, 0)


Make = Callable[[Attempt, Ground], object]


def list_attempts(ground: Ground, *, native: bool) -> list[Attempt]:
    attempts = []
    for name, make in (*_modes(), *_kept(), *_others(), *_hidden(), *_mounts(), *_ways_out(native)):
        attempt = Attempt(name)
        make(attempt, ground)
        attempts.append(attempt)
    return attempts


def list_ways_out() -> Iterator[tuple[str, Make]]:
    """What has nothing to do with a project: mounts, namespaces, the kernel's other interfaces, the network."""
    yield from _mounts()
    yield from _ways_out(native=True)


def _in_project(call: str, *arguments: Argument) -> Make:
    return lambda attempt, ground: attempt.call(call, ground.open(attempt, ground.project), *arguments)


def _on_file(call: str, *arguments: Argument) -> Make:
    def make(attempt: Attempt, ground: Ground) -> object:
        file = attempt.call("openat", ground.open(attempt, ground.project), "private", os.O_RDWR | FOLLOW_NOT, 0)
        return attempt.call(call, file, *arguments)

    return make


def _modes() -> Iterator[tuple[str, Make]]:
    for mode in SET_IDS:
        create = os.O_CREAT | os.O_RDWR | FOLLOW_NOT
        yield f"create {mode:o}", _in_project("openat", f"made-{mode:o}", create, mode)
        yield f"unnamed {mode:o}", _in_project("openat", ".", 0o20200000 | os.O_RDWR | FOLLOW_NOT, mode)
        yield f"chmod {mode:o}", _in_project("fchmodat", "private", mode)
        yield f"fchmodat2 {mode:o}", _in_project("fchmodat2", "private", mode, 0)
        yield f"fchmod {mode:o}", _on_file("fchmod", mode)
        yield f"make file {mode:o}", _in_project("mknodat", f"node-{mode:o}", stat.S_IFREG | mode, 0)
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        yield f"make device {kind:o}", _in_project("mknodat", "made-device", kind | 0o666, os.makedev(1, 5))
    yield "openat2", _in_project("openat2", "made-openat2", Zeros(), 24)
    yield "io_uring", lambda attempt, _: attempt.call("io_uring_setup", 8, Zeros())
    yield "open a device", _in_project("openat", "device", os.O_RDONLY | FOLLOW_NOT, 0)


def _with_both(call: str, source: str, target: str, *more: Argument) -> Make:
    def make(attempt: Attempt, ground: Ground) -> object:
        folder = ground.open(attempt, ground.project)
        return attempt.call(call, folder, source, folder, target, *more)

    return make


def _in_git(call: str, *arguments: Argument) -> Make:
    def make(attempt: Attempt, ground: Ground) -> object:
        return attempt.call(call, ground.open(attempt, f"{ground.project}/.git"), *arguments)

    return make


def _kept() -> Iterator[tuple[str, Make]]:
    for part in (".git", ".git/config", ".git/hooks", "Makefile", ".envrc"):
        yield f"rename {part}", _with_both("renameat2", part, "gone", 0)
        yield f"replace {part}", _with_both("renameat2", "private", part, 0)
        yield f"exchange {part}", _with_both("renameat2", part, "private", RENAME_EXCHANGE)
        yield f"exchange with {part}", _with_both("renameat2", "private", part, RENAME_EXCHANGE)
        yield f"unlink {part}", _in_project("unlinkat", part, 0)
        yield f"remove {part}", _in_project("unlinkat", part, AT_REMOVEDIR)
        yield f"link {part}", _with_both("linkat", part, "linked", 0)
        yield (
            f"symlink {part}",
            lambda attempt, ground, part=part: attempt.call(  # type: ignore[misc]
                "symlinkat", "evil", ground.open(attempt, ground.project), part
            ),
        )
    for part in (".git/config", "Makefile"):
        yield f"write {part}", _in_project("openat", part, os.O_WRONLY | FOLLOW_NOT, 0)
        yield f"chmod {part}", _in_project("fchmodat", part, 0o777)
        yield f"touch {part}", _in_project("utimensat", part, 0, 0)
    yield "add a hook", _in_git("openat", "hooks/evil", os.O_CREAT | os.O_WRONLY | FOLLOW_NOT, 0o755)
    yield "add a directory of hooks", _in_git("mkdirat", "hooks/evil", 0o755)
    yield "write config in .git", _in_git("openat", "config", os.O_WRONLY | FOLLOW_NOT, 0)
    yield "remove config in .git", _in_git("unlinkat", "config", 0)
    yield "bring hooks out", _with_both("renameat2", ".git/hooks", "hooks", 0)
    # What is mounted over the root of its namespace is found behind it.
    for path in ("/../Makefile", "/../.git/config", "/../private"):
        yield (
            f"write {path}",
            lambda attempt, _, path=path: attempt.call(  # type: ignore[misc]
                "openat", -100, path, os.O_WRONLY | FOLLOW_NOT, 0
            ),
        )
    yield "rename behind the root", lambda attempt, _: attempt.call("renameat2", -100, "/../.git", -100, "/../gone", 0)
    yield "handle of config", _in_git("name_to_handle_at", "config", Zeros(), Zeros(), 0)
    yield "open a handle", _in_project("open_by_handle_at", Zeros(), os.O_RDWR)


def _others() -> Iterator[tuple[str, Make]]:
    yield "read root's", _in_project("openat", "roots-private", os.O_RDONLY | FOLLOW_NOT, 0)
    yield "write root's", _in_project("openat", "roots-public", os.O_WRONLY | FOLLOW_NOT, 0)
    yield "remove root's", _in_project("unlinkat", "roots-public", 0)
    yield "rename root's", _with_both("renameat2", "roots-public", "taken", 0)
    yield "chmod root's", _in_project("fchmodat", "roots-private", 0o666)
    yield "take root's", _in_project("fchownat", "roots-private", 1000, 1000, 0)
    yield "give away", _in_project("fchownat", "private", 4242, 4242, 0)
    for name in ("security.capability", "trusted.k8e"):
        value = "\x01\x00\x00\x02" + "\xff" * 16
        yield f"attribute {name}", _on_file("fsetxattr", name, value, 20, 0)


def _hidden() -> Iterator[tuple[str, Make]]:
    for name in (".ssh/id_ed25519", ".netrc", ".config/gh/hosts.yml", "vault/credentials"):
        yield (
            f"hidden {name}",
            lambda attempt, ground, name=name: attempt.call(  # type: ignore[misc]
                "openat", ground.open(attempt, ground.home), name, os.O_RDONLY | FOLLOW_NOT, 0
            ),
        )
    yield (
        "write home",
        lambda attempt, ground: attempt.call(
            "openat", ground.open(attempt, ground.home), "made", os.O_CREAT | os.O_WRONLY | FOLLOW_NOT, 0o644
        ),
    )
    yield (
        "write /usr",
        lambda attempt, ground: attempt.call(
            "openat", ground.top, "usr/bin/made", os.O_CREAT | os.O_WRONLY | FOLLOW_NOT, 0o644
        ),
    )
    up = "../" * 40
    for path in (
        "etc/shadow",
        "root/.ssh",
        "var/lib/k8e",
        "var/lib/dpkg",
        "proc/1/root/var/lib/dpkg",
        "proc/self/root/var/lib/dpkg",
    ):
        yield f"up to {path}", _in_project("openat", f"{up}{path}", PATH | FOLLOW_NOT, 0)


def _mounts() -> Iterator[tuple[str, Make]]:
    yield "user namespace", lambda attempt, _: attempt.call("unshare", NEWUSER | NEWNS)
    yield "mount", lambda attempt, _: attempt.call("mount", "x", "/tmp", "tmpfs", 0, "")
    yield "remount", lambda attempt, _: attempt.call("mount", "", "/", "", 0x1020, "")
    for path in ("/workspace/.git", "/.git", "/"):
        yield f"unmount {path}", lambda attempt, _, path=path: attempt.call("umount2", path, 2)  # type: ignore[misc]
    yield "open_tree", _in_project("open_tree", ".git", 1)
    yield "mount_setattr", _in_project("mount_setattr", ".git", 0, Zeros(), 32)
    yield "move_mount", _in_project("move_mount", ".git", -100, "/tmp", 0)
    yield "pivot_root", lambda attempt, _: attempt.call("pivot_root", ".", ".")
    yield "chroot", lambda attempt, _: attempt.call("chroot", "..")
    yield "setns", _in_project("setns", 0)
    yield "bpf", lambda attempt, _: attempt.call("bpf", 5, Zeros(), 128)
    yield "module", lambda attempt, _: attempt.call("init_module", Zeros(), 4, "")
    yield "keys", lambda attempt, _: attempt.call("add_key", "user", "k8e", "x", 1, -3)


def _ways_out(native: bool) -> Iterator[tuple[str, Make]]:
    # gVisor's processes need no socket of any kind; a native sandbox has its own addresses and may ask for its routes.
    families = (AF_PACKET, AF_VSOCK) if native else (AF_INET, AF_NETLINK, AF_PACKET, AF_VSOCK)
    for family in families:
        yield f"socket {family}", lambda attempt, _, family=family: attempt.call("socket", family, 2, 0)  # type: ignore[misc]
    yield "raw socket", lambda attempt, _: attempt.call("socket", AF_INET, 3, 1)
    yield (
        "connect to the machine",
        lambda attempt, _: attempt.call(
            "connect", attempt.call("socket", AF_UNIX, 1, 0), f"\x01\x00{ABSTRACT}", 2 + len(ABSTRACT)
        ),
    )
    if not native:
        yield "execute", lambda attempt, _: attempt.call("execve", "/usr/bin/id", Zeros(), Zeros())
