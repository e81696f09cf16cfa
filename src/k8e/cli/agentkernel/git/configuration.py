"""The files that a sandbox's copy of a repository begins with, instead of the repository's own.

Its configuration has the user's name and address, because git commits only for a user that has both, and none of the
credentials that a repository's configuration may have. In a folder of a repository, git in the sandbox is told that it
has this folder only (a sparse checkout): else every other file would be a deleted one.
"""

from __future__ import annotations

import os

from k8e.cli.agentkernel.git.repository import CONFIG, Repository, read_bytes, read_refs, read_text
from k8e.cli.process import Failure
from k8e.profiles.options import FileCopy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INDEX = 24 << 20  # bytes of an index that is rewritten
UNKNOWN = {"name": "agentkernel", "email": "agentkernel@localhost"}
# Ends of keys. The programs that helpers name are not inside, and may have a password in their words.
_SECRET = ("extraheader", "password", "smtppass", "token", "secret", "cookiefile", "sslkey", "sslcert", "helper")


def list_files(repository: Repository, cwd: str) -> list[tuple[FileCopy, bytes]] | None:
    """None: a copy of this repository would not work here."""
    git_dir, inside = repository.git_dir, repository.inside
    files = {f"{inside}/{name}": content for name, content in clean_others(git_dir)}
    own = read_config(f"{git_dir}/config")
    if not own or os.lstat(f"{git_dir}/config").st_uid != os.geteuid():
        return None if repository.above else list_copies(files)
    files[f"{inside}/config"] = write_config(own, find_user(os.environ), sparse=repository.above)
    if repository.above:
        from k8e.cli.agentkernel.git.index import UnknownIndex

        if repository.linked:
            files |= move_linked(repository, files)
        try:
            files |= leave_out_others(repository, os.fsencode(os.path.relpath(cwd, repository.top)))
        except UnknownIndex:
            return None
    return list_copies(files)


def list_copies(files: Mapping[str, bytes]) -> list[tuple[FileCopy, bytes]]:
    return [(FileCopy("", path), content) for path, content in files.items()]


def leave_out_others(repository: Repository, folder: bytes) -> dict[str, bytes]:
    """The files by which git knows that only this folder of the worktree is there."""
    from k8e.cli.agentkernel.git.index import skip_others

    source, inside = repository.git_dir, repository.inside
    if repository.linked:
        source, inside = repository.linked, repository.linked_inside
    return {
        f"{inside}/index": skip_others(read_bytes(f"{source}/index", INDEX), folder),
        f"{inside}/info/sparse-checkout": b"/" + escape_pattern(folder) + b"/\n",
    }


