"""What a sandbox may not change in a project that it can otherwise write: what runs on the machine, as its user,
because somebody merely opens the folder, enters it, or commits in it.

What people run knowingly (`make`, `npm test`, `pytest`) is the project's code and is not protected: it is what the
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
    "agentkernel.toml",  # ours
)

# Kept from coming into being, too: programs that many people run in every folder look here by themselves. While the
# sandbox lives an empty directory stands in for one that is missing, so there are few of them and no files.
ALWAYS = (".git", ".claude", ".codex", ".gemini", ".vscode")

# A folder with these three is a repository for git, without any .git: it obeys the `config` beside them.
REPOSITORY = ("HEAD", "objects", "refs")

# Nobody's project: a mount of these would be a mount of the machine.
SYSTEM = (
    *("/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/proc", "/root"),
    *("/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/var/lib", "/var/tmp", "/Users"),
)
NEVER_BELOW = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/usr", "/var/lib", "/var/run")


def choose_kept(names: Iterable[str]) -> tuple[str, ...]:
    """Of the names in the project's folder."""
    kept = frozenset(names) | frozenset(ALWAYS)
    return tuple(name for name in KEPT if name in kept)


def find_new(before: Iterable[str], after: Iterable[str]) -> tuple[str, ...]:
    """Protected names that were not there when a sandbox got the folder, and that nobody kept from being made."""
    old, now = frozenset(before), frozenset(after)
    new = now - old - frozenset(ALWAYS)
    found = tuple(name for name in KEPT if name in new)
    return (*found, *REPOSITORY) if is_repository(now) and not is_repository(old) else found


def is_repository(names: Iterable[str]) -> bool:
    """Whether the folder with these names is one for git, without any .git."""
    return frozenset(REPOSITORY) <= frozenset(names)
