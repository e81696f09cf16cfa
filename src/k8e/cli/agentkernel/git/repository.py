"""Finds the repository of a project, by looking at files only.

The folder may have been unpacked from anywhere, with a `.git` that names programs. So git itself is not run here: it
would read that configuration. What leads out of the folder (the `.git` file of a linked worktree or submodule) is
believed only if the repository at the other end leads back here, in a directory of its own.
"""

from __future__ import annotations

import os
import stat

from k8e.profiles.errors import ProfileError
from k8e.profiles.mounts import check_project
from k8e.profiles.protection import NEVER_BELOW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.profiles.options import Context

_HEX = frozenset("0123456789abcdef")
CONFIG = 1 << 20  # bytes of a configuration
_POINTER = 4096  # bytes of a file that leads elsewhere
_PACKED = 64 << 20
_MOST_REFS = 100_000
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# A sandbox has directories of its own there.
_OURS = (*NEVER_BELOW, "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/workspace")


class Repository:
    """`top` is the folder of its worktree, `git_dir` the directory with its objects and refs. `elsewhere`: that is not
    `.git` of the project's folder. `above`: the project is a folder of the worktree. `linked` has the HEAD and the
    index of a linked worktree."""

    def __init__(self, top: str, git_dir: str, *, elsewhere: bool, above: bool = False, linked: str = "") -> None:
        self.top = top
        self.git_dir = git_dir
        self.elsewhere = elsewhere
        self.above = above
        self.linked = linked

    @property
    def inside(self) -> str:
        """Where a sandbox has its copy of `git_dir`."""
        if not self.elsewhere:
            return "/workspace/.git"
        return f"{self.top}/.git" if self.above and not self.linked else self.git_dir

    @property
    def linked_inside(self) -> str:
        """Where a sandbox has its copy of `linked`: the `.git` file that leads there is in a folder that it does not
        have, so that git looks for a directory of this name."""
        return f"{self.top}/.git" if self.above else self.linked

    @property
    def copies(self) -> tuple[tuple[str, str], ...]:
        """The directories of which a sandbox has copies, and where, beside the project."""
        own = ((self.linked, self.linked_inside),) if self.linked and self.above else ()
        return ((self.git_dir, self.inside), *own) if self.elsewhere else ()


def find_repository(context: Context) -> Repository | None:
    """None: there is none, or none that a sandbox can have a copy of."""
    cwd = context.cwd
    if not cwd:
        return None
    entry = f"{cwd}/.git"
    if _is_own_folder(entry):
        return Repository(cwd, entry, elsewhere=False)
    found = _follow_pointer(cwd) if os.path.isfile(entry) else _find_above(context)
    return found if found is not None and all(map(_can_be_inside, (cwd, found.git_dir, found.inside))) else None


def _follow_pointer(cwd: str) -> Repository | None:
    """Follows a `.git` that is a file."""
    text = read_text(f"{cwd}/.git")
    if not text.startswith("gitdir: "):
        return None
    folder = _resolve(cwd, text.removeprefix("gitdir: "))
    common = read_text(f"{folder}/commondir")
    if common:  # a linked worktree
        back, git_dir = read_text(f"{folder}/gitdir"), _resolve(folder, common)
        is_part = os.path.dirname(folder) == f"{git_dir}/worktrees"  # else the folder could have made it
        leads_back = is_part and bool(back) and _resolve(folder, back) == f"{cwd}/.git"
    else:  # a submodule
        lines = [line.partition("=") for line in read_text(f"{folder}/config", CONFIG).splitlines()]
        named = [value for key, _, value in lines if key.strip().lower() == "worktree"]
        git_dir, leads_back = folder, [_resolve(folder, value) for value in named] == [cwd]
    is_apart = not f"{git_dir}/".startswith(f"{cwd}/")
    if not leads_back or not is_apart or not _is_own_folder(git_dir) or os.path.realpath(folder) != folder:
        return None
    return Repository(cwd, git_dir, elsewhere=True, linked=folder if common else "")


def _find_above(context: Context) -> Repository | None:
    """Looks in the folders above, as git does; not further than a project may begin."""
    top = os.path.dirname(context.cwd)
    while top != "/" and not os.path.isfile(f"{top}/.git") and not _is_own_folder(f"{top}/.git"):
        top = os.path.dirname(top)
    try:
        check_project(context.but(cwd=top, names=frozenset()))
    except ProfileError:
        return None
    git_dir, linked = f"{top}/.git", ""
    if os.path.isfile(git_dir):
        found = _follow_pointer(top)
        if found is None:
            return None
        git_dir, linked = found.git_dir, found.linked
    return Repository(top, git_dir, elsewhere=True, above=True, linked=linked) if _is_own_folder(git_dir) else None


def _resolve(folder: str, text: str) -> str:
    return os.path.normpath(os.path.join(folder, text.strip()))


def _is_own_folder(path: str) -> bool:
    """Whether it is a repository's directory of this user; git does not use another's either."""
    try:
        found, head = os.lstat(path), os.lstat(f"{path}/HEAD")
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and stat.S_ISREG(head.st_mode) and found.st_uid == os.geteuid()


def _can_be_inside(path: str) -> bool:
    return path.count("/") > 1 and not any(f"{path}/".startswith(f"{ours}/") for ours in _OURS)


def read_text(path: str, limit: int = _POINTER) -> str:
    """The text of a file, without white space around it."""
    return read_bytes(path, limit).decode("utf-8", "replace").strip()


def read_bytes(path: str, limit: int) -> bytes:
    """The content of a file; nothing if it cannot be read, is no file or is longer. No link is followed."""
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        return b""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            return b""
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
    return content if len(content) <= limit else b""


def is_hash(text: str) -> bool:
    return len(text) in (40, 64) and _HEX.issuperset(text)


def read_refs(git_dir: str) -> dict[str, str]:
    """Reads the repository's refs, as files have them: names below refs/, and commits."""
    refs: dict[str, str] = {}
    for line in read_bytes(f"{git_dir}/packed-refs", _PACKED).decode("utf-8", "replace").splitlines():
        commit, _, name = line.partition(" ")
        if is_hash(commit):
            refs[name] = commit
    for parent, _, names in os.walk(f"{git_dir}/refs"):
        for name in names[: max(0, _MOST_REFS - len(refs))]:
            path = os.path.join(parent, name)
            commit = read_text(path)
            if is_hash(commit):
                refs[os.path.relpath(path, git_dir)] = commit
    return refs
