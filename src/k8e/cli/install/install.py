"""The installation's part of `k8e doctor --fix`: a whole installation, for every user of the machine. Each step does
nothing where there is nothing to do; one that cannot be done says so, and the others are done all the same."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from k8e.cli.client.daemon_process import is_running
from k8e.cli.install import files, program, systemd
from k8e.cli.install.places import CURRENT, GROUP, LIBRARY, is_installed_here, is_roots
from k8e.cli.install.record import Record
from k8e.cli.process import Failure
from k8e.engine.local.doctor.fixes import Step

CHECKOUT = "this is a checkout: `make release`, then `pipx install dist/k8e-*.whl` and its `k8e doctor --fix`"


def hand_over(words: list[str]) -> None:
    """Where this is the installed program and the environment that it came from is still there, that one goes on: pipx
    or uv may have upgraded it. Does not return then."""
    source = Record.read().source if is_installed_here() else ""
    script = os.path.join(source, "bin", "k8e")
    real = Path(os.path.realpath(script))
    if source and os.path.exists(script) and all(map(is_roots, (real, *real.parents))):
        os.execv(script, [script, *words])


def install(done: list[Step]) -> Iterator[Step]:
    """Yields each step when it has been tried; `done` are those before it."""
    if program.is_checkout():
        yield Step("install k8e for every user", False, CHECKOUT)
        return
    LIBRARY.mkdir(mode=0o755, parents=True, exist_ok=True)
    with hold_lock():
        before = os.path.realpath(CURRENT)
        record = Record.read()
        packages = [name for step in done for name in step.packages]
        record = record.note(packages=tuple(sorted({*record.packages, *packages})))
        yield from attempt(f"make the group {GROUP}", lambda: make_group(record))
        yield from attempt(f"install the program in {LIBRARY}", copy_program)
        if not CURRENT.exists():
            return  # commands without a program are worse than none
        yield from attempt("put the commands on every user's PATH", lambda: tell(program.install_commands()))
        for kind, written, strange in files.install_files():
            if written:
                yield Step(f"install {kind}: {' '.join(map(str, written))}", True)
            if strange:
                yield Step(f"install {kind}", False, f"in the way: {' '.join(map(str, strange))}; move it away")
        yield from enable_service()
        if os.path.realpath(CURRENT) != before and is_running():
            detail = "it goes on with the version before; `systemctl restart k8e` when it suits, sandboxes live on"
            yield Step("the daemon that runs", True, detail)
        program.remove_old_copies()


@contextlib.contextmanager
def hold_lock() -> Iterator[None]:
    """Two at once would remove each other's copies."""
    handle = os.open(LIBRARY, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def attempt(what: str, act: Callable[[], str]) -> Iterator[Step]:
    """`act` says what it did; nothing where there was nothing to do."""
    try:
        if detail := act():
            yield Step(what, True, detail)
    except Failure as failure:
        yield Step(what, False, "; ".join(filter(None, (failure.error, failure.detail, failure.hint))))
    except OSError as error:
        yield Step(what, False, str(error))


def tell(paths: list[Path]) -> str:
    return " ".join(map(str, paths))


def make_group(record: Record) -> str:
    try:
        grp.getgrnam(GROUP)
        return ""
    except KeyError:
        pass
    Record.read().note(made_group=True)
    done = subprocess.run(["groupadd", "--system", GROUP], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        Record.read().note(made_group=record.made_group)
        hint = f"groupadd --system {GROUP}"
        raise Failure("install_failed", "the group cannot be made", detail=done.stderr.strip(), hint=hint)
    return "its members may use the daemon: usermod -aG k8e USER"


def copy_program() -> str:
    if is_installed_here():
        return ""  # the environment that it came from is gone: it stays as it is
    copy = program.install_program()
    Record.read().note(source=sys.prefix)
    return str(copy) if copy else ""


def enable_service() -> Iterator[Step]:
    if not systemd.runs():
        detail = "systemd does not run here: the unit is there for when it does; root's first command starts the daemon"
        yield Step("enable the service", False, detail)
        return
    enabled = systemd.ask("is-enabled", "--quiet", systemd.UNIT) == 0
    active = systemd.is_active()
    # A daemon that a command started keeps its sandboxes and its socket: the service takes over after it.
    alone = is_running() and not active
    if enabled and (active or alone):
        return

    def enable() -> str:
        systemd.enable(start=not alone)
        return (
            "after the daemon that runs now: `agentkernel daemon stop && systemctl start k8e`" if alone else "started"
        )

    yield from attempt("enable the service", enable)
