"""`k8e sandbox run`: its options, and the run. Imports only what it uses on its way (see k8e.cli).

One table has the options. argparse reads it (arguments.py), and so does `read_plainly`, without imports: it takes only
what it understands completely and leaves anything else to argparse, which also words the errors.
tests/cli/test_options.py shows that the two agree.
"""

from __future__ import annotations

import os

from k8e.cli.client import SessionName, open_client
from k8e.cli.process import FAILED, Failure, ServiceError, is_for_person, read_all, want_json, write_all
from k8e.cli.state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    from k8e.cli.client.service import RunStream, Service

MESSAGE = 64 << 20
STDIN_IN_JSON = 46 << 20  # base64 takes a third more, and the rest of a message has to fit as well
STDERR = 2
GONE = ("session_not_found", "session_destroying")
LANGUAGES = {"bash": "bash", "python": "python", "node": "node", "js": "node", "ts": "ts"}
LONGEST = 86_400.0  # seconds of a command


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
        self.json = False
        self.background = False
        self.stdin = False
        self.interactive = False
        self.user = ""
        self.env: list[str] = []
        self.workdir = ""
        self.manifest = ""
        self.git_repo = ""
        self.git_ref = ""
        self.allowed_hosts: list[str] = []


def read_timeout(text: str) -> float:
    """30, 0.5, 90s, 15m, 1h."""
    if text[-1:] in ("s", "m", "h", "d"):
        from k8e.cli.values import read_span

        seconds = read_span(text)
    else:
        seconds = float(text)
    if not 0 < seconds <= LONGEST:
        raise ValueError(text)
    return seconds


def read_language(text: str) -> str:
    if text not in LANGUAGES:
        raise ValueError(text)
    return LANGUAGES[text]


