"""The places of an installation. All are root's, and none is a place where a distribution's own packages put files."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path("/usr/local/lib/k8e")  # the program, a folder for each version, and the record
CURRENT = LIBRARY / "current"  # a link to the folder that is used
RECORD = LIBRARY / "install.json"
COMMANDS = Path("/usr/local/bin")
UNIT = Path("/usr/local/lib/systemd/system/k8e.service")
SHARED = Path("/usr/local/share")
GROUP = "k8e"
PROGRAMS = {"k8e": "k8e.cli", "k8e-sandbox": "k8e.cli", "agentkernel": "k8e.cli.agentkernel"}


def is_installed_here() -> bool:
    """Whether this process is the installed program, and not the environment that it was installed from."""
    return LIBRARY in Path(os.path.realpath(os.path.dirname(__file__))).parents


def list_folders_above(path: Path) -> Iterator[Path]:
    """Those that an installation may have made, the inner first: removed again when nothing is in them."""
    for parent in path.parents:
        if parent in (Path("/usr/local/lib"), Path("/etc"), COMMANDS, SHARED):
            return
        yield parent


def is_trusted(path: Path) -> bool:
    """Whether root alone can change what is there, and every user can reach it."""
    real = Path(os.path.realpath(path))
    return all(step.exists() and is_roots(step) and step.stat().st_mode & 0o001 for step in (real, *real.parents))


def is_roots(path: Path) -> bool:
    """Whether root alone can change it. Debian lets the group staff write to /usr/local: that counts when the group has
    a member."""
    found = path.stat()
    if found.st_uid != 0 or (found.st_mode & 0o002 and not found.st_mode & 0o1000):
        return False
    return not found.st_mode & 0o020 or not has_members(found.st_gid)


def has_members(group: int) -> bool:
    try:
        named = set(grp.getgrgid(group).gr_mem) - {"root"}
    except KeyError:
        named = set()
    return bool(named) or any(user.pw_gid == group and user.pw_uid != 0 for user in pwd.getpwall())
