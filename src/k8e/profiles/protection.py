"""Lists the kept parts of a project and the hidden names of a home.

Kept are files that make programs run on the machine when its user opens the folder, enters it, or commits in it.

Programs that the user runs deliberately (`make`, `npm test`, `pytest`) are not protected: they are the code that the
sandbox was asked to write. `.git` is kept as a whole: besides `hooks` and `config` a file `commondir`, a worktree or a
submodule in it leads git to another configuration, and a configuration names programs (`core.fsmonitor`) that `git
status` starts. The sandbox has a copy of its own (`PRIVATE`), from which commits are brought back when the user asks
(docs/git.md).
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

# Of these the sandbox has a copy of its own that it can change.
PRIVATE = (".git",)

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


# Credentials. The list has names, not patterns of contents: a list of names can be reviewed. A file that is not on it
# is shown, so a home is mounted only when the user asks for it (docs/agentkernel.md).

# Below the home, each with everything below it.
HIDDEN = (
    # keys and identities
    *(".ssh", ".gnupg", ".pki", ".config/age", ".config/sops", ".minisign", ".step", ".vault-token", ".config/vault"),
    # clouds and clusters
    *(".aws", ".azure", ".config/gcloud", ".config/doctl", ".config/hcloud", ".config/linode-cli", ".oci", ".aliyun"),
    *(".kube", ".config/helm", ".helm", ".terraform.d", ".terraformrc", ".pulumi", ".fly", ".config/fly", ".vercel"),
    *(".netlify", ".config/netlify", ".wrangler", ".config/.wrangler", ".databrickscfg", ".snowflake", ".s3cfg"),
    *(".config/rclone", ".boto", ".bluemix", ".config/scw", ".config/heroku", ".config/op", ".config/Bitwarden CLI"),
    # registries and forges
    *(".docker", ".config/containers", ".npmrc", ".yarnrc", ".yarnrc.yml", ".pypirc", ".config/pip", ".pip"),
    *(".netrc", "_netrc", ".authinfo", ".authinfo.gpg", ".git-credentials", ".config/git/credentials"),
    *(".config/gh", ".config/hub", ".config/glab-cli", ".config/tea", ".cargo/credentials", ".cargo/credentials.toml"),
    *(".gem/credentials", ".m2/settings.xml", ".m2/settings-security.xml", ".gradle/gradle.properties", ".composer"),
    *(".config/composer/auth.json", ".nuget", ".config/NuGet", ".hex", ".condarc", ".config/hf", ".cache/huggingface"),
    # databases
    *(".pgpass", ".my.cnf", ".mylogin.cnf", ".mongorc.js", ".dbshell", ".config/psql", ".pg_service.conf"),
    # agents, and us
    *(".claude", ".claude.json", ".codex", ".gemini", ".config/gemini", ".cursor", ".config/Cursor", ".windsurf"),
    *(".codeium", ".config/github-copilot", ".copilot", ".continue", ".aider.conf.yml", ".aider", ".config/opencode"),
    *(".local/share/opencode", ".kiro", ".config/goose", ".config/agentkernel", ".local/state/agentkernel"),
    *(".k8e", ".config/zed", ".local/share/zed", ".config/Code", ".vscode-server", ".config/JetBrains", ".ollama"),
    # browsers and mail
    *(".mozilla", ".config/google-chrome", ".config/google-chrome-beta", ".config/chromium", ".config/BraveSoftware"),
    *(".config/microsoft-edge", ".config/opera", ".config/vivaldi", ".librewolf", ".zen", ".thunderbird"),
    *("snap", ".var/app", "Library", ".config/Slack", ".config/discord", ".config/Signal", ".config/evolution"),
    *(".local/share/evolution", ".config/neomutt", ".muttrc", ".mutt", ".msmtprc", ".fetchmailrc", ".offlineimaprc"),
    # password stores and keyrings
    *(".password-store", ".local/share/gopass", ".config/gopass", ".local/share/keyrings", ".local/share/kwalletd"),
    *(".config/keepassxc", ".cache/keepassxc", ".config/Bitwarden", ".config/1Password", ".1password"),
    *(".gnome2/keyrings", ".electrum", ".bitcoin", ".ethereum", ".config/solana"),
    # what was typed
    *(".bash_history", ".zsh_history", ".histfile", ".zsh_sessions", ".local/share/fish/fish_history", ".sh_history"),
    *(".python_history", ".node_repl_history", ".irb_history", ".psql_history", ".mysql_history", ".sqlite_history"),
    *(".rediscli_history", ".lesshst", ".viminfo", ".local/state/nvim", ".local/share/nvim/shada", ".wget-hsts"),
    *(".local/share/atuin", ".local/share/mc", ".local/share/recently-used.xbel"),
    # what lets others in, or looks in
    *(".Xauthority", ".ICEauthority", ".dbus", ".vnc", ".rhosts", ".shosts", ".config/remmina", ".env", ".envrc"),
)

# Files of a project that an unknown agentkernel.toml does not get to choose.
PRIVATE_NAMES = (".env", ".envrc", ".netrc", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd")
PRIVATE_ENDINGS = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx", ".gpg", ".asc")


def is_private(path: str) -> bool:
    """Whether the name of a project's file says that it is a secret."""
    name = path.rpartition("/")[2].lower()
    if any(part in (".git", ".ssh", ".aws", ".gnupg") for part in path.split("/")):
        return True
    return name in PRIVATE_NAMES or name.startswith((".env.", "id_")) or name.endswith(PRIVATE_ENDINGS)


def is_credential_path(path: str) -> bool:
    """Whether a path below a home is hidden there, or lies below what is."""
    return any(path == hidden or path.startswith(hidden + "/") for hidden in HIDDEN)


def has_credentials(path: str) -> bool:
    """Whether something below a path of a home is hidden there."""
    return any(hidden.startswith(path + "/") for hidden in HIDDEN)
