"""The daemon on demand: the first command that finds no daemon starts it, detached, once."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import time
from _thread import start_new_thread
from pathlib import Path

from k8e.cli.client import find_patience
from k8e.cli.client.failures import crowded, not_connected
from k8e.cli.client.http import set_patience
from k8e.cli.process import UNREACHABLE, Failure

LOOK = 0.02
PATIENCE = 60.0  # for a daemon that recovers what a crash left behind
# All that the daemon gets of our environment: it outlives us and works for other users, so nothing of ours may leak.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "K8E_STATE_DIR", "K8E_RUN_DIR", "K8E_CONFIG")


def start_daemon(path: str) -> socket.socket:
    """Returns a connection to the daemon. Of several commands that find no daemon at once, one starts it."""
    if os.geteuid() != 0:
        raise Failure(
            "daemon_not_running",
            "the daemon does not run, and only root can start it",
            detail=path,
            hint="`sudo systemctl start k8e`, or `sudo k8e server` in another terminal",
            status=UNREACHABLE,
        )
    from k8e.daemon.paths import Paths, StartRefused

    try:
        paths = Paths.from_environment()
        paths.prepare()
    except StartRefused as refused:
        raise Failure(
            refused.code, refused.error, detail=refused.detail, hint=refused.hint, status=UNREACHABLE
        ) from refused
    # Only root can open it: who holds a lock on it keeps the daemon from being started.
    with open(paths.run_dir / "start.lock", "w", opener=open_private) as lock:
        wait_for_turn(lock.fileno(), path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        set_patience(connection, find_patience())
        try:
            connection.connect(path)  # another command was faster
            return connection
        except OSError:
            pass
        spawn(paths.log)
        try:
            connection.connect(path)
        except OSError as error:
            raise not_connected(path, error) from error
        return connection


def wait_for_turn(lock: int, path: str) -> None:
    """The holder of the lock starts the daemon, which may take its time, and may hang."""
    deadline = time.monotonic() + PATIENCE + find_patience()
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise crowded(path) from None
            time.sleep(LOOK)


def spawn(log: Path) -> None:
    """Starts the daemon, and returns when it listens."""
    ours, theirs = os.pipe()
    # -P, because the directory a person happens to stand in is no place to import root's modules from.
    command = [sys.executable, "-P", "-m", "k8e.daemon", "--ready-fd", str(theirs)]
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    # It starts in another directory than ours.
    environment |= {name: os.path.abspath(path) for name, path in environment.items() if name[:4] == "K8E_" and path}
    with os.fdopen(ours, "rb", buffering=0) as ready, open(log, "ab", opener=open_private) as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs,),
                start_new_session=True,
                cwd="/",
                env=environment,
            )
        finally:
            os.close(theirs)
        # It outlives us, or ends when it likes: whichever it is, it leaves no dead child of a process that lives long.
        process.returncode = 0  # subprocess is not to warn about that
        start_new_thread(os.waitpid, (process.pid, 0))
        message = read_to_end(ready.fileno())
        if message == b"ready\n":
            return
    raise failed_start(message, log)


def read_to_end(ready: int) -> bytes:
    """Returns what the daemon writes before it closes its end: that it is ready, why it is not, or nothing."""
    message = b""
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    while poll.poll(PATIENCE * 1000):
        piece = os.read(ready, 4096)
        if not piece:
            break
        message += piece
    return message


def open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def failed_start(message: bytes, log: Path) -> Failure:
    try:
        return Failure(**json.loads(message), status=UNREACHABLE)
    except (ValueError, TypeError):
        cause = repr(message) if message else "it ended without a word"
        return Failure(
            "daemon_not_started", "the daemon did not start", detail=cause, hint=f"see {log}", status=UNREACHABLE
        )
