"""What `k8e sandbox run` can be told. One table, read by argparse (arguments.py) and by a plain reader without imports.

The plain reader takes only what it understands completely; anything else (abbreviations are not among it, nobody takes
those) it leaves to argparse, which also words the errors. tests/cli/test_options.py shows that the two agree.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LANGUAGES = ("bash", "python", "node", "ts")


class RunOptions:
    def __init__(self) -> None:
        self.code: str | None = None
        self.lang = "bash"
        self.session_id = ""
        self.tenant = ""
        self.tenant_id = ""
        self.owner = ""
        self.timeout = 30.0
        self.raw = False
        self.background = False
        self.stdin = False
        self.env: list[str] = []
        self.workdir = ""
        self.manifest = ""
        self.git_repo = ""
        self.git_ref = ""
        self.allowed_hosts: list[str] = []


def read_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError(text)
    return value


def read_language(text: str) -> str:
    if text not in LANGUAGES:
        raise ValueError(text)
    return text


# What reads the value (None: a flag; list: may come several times), what it is called, what it is for.
OPTIONS: dict[str, tuple[Callable[[str], object] | None, str, str]] = {
    "--lang": (read_language, "LANG", "bash, python, node or ts; default: bash"),
    "--session-id": (str, "SID", "run in this session, made with `k8e sandbox create`"),
    "--tenant": (str, "NAME", "run in the session that this name stands for, in every shell and process"),
    "--tenant-id": (str, "NAME", "whose session --session-id means, where several have one of that name"),
    "--owner": (str, "UID", "the same: a user of the machine, or gateway"),
    "--timeout": (read_seconds, "SECONDS", "end the command after that long, with exit code 124; default: 30"),
    "--raw": (None, "", "stream stdout and stderr as they come, byte for byte, instead of printing JSON"),
    "--background": (None, "", "do not wait; prints a run_id for `k8e sandbox poll`"),
    "--stdin": (None, "", "hand our standard input to the command; the code is then an argument"),
    "--env": (list, "NAME=VALUE", "a variable for this command; may be given several times"),
    "--workdir": (str, "DIR", "where the command starts; default: /workspace"),
    "--manifest": (str, "FILE", "YAML with files, directories and repositories for a new session"),
    "--git-repo": (str, "URL", "clone this into a new session"),
    "--git-ref": (str, "REF", "the branch, tag or commit of --git-repo"),
    "--allowed-hosts": (
        list,
        "HOSTS",
        "what a new session may reach, instead of the usual; commas between, '' is nothing",
    ),
}


def read_plainly(words: list[str]) -> RunOptions | None:
    """The options, or None when argparse should look at it."""
    options = RunOptions()
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-"):
            if options.code is not None:
                return None
            options.code = word
            continue
        name, equals, value = word.partition("=")
        if name not in OPTIONS:
            return None
        read = OPTIONS[name][0]
        attribute = name[2:].replace("-", "_")
        if read is None:
            if equals:
                return None
            setattr(options, attribute, True)
            continue
        if not equals:
            value = next(remaining, "-")
            if value.startswith("-"):
                return None
        if read is list:
            getattr(options, attribute).append(value)
            continue
        if not value:
            return None
        try:
            setattr(options, attribute, read(value))
        except ValueError:
            return None
    return options
