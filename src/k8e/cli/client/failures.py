"""What is wrong with the daemon at the other end of a connection: it went away, it is silent, or it talks nonsense.

Loaded only then. A command may be silent for hours, so silence on its connection says nothing by itself: a second
connection asks for `/healthz`, which a daemon answers at once whatever its sandboxes do.
"""

from __future__ import annotations

import errno
import fcntl
from _socket import AF_UNIX, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

from k8e.cli.client.http import find_patience, run_dir, set_patience
from k8e.cli.process import FAILED, UNREACHABLE, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PROBE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
OFTEN = 6  # times in a row; after that, one silence in six is looked into: an agent's connection is quiet for days
PLACES = (errno.ENOENT, errno.ECONNREFUSED, errno.EACCES)
OUTQ = 0x5411  # ioctl: how much of what was sent the other end has not read


def check_presence(connection: socket, times: int, *, harmless: bool) -> None:
    """After another silence on this connection, the `times`-th in a row. Raises Failure when the daemon is silent too.
    `harmless`: what was asked for changes nothing."""
    if times > OFTEN and times % OFTEN:
        return
    answered = probe(find_daemon(connection))
    if answered or (answered is None and times <= OFTEN):
        return
    raise silent(connection, harmless=harmless)


def probe(daemon: int) -> bool | None:
    """Whether the daemon answers. None: another one, or none, is at its socket; it may be about to end, and finish what
    it was asked before that."""
    other = socket(AF_UNIX, SOCK_STREAM)
    try:
        set_patience(other, find_patience() * 2 / 3)
        other.connect(run_dir() + "/k8e.sock")
        if find_daemon(other) != daemon:
            return None
        other.send(PROBE)
        return bool(other.recv(64))
    except OSError as error:
        return None if error.errno in PLACES else False
    finally:
        other.close()


def find_daemon(connection: socket) -> int:
    """Its process id, as the kernel noted it; 0 when it is not known."""
    try:
        return int.from_bytes(connection.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)[:4], "little")
    except OSError:
        return 0


def was_read(connection: socket) -> bool:
    """Whether the daemon has taken all that we sent. What it has not taken, it drops when it finds us gone."""
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


def crowded(path: str) -> Failure:
    """The daemon took no connection from its queue, and the queue is full."""
    return Failure(
        "daemon_silent",
        "the daemon does not answer",
        detail=f"{path}: it took no new connection for {find_patience():g} seconds",
        hint="nothing was done; if it stays silent, root restarts it: sandboxes live on",
        status=UNREACHABLE,
    )


def lost(error: OSError | None = None, *, nothing: bool = False) -> Failure:
    """`nothing`: it is known that nothing was done."""
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


class Answer(dict["str", "Any"]):
    def __missing__(self, key: str) -> Any:
        raise nonsense(f"an object without {key!r}")


def parse_answer(content: bytes) -> dict[str, Any]:
    """The object that an answer is. A member that is not there is nonsense when it is asked for."""
    import json

    try:
        found = json.loads(content, object_pairs_hook=Answer)
    except (ValueError, RecursionError) as error:
        raise nonsense(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise nonsense("JSON, but no object")
    return found
