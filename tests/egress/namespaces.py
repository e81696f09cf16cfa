"""A machine of the tests' own: a network namespace that stands in for the host's.

Engines and daemons that a test starts inside find there the network, the rules and the routes of a machine that has
nothing but the tests' own internet behind it. No packet can reach a foreign address, and nothing here meets what other
engines on the real machine do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def unshare_network() -> None:
    if _libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def enter_network(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def run_ip(*words: str, inside: int | None = None) -> None:
    """`ip` in this namespace, or in that of a process."""
    command = ["nsenter", f"--net=/proc/{inside}/ns/net"] if inside is not None else []
    done = subprocess.run([*command, "ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@contextlib.contextmanager
def private_machine() -> Iterator[None]:
    """This thread, and every thread and process that it starts, is on a machine of its own until the end.

    Only the thread that runs the event loop may do that: what others do has to come from it."""
    assert threading.current_thread() is threading.main_thread()
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare_network()
        run_ip("link", "set", "lo", "up")
        yield
    finally:
        enter_network(before)
        os.close(before)
