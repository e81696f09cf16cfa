"""Directories of a user of the machine, for sandboxes to be let into: a project and a home with secrets, with things of
another user among them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k8e.engine import Mount

OWNER = 12345  # no account has this id; its files are as real as any user's
SECRET = "the-secret-of-this-test"
KEPT = (".git/config", ".git/hooks", "Makefile", ".envrc")
HIDDEN = (".ssh", ".netrc", ".config/gh", ".aws", ".kube/config", ".later")


@dataclass(frozen=True, slots=True)
class Grounds:
    top: Path

    @property
    def project(self) -> Path:
        return self.top / "project"

    @property
    def home(self) -> Path:
        return self.top / "home"

    @property
    def roots(self) -> Path:
        """Where only root of the machine gets."""
        return self.top / "roots"

    def mounts(self) -> tuple[Mount, ...]:
        return self.project_mount(), self.home_mount()

    def project_mount(self, **changes: object) -> Mount:
        return Mount(str(self.project), "/workspace", OWNER, writable=True, kept=KEPT, **changes)  # type: ignore[arg-type]

    def home_mount(self) -> Mount:
        return Mount(str(self.home), "/home/user", OWNER, hidden=HIDDEN)


def as_owner(*argv: str, cwd: Path) -> str:
    env = {"HOME": "/nonexistent", "PATH": "/usr/bin:/bin", "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(
        argv, cwd=cwd, user=OWNER, group=OWNER, extra_groups=[], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done
    return done.stdout


def write(path: Path, content: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)


@contextlib.contextmanager
def open_grounds() -> Iterator[Grounds]:
    grounds = Grounds(Path(tempfile.mkdtemp(prefix="k8e-grounds-", dir="/tmp")))
    try:
        grounds.top.chmod(0o755)
        _fill_project(grounds.project)
        _fill_home(grounds.home)
        write(grounds.roots / "secret", SECRET, 0o600)
        grounds.roots.chmod(0o700)
        yield grounds
    finally:
        shutil.rmtree(grounds.top)


def _give(top: Path) -> None:
    for parent, folders, names in os.walk(top):
        for name in (*folders, *names):
            os.lchown(os.path.join(parent, name), OWNER, OWNER)
    os.chown(top, OWNER, OWNER)


def _fill_project(project: Path) -> None:
    project.mkdir()
    write(project / "private", "the owner's\n", 0o600)
    write(project / "Makefile", "all:\n")
    (project / "to-shadow").symlink_to("/etc/shadow")
    (project / "to-roots").symlink_to("../roots/secret")
    (project / "to-hostname").symlink_to("/etc/hostname")
    shutil.copy("/usr/bin/id", project / "id-of-owner")
    _give(project)
    (project / "id-of-owner").chmod(0o4755)
    as_owner("git", "init", "-q", cwd=project)
    as_owner("git", "-c", "user.name=o", "-c", "user.email=o@o", "commit", "-qm", "one", "--allow-empty", cwd=project)
    # Of others, left there.
    write(project / "roots-private", "root's\n", 0o600)
    write(project / "roots-public", "root's\n", 0o644)
    shutil.copy("/usr/bin/id", project / "id-of-root")
    (project / "id-of-root").chmod(0o4755)
    os.mknod(project / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    (project / "device").chmod(0o666)


def _fill_home(home: Path) -> None:
    home.mkdir()
    write(home / ".bashrc", "# the owner's\n", 0o600)
    write(home / ".ssh/id_ed25519", SECRET, 0o600)
    write(home / ".netrc", SECRET)
    write(home / ".config/gh/hosts.yml", SECRET)
    write(home / ".config/harmless", "harmless\n")
    write(home / "vault/credentials", SECRET)
    (home / ".aws").symlink_to("vault")
    (home / "another-way").symlink_to(".ssh/id_ed25519")
    _give(home)
    home.chmod(0o700)