# What reads the value (None: a flag; list: may come several times), what it is called, what it is for.
OPTIONS: dict[str, tuple[Callable[[str], object] | None, str, str]] = {
    "--lang": (read_language, "LANG", "bash, python, node (or js) or ts; default: bash"),
    "--session-id": (str, "SID", "run in this session, made with `k8e sandbox create`"),
    "--tenant": (str, "NAME", "run in the session that is remembered for this tenant, in every shell and process"),
    "--tenant-id": (str, "NAME", "with --session-id: the session of this tenant, where several have the id"),
    "--owner": (str, "UID", "with --session-id: the session of this owner: a user of the machine, or gateway"),
    "--timeout": (
        read_timeout,
        "TIME",
        "end the command after that long, with exit code 124: 90, 90s, 15m, 1h; more than 0, at most 1d; default: 30",
    ),
    "--raw": (
        None,
        "",
        "stream stdout and stderr as they come, byte for byte, instead of JSON; the default at a terminal",
    ),
    "--json": (None, "", "print JSON, as in a pipe, at a terminal too"),
    "--background": (None, "", "do not wait; prints a run_id for `k8e sandbox poll`"),
    "--stdin": (None, "", "hand our standard input to the command; the code is then an argument"),
    "--user": (str, "USER", "run as this user of the sandbox, such as root or 1000; default: its own"),
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


def run_parsed(parsed: argparse.Namespace) -> int:
    from k8e.cli.arguments import take_over

    return run(take_over(parsed, RunOptions()))


def run(options: RunOptions) -> int:
    if options.interactive:
        options.stdin = options.raw = True
    check_combination(options)
    if options.json:
        want_json()
    elif not options.background and is_for_person():
        options.raw = True
    wanted = describe_run(options)
    stdin = read_all(0, STDIN_IN_JSON) if options.stdin and not options.raw else b""
    client = open_client()
    if options.session_id:
        session = SessionName(options.session_id, options.tenant_id, options.owner)
        has_hosts(client, options, session)  # if there is no such session, the run says so
        return execute(client, options, session, wanted, stdin)
    state = State(options.tenant, client.place)
    named = state.read()
    if named and not describes_session(options) and has_hosts(client, options, SessionName(named)):
        try:
            return execute(client, options, SessionName(named), wanted, stdin)
        except ServiceError as error:
            if error.code not in GONE:
                raise
    # Nothing has run so far: there was no session to run it in.
    from k8e.cli.sandbox.default_session import renew

    return execute(client, options, SessionName(renew(client, options, state, gone=named)), wanted, stdin)


def check_combination(options: RunOptions) -> None:
    if options.session_id and options.tenant:
        hint = "--session-id for a session of `create`, --tenant for the one that a name stands for"
        raise Failure("usage", "--session-id and --tenant both name a session: give one of them", hint=hint)
    if (options.tenant_id or options.owner) and not options.session_id:
        hint = "--tenant NAME is for the session that a name stands for"
        raise Failure("usage", "--tenant-id and --owner say whose session --session-id means", hint=hint)
    if options.session_id and describes_session(options):
        error = "--manifest and --git-repo describe a new session, --session-id names one that is there"
        raise Failure("usage", error, hint="give them to `k8e sandbox create`")
    if options.background and options.raw:
        error = "--background does not wait for the output that --raw streams: give one of them"
        raise Failure("usage", error, hint="--background alone; `k8e sandbox logs RUN-ID --follow` shows its output")
    if options.json and options.raw:
        error = "--json and --raw are two forms of the output: give one of them"
        raise Failure("usage", error, hint="--raw for the bytes, --json for exit code and status with them")
    if options.stdin and options.code is None:
        error = "--stdin is for the command's input: give the code as an argument"
        raise Failure("usage", error, hint="k8e sandbox run 'tar xz' --stdin < FILE")


def describes_session(options: RunOptions) -> bool:
    return bool(options.manifest or options.git_repo or options.git_ref)


def has_hosts(client: Service, options: RunOptions, session: SessionName) -> bool:
    if not options.allowed_hosts:
        return True
    from k8e.cli.sandbox.default_session import check_hosts

    return check_hosts(client, options.allowed_hosts, session)


def describe_run(options: RunOptions) -> dict[str, Any]:
    # What is read from stdin is decoded as arguments are.
    code = options.code if options.code is not None else os.fsdecode(read_all(0, MESSAGE))
    wanted: dict[str, Any] = {"code": code, "language": options.lang, "timeout": options.timeout}
    if options.env:
        from k8e.cli.values import read_env

        wanted["env"] = read_env(options.env)
    if options.workdir:
        wanted["workdir"] = options.workdir
    if options.background:
        wanted["background"] = True
    if options.user:
        wanted["user"] = options.user
    return wanted


def execute(client: Service, options: RunOptions, session: SessionName, wanted: dict[str, Any], stdin: bytes) -> int:
    """Sends the run once, and prints what comes of it. Raises ServiceError if nothing was run."""
    if options.raw:
        return follow(client.stream_run(session, wanted, feeds=options.stdin), feeds=options.stdin)
    answer = client.run(session, wanted, stdin)
    if is_for_person():
        from k8e.cli.view import show

        show(answer)
    else:
        write_all(1, answer.text)
    if options.background:
        return 0
    return FAILED if answer.exit_code is None else answer.exit_code


def follow(stream: RunStream, *, feeds: bool) -> int:
    if feeds:
        from _thread import start_new_thread

        start_new_thread(stream.feed, (0,))
    try:
        for descriptor, data in stream.output():
            write_all(descriptor, data)
    except Failure as failure:
        from k8e.cli.view import show_error

        failure.more.setdefault("run_id", stream.run_id)
        show_error(failure.body, STDERR)  # stdout is the command's
        return failure.status
    result = stream.result
    if reason := result.reason:
        write_all(STDERR, f"k8e: {reason}\n".encode())
    if b'"denied": []' not in result.text:
        from k8e.cli.denials import list_denials

        write_all(STDERR, "".join(f"k8e: {line}\n" for line in list_denials(result.parse())).encode())
    return FAILED if result.exit_code is None else result.exit_code
