"""What every test may count on, however the suite was started: from a terminal, in the background of a shell, by a CI
job without a terminal and without stdin, or after another run of it was killed."""

from __future__ import annotations

import os
import signal

import pytest

# Names of ours by which a developer or a CI job chooses how long tests run; all others would reach the programs tested.
_OURS = ("K8E_SOAK", "K8E_KILLS", "K8E_CYCLES", "K8E_FUZZ_", "K8E_SEED")


def pytest_configure() -> None:
    # A shell's background job has SIGINT ignored, nohup SIGHUP, and so would everything that tests start.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    _open_missing_descriptors()
    for name in list(os.environ):
        if name.startswith("K8E_") and not name.startswith(_OURS):
            del os.environ[name]
    # Where Debian has mount, mkfs and nft, and users and CI jobs often do not look.
    path = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":")
    os.environ["PATH"] = ":".join([*path, *(place for place in ("/usr/sbin", "/sbin") if place not in path)])


def _open_missing_descriptors() -> None:
    """Else the next file or socket that is opened gets the number 0, 1 or 2 and is taken for what it is not."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio only: it is what the daemon runs on."""
    return "asyncio"
