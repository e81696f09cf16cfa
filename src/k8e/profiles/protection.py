"""Lists the parts of a writable project that a sandbox may not change: files that make programs run on the machine when
its user opens the folder, enters it, or commits in it.

Programs that the user runs deliberately (`make`, `npm test`, `pytest`) are not protected: they are the code that the
sandbox was asked to write. `.git` is kept as a whole: besides `hooks` and `config` a file `commondir`, a worktree or a
submodule in it leads git to another configuration, and a configuration names programs (`core.fsmonitor`) that `git
status` starts. Commits are made outside, as the skill says.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

KEPT = (
    ".git",
    ".husky",  # hooks that git is pointed to
    ".pre-commit-config.yaml",
    "lefthook.yml",
    ".envrc",  # direnv
    ".vscode",  # tasks that run when the folder is opened
    ".idea",
    ".devcontainer",  # initializeCommand runs on the machine
    ".claude",  # hooks and permissions of agents that run on the machine
    ".mcp.json",
    ".codex",
    ".gemini",
    ".cursor",
    ".kiro",
    "agentkernel.toml",  # agentkernel itself
)

# Kept also when they are missing: programs that many users run in every folder look for them. While the sandbox lives
# an empty directory stands in for a missing one, so the list is short and has no files.
ALWAYS = (".git", ".claude", ".codex", ".gemini", ".vscode")

# git takes a folder with these three for a repository, without a .git, and obeys the `config` beside them.
REPOSITORY = ("HEAD", "objects", "refs")

# Not a project: mounting one of these would mount the machine.
SYSTEM = (
    *("/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root"),
    *("/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/var/lib", "/var/tmp", "/Users"),
)
NEVER_BELOW = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/usr", "/var/lib", "/var/run")


def choose_kept(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names to keep, of those in the project's folder."""
    kept = frozenset(names) | frozenset(ALWAYS)
    return tuple(name for name in KEPT if name in kept)


def find_new(before: Iterable[str], after: Iterable[str]) -> tuple[str, ...]:
    """Returns the protected names that were made while the sandbox had the folder."""
    old, now = frozenset(before), frozenset(after)
    new = now - old - frozenset(ALWAYS)
    found = tuple(name for name in KEPT if name in new)
    return (*found, *REPOSITORY) if is_repository(now) and not is_repository(old) else found


def is_repository(names: Iterable[str]) -> bool:
    """Whether git takes a folder with these names for a repository, without a .git."""
    return frozenset(REPOSITORY) <= frozenset(names)
