"""Failures of a connection to the daemon: it cannot be reached, went away, is silent, or sends nonsense.

Imported only then, and for JSON. A command may be silent for hours, so silence on its connection says nothing by
itself: a second connection asks for `/healthz`, which a daemon answers at once whatever its sandboxes do.
"""

from __future__ import annotations

from k8e.cli.client import find_patience, run_dir
from k8e.cli.process import FAILED, UNREACHABLE, Failure, ServiceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from typing import Any

PROBE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
OFTEN = 6  # times in a row; after that, one silence in six is looked into: an agent's connection is quiet for days
NO_DAEMON = (FileNotFoundError, ConnectionRefusedError, PermissionError)
OUTQ = 0x5411  # ioctl: how many of the sent bytes the peer has not read


def check_presence(connection: socket, times: int, *, harmless: bool) -> None:
    """Called after each silence on this connection, the `times`-th in a row. Raises Failure when the daemon is silent
    on a second connection too. `harmless`: the request changes nothing."""
    if times > OFTEN and times % OFTEN:
        return
    answered = probe(find_daemon(connection))
    if answered or (answered is None and times <= OFTEN):
        return
    raise silent(connection, harmless=harmless)


def probe(daemon: int) -> bool | None:
    """Whether the daemon answers. None: another daemon, or none, is at its socket; the first one may be about to end,
    and may still finish the request."""
    from _socket import AF_UNIX, SOCK_STREAM, socket

    from k8e.cli.client.http import set_patience

    other = socket(AF_UNIX, SOCK_STREAM)
    try:
        set_patience(other, find_patience() * 2 / 3)
        other.connect(run_dir() + "/k8e.sock")
        if find_daemon(other) != daemon:
            return None
        other.send(PROBE)
        return bool(other.recv(64))
    except NO_DAEMON:
        return None
    except OSError:
        return False
    finally:
        other.close()


def find_daemon(connection: socket) -> int:
    """The daemon's process id, as the kernel knows it; 0 when it is unknown."""
    from _socket import SO_PEERCRED, SOL_SOCKET

    try:
        return int.from_bytes(connection.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)[:4], "little")
    except OSError:
        return 0


def was_read(connection: socket) -> bool:
    """Whether the daemon has read all that we sent. What it has not read, it drops when it finds us gone."""
    import fcntl

    try:
        left = fcntl.ioctl(connection.fileno(), OUTQ, bytes(4))
    except OSError:
        return True
    return not any(left)


def silent(connection: socket, *, harmless: bool) -> Failure:
    pid = find_daemon(connection)
    nothing = harmless or not was_read(connection)
    done = "nothing was done" if nothing else "what you asked for may have been done: `k8e sandbox log SESSION`"
    end = f"root ends it (`kill -9 {pid}`)" if pid else "root ends it"
    return Failure(
        "daemon_silent",
        "the daemon does not answer",
        detail=f"pid {pid or 'unknown'} has said nothing for {find_patience():g} seconds, on two connections",
        hint=f"{done}; if it stays silent, {end}: sandboxes live on, and the next command starts another",
        status=UNREACHABLE if nothing else FAILED,
    )


def not_connected(path: str, error: OSError) -> Failure:
    if isinstance(error, BlockingIOError):
        return crowded(path)
    if isinstance(error, PermissionError):
        return Failure(
            "daemon_not_allowed",
            "you may not use the daemon of this machine",
            detail=f"{path}: {error.strerror}",
            hint=suggest_group(),
            status=UNREACHABLE,
        )
    return Failure(
        "daemon_unreachable",
        "the daemon cannot be reached",
        detail=f"{path}: {error.strerror or error}",
        hint="`sudo k8e server` runs it in the foreground and says what is wrong",
        status=UNREACHABLE,
    )


def no_gateway() -> Failure:
    hint = "`connect HOST:PORT`, with an API key of that gateway; or --endpoint and --apikey"
    return Failure("no_gateway", "no gateway is known, and this program has no daemon", hint=hint, status=UNREACHABLE)


def suggest_group() -> str:
    """The daemon gives its socket to the group k8e when it starts, if there is that group then."""
    import grp

    join = "`sudo usermod -aG k8e USER`, then log in again"
    try:
        grp.getgrnam("k8e")
    except KeyError:
        return f"use sudo; or root makes the group k8e (`sudo groupadd --system k8e`, {join}) and restarts the daemon"
    return f"ask to be added to the group k8e ({join}), or use sudo"


def crowded(path: str) -> Failure:
    """The queue of the socket is full, and the daemon accepts no connection from it."""
    return Failure(
        "daemon_silent",
        "the daemon does not answer",
        detail=f"{path}: it took no new connection for {find_patience():g} seconds",
        hint="nothing was done; if it stays silent, root restarts it: sandboxes live on",
        status=UNREACHABLE,
    )


def lost(error: OSError | None = None, *, nothing: bool = False) -> Failure:
    """`nothing`: the daemon has certainly done nothing."""
    known = "nothing was done: try again"
    unknown = "a command that was running may still be: `k8e sandbox log SESSION` lists them"
    return Failure(
        "connection_lost",
        "the daemon went away before it had answered",
        detail=str(error or ""),
        hint=known if nothing else unknown,
        status=UNREACHABLE if nothing else FAILED,
    )


def nonsense(cause: str) -> Failure:
    return Failure(
        "answer_unusable",
        "what answers at the daemon's socket does not speak as this version of k8e does",
        detail=f"{run_dir()}/k8e.sock: {cause}",
        hint="a daemon of another version is to be restarted (sandboxes live on); or something else is at its socket",
    )


class Members(dict["str", "Any"]):
    def __missing__(self, key: str) -> Any:
        raise nonsense(f"an object without {key!r}")


def parse_object(text: bytes) -> dict[str, Any]:
    """Parses one JSON object. A member that it lacks is nonsense once it is looked up."""
    import json

    try:
        found = json.loads(text, object_pairs_hook=Members)
    except (ValueError, RecursionError) as error:
        raise nonsense(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise nonsense("JSON, but no object")
    return found


def read_error(text: bytes) -> Failure:
    """The error that the service answered, with every member it has."""
    more = parse_object(text)
    body = {name: more.pop(name, "") for name in ("code", "error", "detail", "hint")}
    if not body["code"] or not all(isinstance(value, str) for value in body.values()):
        return nonsense("an error without a code")
    return ServiceError(**body, more=more)
