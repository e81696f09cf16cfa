"""The files that a sandbox's copy of a repository begins with, instead of the repository's own.

Its configuration has the user's name and address, because git commits only for a user that has both, and none of the
credentials that a repository's configuration may have. In a folder of a repository, git in the sandbox is told that it
has this folder only (a sparse checkout): else every other file would be a deleted one.
"""

from __future__ import annotations

import os

from k8e.cli.agentkernel.git.repository import CONFIG, Repository, read_bytes
from k8e.profiles.options import FileCopy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INDEX = 24 << 20  # bytes of an index that is rewritten
UNKNOWN = {"name": "agentkernel", "email": "agentkernel@localhost"}
_SECRET = ("extraheader", "password", "token", "oauthtoken", "cookiefile", "sslkey", "sslcert")


def list_files(repository: Repository, cwd: str) -> list[tuple[FileCopy, bytes]] | None:
    """None: a copy of this repository would not work here."""
    own = read_bytes(f"{repository.git_dir}/config", CONFIG).decode("utf-8", "surrogateescape")
    if not own or os.lstat(f"{repository.git_dir}/config").st_uid != os.geteuid():
        return [] if repository.top == cwd else None
    files = {"config": write_config(own, find_user(os.environ), sparse=repository.top != cwd)}
    if repository.top != cwd:
        from k8e.cli.agentkernel.git.index import UnknownIndex, skip_others

        below = os.path.relpath(cwd, repository.top)
        try:
            files["index"] = skip_others(read_bytes(f"{repository.git_dir}/index", INDEX), os.fsencode(below))
        except UnknownIndex:
            return None
        files["info/sparse-checkout"] = b"/" + escape_pattern(os.fsencode(below)) + b"/\n"
    return [(FileCopy("", f"{repository.inside}/{name}"), content) for name, content in files.items()]


def write_config(own: str, user: Mapping[str, str], *, sparse: bool = False) -> bytes:
    """The user comes first: what the repository says comes after it and counts. Inside, files have other owners, and
    with gVisor other inodes: if git compared them, it would read the whole worktree once in each sandbox."""
    lines = ["[user]", *(f"\t{key} = {quote(value)}" for key, value in user.items()), *hide_secrets(own)]
    lines += ["[core]", "\tcheckStat = minimal", "\ttrustctime = false"]
    if sparse:
        lines += ["\tsparseCheckout = true", "\tsparseCheckoutCone = false"]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def hide_secrets(text: str) -> Iterator[str]:
    """Leaves out values that are secrets, and users and passwords in addresses."""
    hiding = False
    for line in text.splitlines():
        hiding = hiding or line.partition("=")[0].strip().lower() in _SECRET
        if not hiding:
            yield hide_credentials(line)
        hiding = hiding and line.endswith("\\")


def hide_credentials(line: str) -> str:
    """`https://user:password@host/` becomes `https://host/`."""
    before, mark, after = line.partition("://")
    if not mark:
        return line
    for index, letter in enumerate(after):
        if letter in '/ \t"?#':
            return f"{before}://{after[:index].rpartition('@')[2]}{hide_credentials(after[index:])}"
    return f"{before}://{after.rpartition('@')[2]}"


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
            line = line.strip()
            if line.startswith("["):
                section = line.partition("]")[0].lstrip("[").strip().lower()
            key, _, value = line.partition("=")
            if section == "user" and key.strip().lower() in UNKNOWN:
                found[key.strip().lower()] = value.strip().strip('"')
    return {key: found.get(key) or value for key, value in UNKNOWN.items()}


def quote(value: str) -> str:
    plain = "".join(letter for letter in value if letter.isprintable())
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def escape_pattern(path: bytes) -> bytes:
    return b"".join(b"\\" + bytes((byte,)) if byte in b"\\*?[]!# " else bytes((byte,)) for byte in path)
