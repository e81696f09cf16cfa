"""The daemon's process, found by its lock: whether it runs, and its end."""

from __future__ import annotations

import fcntl
import os
import select
import signal

from k8e.cli.client import run_dir
from k8e.cli.process import Failure

STOPPING = 60.0


def stop_daemon() -> int:
    """Returns its process id when it has ended."""
    pid = read_pid()
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return pid
    try:
        # The number may have passed to another process before we held a descriptor; the lock would tell.
        if is_running() and read_pid() == pid:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            wait_for_end(process, pid)
    finally:
        os.close(process)
    return pid


def wait_for_end(process: int, pid: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if not poll.poll(STOPPING * 1000):
        raise Failure("daemon_not_stopped", "the daemon does not stop", detail=f"pid {pid}", hint="see its log")


def is_running() -> bool:
    """Whether a process holds the daemon's lock, or, where we may not look at it, whether there is a socket."""
    try:
        descriptor = os.open(os.path.join(run_dir(), "k8e.lock"), os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except PermissionError:
        return os.path.exists(os.path.join(run_dir(), "k8e.sock"))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def read_pid() -> int:
    try:
        with open(os.path.join(run_dir(), "k8e.lock"), encoding="ascii") as file:
            return int(file.read(32) or 0)
    except (OSError, ValueError):
        return 0