def move_linked(repository: Repository, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a linked worktree whose own directory is a copy at another path. What it is a copy of holds no
    branch: git would refuse to check that branch out a second time."""
    linked, git_dir = repository.linked, repository.git_dir
    moved = {f"{repository.linked_inside}/commondir": os.fsencode(git_dir) + b"\n"}
    changed = files.get(f"{linked}/config.worktree")
    if changed is not None:
        moved[f"{repository.linked_inside}/config.worktree"] = changed
    branch = read_text(f"{linked}/HEAD").removeprefix("ref: ")
    if commit := read_refs(git_dir).get(branch):
        moved[f"{linked}/HEAD"] = commit.encode() + b"\n"
    return moved


def clean_others(git_dir: str) -> Iterator[tuple[str, bytes]]:
    """The configurations of submodules and of worktrees that have secrets: their names below `git_dir`, and their
    content without."""
    for parent, folders, names in os.walk(git_dir):
        if parent == git_dir or {"HEAD", "config"} <= set(names):  # a repository: git keeps others in these only
            folders[:] = [name for name in folders if name in ("modules", "worktrees")]
        for name in names:
            path = os.path.join(parent, name)
            if name not in ("config", "config.worktree") or path == f"{git_dir}/config":
                continue
            own = read_config(path)
            clean = "".join(f"{line}\n" for line in hide_secrets(own))
            if clean.rstrip("\n") != own.rstrip("\n"):
                yield os.path.relpath(path, git_dir), clean.encode("utf-8", "surrogateescape")


def read_config(path: str) -> str:
    """Raises Failure where it has something that cannot be read: then it cannot be shown without its secrets."""
    own = read_bytes(path, CONFIG)
    if not own and os.path.lexists(path) and (os.path.islink(path) or os.lstat(path).st_size):
        hint = f"make it a file that you can read, of at most {CONFIG >> 20} MiB"
        raise Failure("git_config_unreadable", "a configuration of git may have credentials", detail=path, hint=hint)
    return own.decode("utf-8", "surrogateescape")


def write_config(own: str, user: Mapping[str, str], *, sparse: bool = False) -> bytes:
    """The user comes first: what the repository says comes after it and counts. Inside, files have other owners, and
    with gVisor other inodes: if git compared them, it would read the whole worktree once in each sandbox."""
    lines = ["[user]", *(f"\t{key} = {quote(value)}" for key, value in user.items()), *hide_secrets(own)]
    lines += ["[core]", "\tcheckStat = minimal", "\ttrustctime = false"]
    if sparse:
        lines = [line for line in lines if line.partition("=")[0].strip().lower() != "worktree"]  # of a submodule
        lines += ["\tsparseCheckout = true", "\tsparseCheckoutCone = false"]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def hide_secrets(text: str) -> Iterator[str]:
    """Leaves out values that are secrets, and users and passwords in addresses. Of a line that begins with the name of
    a section, that name stays."""
    hiding = False
    for line in text.removeprefix("\ufeff").removesuffix("\n").split("\n"):
        end = 0 if hiding else find_section_end(line)
        hiding = hiding or is_secret(line[end:])
        if not hiding:
            yield hide_credentials(line)
        elif end:
            yield hide_credentials(line[:end])
        hiding = hiding and line.rstrip("\r").endswith("\\")


def is_secret(text: str) -> bool:
    """Also of one that is commented out."""
    key, mark, value = text.partition("=")
    key = key.strip(" \t\r#;").lower()
    if not mark or not key.isalnum():  # keys have hyphens, too: none of these
        return False
    return key.endswith(_SECRET) or (key.endswith("proxy") and "@" in value)


def find_section_end(line: str) -> int:
    """Returns where the names of sections that a line begins with end; 0: it begins with none."""
    end = index = 0
    while index < len(line) and line[index] in " \t\r[":
        if line[index] == "[":
            quoted = False
            while index < len(line) and (quoted or line[index] != "]"):
                quoted ^= line[index] == '"'
                index += 2 if quoted and line[index] == "\\" else 1
            end = index + 1
        index += 1
    return end


def hide_credentials(line: str) -> str:
    """`https://user:password@host/` becomes `https://host/`."""
    first, *others = line.split("://")
    for index, after in enumerate(others):
        end = next((place for place, letter in enumerate(after) if letter in '/ \t"?#'), len(after))
        others[index] = after[:end].rpartition("@")[2] + after[end:]
    return "://".join((first, *others))


def find_user(environ: Mapping[str, str]) -> dict[str, str]:
    """The name and the address that the user's own configuration of git has."""
    home = environ.get("HOME", "")
    own = environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    paths = (
        [environ["GIT_CONFIG_GLOBAL"]]
        if environ.get("GIT_CONFIG_GLOBAL")
        else [f"{own}/git/config", f"{home}/.gitconfig"]
    )
    found: dict[str, str] = {}
    for path in paths:
        section = ""
        for line in read_bytes(os.path.realpath(path), CONFIG).decode("utf-8", "replace").splitlines():
            end = find_section_end(line)
            if end:
                section = line[:end].rpartition("[")[2].strip("] \t").lower()
            key, _, value = line[end:].partition("=")
            if section == "user" and key.strip().lower() in UNKNOWN:
                found[key.strip().lower()] = read_value(value)
    return {key: found.get(key) or value for key, value in UNKNOWN.items()}


def read_value(text: str) -> str:
    """The value that git has of the text behind a `=`: without quotes, escapes and comments."""
    value, quoted, end = "", False, 0  # `end`: spaces at the end count in quotes only
    letters = iter(text.strip())
    for letter in letters:
        if letter == '"':
            quoted = not quoted
        elif letter in "#;" and not quoted:
            break
        else:
            value += next(letters, "") if letter == "\\" else letter
        if quoted or not letter.isspace():
            end = len(value)
    return value[:end]


def quote(value: str) -> str:
    plain = "".join(letter for letter in value if letter.isprintable())
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def escape_pattern(path: bytes) -> bytes:
    return b"".join(b"\\" + bytes((byte,)) if byte in b"\\*?[]!# " else bytes((byte,)) for byte in path)
