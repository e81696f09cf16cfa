"""Bundles: the form in which commits leave a sandbox. The header says which refs a bundle has and which commits it
builds on; a pack of objects follows. It is git's own form (gitformat-bundle(5)), so that git can list what is in one.

A sandbox chose the objects and the names of refs. Names are checked here, before git sees them; objects in
quarantine.py.
"""

from __future__ import annotations

import contextlib
import os

from k8e.cli.agentkernel.git.repository import is_hash
from k8e.cli.agentkernel.plan import state_folder
from k8e.cli.process import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

MOST_REFS = 1000
LARGEST = 512 << 20  # bytes of objects
_LONGEST = 200  # bytes of a ref's name
_HEADER = 1 << 20
_FORBIDDEN = frozenset(' ~^:?*[\\"')
_FIRST, _FIRST_LONG = "# v2 git bundle", "# v3 git bundle"
_KEPT, _DAYS = 20, 14


class Bundle:
    def __init__(self, refs: dict[str, str], needed: Iterable[str]) -> None:
        self.refs = refs  # from a name to a commit
        self.needed = list(needed)  # commits that the objects build on

    @property
    def object_format(self) -> str:
        return "sha256" if any(len(commit) == 64 for commit in self.refs.values()) else "sha1"

    def write_header(self, file: BinaryIO) -> None:
        long = self.object_format == "sha256"
        lines = [_FIRST_LONG, "@object-format=sha256"] if long else [_FIRST]
        lines += [f"-{commit} " for commit in self.needed]
        lines += [f"{commit} {name}" for name, commit in self.refs.items()]
        file.write("".join(f"{line}\n" for line in (*lines, "")).encode())


def read_header(file: BinaryIO) -> Bundle:
    """Leaves the file where the objects begin. Raises Failure for everything that `write_header` does not write."""
    refs: dict[str, str] = {}
    needed: list[str] = []
    left = _HEADER
    first = file.readline(64)
    if first.rstrip(b"\n").decode("ascii", "replace") not in (_FIRST, _FIRST_LONG):
        raise damaged("it is no bundle")
    while (line := file.readline(left)) != b"\n":
        left -= len(line)
        text = line.decode("utf-8", "replace").removesuffix("\n")
        commit, _, name = text.removeprefix("-").partition(" ")
        if text == "@object-format=sha256":
            continue
        if left <= 0 or not line.endswith(b"\n") or not is_hash(commit):
            raise damaged("its header is not one of ours")
        if text.startswith("-"):
            needed.append(commit)
        elif is_safe(name) and len(refs) < MOST_REFS:
            refs[name] = commit
        else:
            raise damaged("it has a ref that cannot be brought back")
    return Bundle(refs, needed)


def damaged(detail: str) -> Failure:
    hint = "bring back another: commits that are still in a sandbox are there unchanged"
    return Failure("git_bundle_damaged", "what the sandbox's git left cannot be read", detail=detail, hint=hint)


def is_safe(name: str) -> bool:
    """Whether it is a branch, a tag, the stash or HEAD, by a name that git and a terminal take for a name."""
    if name in ("HEAD", "refs/stash"):
        return True
    steps = name.split("/")
    return (
        steps[:2] in (["refs", "heads"], ["refs", "tags"])
        and 2 < len(steps) <= 20
        and len(name.encode("utf-8", "replace")) <= _LONGEST
        and name.isprintable()
        and "\ufffd" not in name
        and not _FORBIDDEN & frozenset(name)
        and ".." not in name
        and "@{" not in name
        and all(step and step[0] not in ".-" and not step.endswith((".", ".lock")) and step != "@" for step in steps)
    )


def join_lines(lines: Iterable[str]) -> bytes:
    """As git reads a list on its stdin."""
    return "".join(f"{line}\n" for line in lines).encode()


def name_locally(name: str, sandbox: str) -> str:
    """The ref's name in the project's repository: below refs/k8e/SANDBOX/."""
    return f"refs/k8e/{sandbox}/{name.removeprefix('refs/')}"


# Bundles of sandboxes that are gone: in the user's state directory, which no sandbox sees.


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Explains what the state directory cannot do."""
    try:
        yield
    except OSError as error:
        hint = "make room, make it writable for you, or name another in XDG_STATE_HOME"
        raise Failure("git_unwritable", "a sandbox's commits cannot be stored", detail=str(error), hint=hint) from error


def bundle_folder() -> str:
    folder = os.path.join(state_folder(), "git")
    os.makedirs(folder, 0o700, exist_ok=True)
    return folder


def find_bundle(sandbox: str) -> str:
    """Returns the path of the bundle that a run left; empty: there is none."""
    path = os.path.join(bundle_folder(), f"{sandbox}.bundle")
    return path if os.path.isfile(path) and not os.path.islink(path) else ""


def list_bundles() -> list[str]:
    """The sandboxes of which there are bundles, the latest first."""
    folder = bundle_folder()
    found = [name for name in os.listdir(folder) if name.endswith(".bundle") and not name.startswith(".")]
    found.sort(key=lambda name: find_time(os.path.join(folder, name)), reverse=True)
    return [name.removesuffix(".bundle") for name in found]


def remove_old() -> None:
    """Removes commits that were not asked for, after two weeks or when there are too many, and what a killed process
    left. Other processes may do the same at the same time."""
    import shutil
    import time

    folder, now = bundle_folder(), time.time()
    old = [f"{name}.bundle" for index, name in enumerate(list_bundles()) if index >= _KEPT]
    for name in os.listdir(folder):
        age = now - find_time(os.path.join(folder, name))
        if name in old or age > (86400 if name.startswith(".") else _DAYS * 86400):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def find_time(path: str) -> float:
    """When it was last changed; a file that is gone was changed long ago."""
    try:
        return os.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0
