"""Requests, built the same for both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from sandbox_client import sandbox_pb2 as pb
from sandbox_client._errors import Conflict, DeadlineExceeded, InvalidArgument

MESSAGE: Final = 64 << 20
SMALL: Final = 4 << 20  # a file up to here goes in one message
PIECE: Final = 1 << 20
# For the way there and back, on top of what the command may take.
MARGIN: Final = 30.0
CREATE_SECONDS: Final = 180.0
FILE_SECONDS: Final = 600.0

Path = str | bytes
Env = Mapping[str, str]


def set_path(
    request: pb.WriteFileRequest | pb.DownloadFileRequest | pb.ListFilesRequest | pb.GetTreeRequest | pb.UploadHeader,
    path: Path,
) -> None:
    """A path that is not UTF-8 is given as bytes."""
    if isinstance(path, bytes):
        request.path_bytes = path
    else:
        request.path = path


def build_create(
    runtime_class: str,
    allowed_hosts: Sequence[str] | None,
    tenant_id: str,
    *,
    session_id: str,
    env: Env | None,
    image: str,
    cpus: float,
    memory: int,
    disk: int,
    pids: int,
    inodes: int,
    open_files: int,
    ttl: float,
    manifest: str,
    git_repo: str,
    git_ref: str,
    persistent: bool,
    secrets: Env | None,
    labels: Mapping[str, str] | None,
    read_only: bool,
    powerless: bool,
    more_hosts: Sequence[str],
) -> pb.CreateSessionRequest:
    check_list("allowed_hosts", allowed_hosts)
    check_list("more_hosts", more_hosts)
    limits = build_limits(cpus=cpus, memory=memory, pids=pids, disk=disk, inodes=inodes, open_files=open_files)
    return pb.CreateSessionRequest(
        session_id=session_id,
        tenant_id=tenant_id,
        runtime_class=runtime_class,
        allowed_hosts=list(allowed_hosts or ()),
        # This format cannot tell an empty list from none.
        deny_all_hosts=allowed_hosts is not None and not allowed_hosts,
        env=dict(env or {}),
        image=image,
        limits=limits,
        ttl=ttl,
        manifest=manifest,
        git_repo=git_repo,
        git_ref=git_ref,
        persistent=persistent,
        secrets=dict(secrets or {}),
        labels=dict(labels or {}),
        read_only=read_only,
        powerless=powerless,
        more_hosts=list(more_hosts),
    )


def build_limits(cpus: float, **whole: int) -> pb.Limits:
    given: dict[str, object] = {"cpus": cpus, **whole}
    for field, value in given.items():
        if isinstance(value, str | bytes):  # as the command line has it
            hint = "give a number; sizes are in bytes: 300 << 20 are 300 MiB"
            raise InvalidArgument(f"{field} is a text", code="invalid_argument", field=field, hint=hint)
    return pb.Limits(cpus=cpus, **whole)


def check_list(field: str, values: Sequence[str] | None) -> None:
    """A text is a sequence of texts as well: "six" would be the three packages s, i and x."""
    if isinstance(values, str):
        hint = f"give a list: [{values!r}]"
        raise InvalidArgument(f"{field} is one text", code="invalid_argument", field=field, hint=hint)


def describe_closed() -> Conflict:
    return Conflict("the client is closed", code="client_closed", hint="make another SandboxClient")


def check_since(since: object) -> None:
    """A path is easily given in its place."""
    if isinstance(since, str | bytes):
        hint = f"list_files(session_id, path={since!r})"
        raise InvalidArgument("since is no time in seconds", code="invalid_argument", field="since", hint=hint)


def check_timeout(timeout: float) -> None:
    """Before a deadline is made of it: one that is no number, or too far away, is missed at once."""
    if not 0 <= timeout < 1e8:  # which a NaN is not
        hint = "seconds, more than 0 and at most 86400"
        raise InvalidArgument(f"timeout is {timeout}", code="invalid_argument", field="timeout", hint=hint)


def check_left(timeout: float) -> float:
    """The seconds that are left for a call about files, of those that its caller gave."""
    check_timeout(timeout)
    if not timeout:
        raise DeadlineExceeded("no time is left", code="deadline_exceeded", hint="give it a longer timeout")
    return timeout


def build_child(
    parent_session_id: str,
    agent_type: str,
    workspace_path: str,
    *,
    session_id: str,
    runtime_class: str,
    allowed_hosts: Sequence[str] | None,
    env: Env | None,
    image: str,
    cpus: float,
    memory: int,
    disk: int,
    pids: int,
    inodes: int,
    open_files: int,
    ttl: float,
    read_only: bool,
    powerless: bool,
) -> pb.RunSubAgentRequest:
    check_list("allowed_hosts", allowed_hosts)
    limits = build_limits(cpus=cpus, memory=memory, pids=pids, disk=disk, inodes=inodes, open_files=open_files)
    return pb.RunSubAgentRequest(
        parent_session_id=parent_session_id,
        agent_type=agent_type,
        workspace_path=workspace_path,
        session_id=session_id,
        runtime_class=runtime_class,
        allowed_hosts=list(allowed_hosts or ()),
        deny_all_hosts=allowed_hosts is not None and not allowed_hosts,
        env=dict(env or {}),
        image=image,
        limits=limits,
        ttl=ttl,
        read_only=read_only,
        powerless=powerless,
    )


def build_exec(
    session_id: str,
    command: str | bytes | Sequence[str | bytes],
    timeout: float,
    *,
    language: str,
    env: Env | None,
    workdir: Path,
    stdin: str | bytes = "",
    user: str = "",
    background: bool = False,
) -> pb.ExecRequest:
    """A text is code for the language; a list is a program and its arguments, without a shell."""
    check_timeout(timeout)
    request = pb.ExecRequest(
        session_id=session_id,
        timeout=timeout,
        env=dict(env or {}),
        stdin=stdin.encode() if isinstance(stdin, str) else stdin,
        background=background,
        user=user,
    )
    if isinstance(command, str):
        request.command, request.language = command, language
    elif isinstance(command, bytes):
        request.command_bytes, request.language = command, language
    else:
        request.argv.extend(word.encode() if isinstance(word, str) else word for word in command)
        if not request.argv:
            # On the wire no arguments are no list, and no code is an empty program, which would be run.
            hint = "the program is the first entry of the list"
            raise InvalidArgument("command is an empty list", code="invalid_argument", field="command", hint=hint)
    if isinstance(workdir, bytes):
        request.workdir_bytes = workdir
    else:
        request.workdir = workdir
    return request
