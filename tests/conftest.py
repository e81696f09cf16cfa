"""What every test may count on, however the suite was started: from a terminal, in the background of a shell, by a CI
job without a terminal and without stdin, or after another run of it was killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.shares import Share, settle

# Names of ours by which a developer or a CI job chooses how long tests run; all others would reach the programs tested.
_OURS = (
    "K8E_SOAK",
    "K8E_KILLS",
    "K8E_CYCLES",
    "K8E_ROUNDS",
    "K8E_FUZZ_",
    "K8E_SEED",
    "K8E_SHARE",
    "K8E_SINCE",
    "K8E_CLUSTER",
)

TESTS = Path(__file__).parent
# The files that take long and how many seconds, as the last whole run found them: `make seconds` writes it.
SECONDS = TESTS / "seconds.json"


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job has SIGINT ignored, nohup SIGHUP, and so would everything that tests start.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # How long an example takes says how busy the machine is.
    # On machines of CI it would take the same examples each time.
    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False, print_blob=True
    )
    settings.load_profile("untimed")
    os.umask(0o022)
    # Some machines have it: then we, and every interpreter that we start, would compile everything each time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    _open_missing_descriptors()
    for name in list(os.environ):
        if name.startswith("K8E_") and not name.startswith(_OURS):
            del os.environ[name]
    # Where Debian has mount, mkfs and nft, and users and CI jobs often do not look.
    path = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":")
    os.environ["PATH"] = ":".join([*path, *(place for place in ("/usr/sbin", "/sbin") if place not in path)])
    settle(os.environ)
    Share.parse(os.environ["K8E_SHARE"])
    from tests.ledger import Ledger  # not before the environment is what it should be
    from tests.seconds import Seconds

    config.pluginmanager.register(Ledger(config))
    config.pluginmanager.register(Seconds(config))


def pytest_report_header() -> list[str]:
    from tests.changes import current_changes

    chosen = f"K8E_SHARE={os.environ['K8E_SHARE']} K8E_SEED={os.environ['K8E_SEED']}"
    return [f"k8e: {chosen} run the same again; {current_changes()}"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where workers take a file each, the long ones first: one that begins last is all that one of two cores does."""
    if not hasattr(config, "workerinput"):
        return
    count = Counter(item.path for item in items)
    seconds: dict[str, float] = json.loads(SECONDS.read_text())
    items.sort(key=lambda item: (-seconds.get(_name(item), 0), -count[item.path], item.path))


def _name(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix()


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
