"""The commands of `k8e sandbox` about sessions, their runs and their files: one request each, and its answer."""

from __future__ import annotations

import os

from k8e.cli.client import SessionName, open_client
from k8e.cli.process import UNREACHABLE, Failure, ServiceError, read_some, write_all
from k8e.cli.run import MESSAGE
from k8e.cli.state import State
from k8e.cli.values import read_env, split_hosts
from k8e.cli.view import show, show_error, show_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any, Protocol

    class Content(Protocol):
        manifest: str
        git_repo: str
        git_ref: str


SMALL = 4 << 20  # bytes of a file that goes in one message


def name_session(options: argparse.Namespace) -> SessionName:
    return SessionName(options.sid, options.tenant_id, options.owner)


def describe_content(options: Content) -> dict[str, Any]:
    """The files and the repository that a session is created with."""
    if options.git_ref and not options.git_repo:
        raise Failure("usage", "--git-ref is given without --git-repo", hint="--git-repo URL --git-ref REF")
    wanted: dict[str, Any] = {}
    if options.manifest:
        wanted["manifest"] = read_manifest(options.manifest)
    if options.git_repo:
        wanted["git_repo"] = options.git_repo
    if options.git_ref:
        wanted["git_ref"] = options.git_ref
    return wanted


def read_manifest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MESSAGE + 1)
        content.decode()
    except (OSError, UnicodeDecodeError) as error:
        hint = "--manifest takes a YAML file"
        raise Failure("manifest_unreadable", "the manifest cannot be read", detail=str(error), hint=hint) from error
    if len(content) > MESSAGE:
        raise Failure(
            "message_too_large",
            f"{path} has more than {MESSAGE} bytes",
            hint="put large files there with `k8e sandbox cp`",
        )
    return os.fsdecode(content)  # as arguments are, because it travels with them


def create(options: argparse.Namespace) -> int:
    wanted = describe_content(options) | describe_sandbox(options)
    own = {
        "tenant_id": options.tenant,
        "secrets": read_secrets(options.secret),
        "persistent": options.persistent,
    }
    wanted.update({name: value for name, value in own.items() if value})
    return show(open_client().create_session(wanted))


def describe_sandbox(options: argparse.Namespace) -> dict[str, Any]:
    """The members that a session and a child have in common."""
    limits = {name: getattr(options, name) for name in ("cpus", "memory", "disk")}
    given = {
        "session_id": options.session_id,
        "runtime": options.runtime,
        "image": options.image,
        "env": read_env(options.env),
        "limits": {name: value for name, value in limits.items() if value is not None},
    }
    wanted = {name: value for name, value in given.items() if value}
    if options.ttl is not None:
        wanted["ttl"] = options.ttl
    if options.allowed_hosts:
        wanted["allowed_hosts"] = split_hosts(options.allowed_hosts)
    return wanted


def subagent(options: argparse.Namespace) -> int:
    wanted = describe_sandbox(options)
    if options.secret:  # no variable of a child is ever kept on a disk
        wanted["env"] = {**wanted.get("env", {}), **read_secrets(options.secret)}
    for name in ("agent_type", "workspace_path", "read_only", "powerless"):
        if value := getattr(options, name):
            wanted[name] = value
    parent = SessionName(options.parent, options.tenant_id, options.owner)
    return show(open_client().create_child(parent, wanted))


def read_secrets(names: list[str]) -> dict[str, str]:
    """Takes values from our own environment: other users can see a command line."""
    for name in names:
        if "=" in name:  # which is not repeated: the rest of it may be a secret
            raise Failure("usage", "--secret takes a NAME alone", hint="the value is that of our own variable NAME")
        if name not in os.environ:
            hint = f"export {name}, or put it before the command; the value does not stand on the command line"
            raise Failure("secret_not_set", f"--secret {name}: there is no variable of that name here", hint=hint)
    return {name: os.environ[name] for name in names}


def stop(options: argparse.Namespace) -> int:
    return show(open_client().stop_session(name_session(options)))


def start(options: argparse.Namespace) -> int:
    given = {"env": read_env(options.env), "secrets": read_secrets(options.secret)}
    wanted = {name: value for name, value in given.items() if value}
    return show(open_client().start_session(name_session(options), wanted))


def get(options: argparse.Namespace) -> int:
    return show(open_client().get_session(name_session(options)))


def allow_hosts(options: argparse.Namespace) -> int:
    """Prints the list of hosts that is in force, after changing it if that was asked for."""
    change: dict[str, Any] = {
        name: split_hosts(values)
        for name in ("add", "remove", "hosts")
        if (values := getattr(options, name)) is not None
    }
    if options.clear:
        change["clear"] = True
    if not change:
        return show(open_client().get_hosts(name_session(options)))
    if len(change) > 1 and set(change) != {"add", "remove"}:
        error = "--hosts and --clear stand alone; only --add and --remove can be given together"
        raise Failure("usage", error, hint="k8e sandbox allow-hosts SID --hosts a.example,b.example")
    return show(open_client().change_hosts(name_session(options), change))


def list_sessions(options: argparse.Namespace) -> int:
    return show(open_client().list_sessions(options.phase, options.tenant_id, options.owner), "sessions")


def write(options: argparse.Namespace) -> int:
    """A small file is read to its end first: a slow program before us in a pipe keeps no request open."""
    begun: list[bytes] = []
    while sum(map(len, begun)) < SMALL and (piece := read_some(0)):
        begun.append(piece)
    session, client = name_session(options), open_client()
    if sum(map(len, begun)) < SMALL:
        return show(client.write_file(session, options.path, b"".join(begun), options.mode))
    return show(client.write_pieces(session, options.path, take_stdin(begun), mode=options.mode))


def take_stdin(begun: list[bytes]) -> Iterator[bytes]:
    while begun:
        yield begun.pop(0)
    while piece := read_some(0):
        yield piece


def read(options: argparse.Namespace) -> int:
    session, (offset, length) = name_session(options), options.range or (0, None)
    if not options.raw:
        return show(open_client().read_file(session, options.path, offset, length))
    begun = False
    try:
        for piece in open_client().read_pieces(session, options.path, offset, length):
            write_all(1, piece)
            begun = True
    except Failure as failure:
        if not begun:
            raise
        show_error(failure.body, 2)  # stdout has a part of the file
        return failure.status
    return 0


def list_files(options: argparse.Namespace) -> int:
    return show(open_client().list_files(name_session(options), options.path, options.since), "files")


def status(options: argparse.Namespace) -> int:
    """Scripts ask this first: the keys are there whatever is wrong."""
    answer: dict[str, Any] = {"available": False, "session_id": None, "tenant_id": State(options.tenant).tenant}
    try:
        client = open_client()
        answer["session_id"] = State(options.tenant, client.place).read() or None
        service = client.status().parse()
    except Failure as failure:
        show_value(answer | failure.body)
        return failure.status
    if answer["session_id"]:
        try:
            phase = client.get_session(SessionName(answer["session_id"])).parse()["phase"]
        except ServiceError:
            phase = ""
        if phase != "active":
            answer["session_id"] = None
    show_value(answer | service)
    return 0 if service["available"] else UNREACHABLE


def poll(options: argparse.Namespace) -> int:
    return show(open_client().get_run(options.run_id))


def kill(options: argparse.Namespace) -> int:
    return show(open_client().kill_run(options.run_id))


def ps(options: argparse.Namespace) -> int:
    return show(open_client().list_processes(name_session(options)), "processes")


def log(options: argparse.Namespace) -> int:
    return show(open_client().list_runs(name_session(options)), "runs")
